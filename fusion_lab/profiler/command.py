"""A session of PyTorch's profiler, or an ablation, from its command line to the line of JSON."""
from fusion_lab.training import errors

errors.quiet(__name__, "torch", "numpy", "tqdm")

import os
import sys
import time

from fusion_lab.measuring.analysis import ANALYSIS
from fusion_lab.measuring.variants import GIVEN, with_fusion
from fusion_lab.profiler.arguments import SCRIPT, parse
from fusion_lab.profiler.report import read_analysis
from fusion_lab.profiler.session import SUMMARY, ablation, ablation_names, run_session
from fusion_lab.training import reporting, torchrun
from fusion_lab.training.directory import RunDirectory
from fusion_lab.training.errors import exit_code
from fusion_lab.training.files import finite
from fusion_lab.training.flags import named_program
from fusion_lab.training.machine import choose_device, require_memory
from fusion_lab.training.program import load_program

HEADLINES = ("mode", "findings", "step", "folders")
STEP = ("untraced_ms", "p20_ms", "p80_ms", "gpu_busy_ms")  # of a session's step


def earlier_session(arguments, profiler):
    """(name, analysis) of the session that --compare-with names, or None."""
    if not arguments.compare_with:
        return None
    name, analysis = arguments.compare_with, read_analysis(arguments.compare_with)
    if os.path.realpath(name) == os.path.realpath(profiler.profile_dir):
        name = f"the earlier session in {name}"  # which is about to be moved aside
    return name, analysis


def sessions(program, settings, arguments, train):
    """The session or sessions that are asked for; returns the content and the path of their main file. train:
    as of run_session()."""
    earlier = earlier_session(arguments, settings.profiler)
    require_memory(program, choose_device(settings.training.device), settings)  # before anything is moved
    directory = RunDirectory(program, settings)
    if arguments.ablation and not directory.named:
        directory.path += f"_ablation_{time.strftime('%Y%m%d_%H%M%S')}"
    directory = directory.claim().path
    options = dict(train=train, roofline=arguments.roofline)
    if arguments.ablation or arguments.compare_v1:
        names = ablation_names(program) if arguments.ablation else [GIVEN]  # beside the baseline
        rounds = getattr(arguments, "num_steps", None)
        result = ablation(program, settings, directory, names, rounds, **options)
        return result, os.path.join(directory, f"{SUMMARY}.json")
    result = run_session(program, settings, directory, **options, earlier=earlier)
    return result, os.path.join(directory, ANALYSIS)


def run(argv=None):
    """Parse the command line and do what it asks; returns the exit code. Raises UserError."""
    argv = sys.argv[1:] if argv is None else argv
    default = load_program()
    train = sys.modules[default.trainer.__module__].train  # the only run, beside the only Trainer
    program = named_program(argv, default)
    arguments, settings = parse(argv, program)
    torchrun.require_alone(SCRIPT)
    if arguments.baseline:
        settings = with_fusion(settings, program.fusion_config.preset(False))
    result, path = sessions(program, settings, arguments, train)
    headline = finite({key: result[key] for key in HEADLINES if key in result})
    if "step" in headline:
        headline["step"] = {key: headline["step"][key] for key in STEP}
    if "variants" in result:
        headline["variants"] = [dict(name=row["name"], speedup=row["speedup"])
                                for row in result["variants"] if row["measured"]]
    if not (reporting.for_people(settings) and result["mode"] == "pytorch_profiler"):  # ends in its findings
        reporting.print_result(headline, path, settings)
    return 0


if __name__ == "__main__":
    sys.exit(exit_code(run, None, SCRIPT))
