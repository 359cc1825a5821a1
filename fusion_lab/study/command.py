"""How speed and memory of each fusion setting change with batch, length and depth, and which one to use.

The work behind launch_performance_study.sh: command line, study directory, and the order of things. Reading
order: study_design (what is measured), study_runner (how), study_statistics and study_summary (what it says),
study_decisions (what to do), study_plots and study_report (how it looks).
"""
import argparse
import contextlib
import dataclasses
import fcntl
import json
import os
import re
import shlex
import shutil
import signal
import sys
import textwrap
import time

import torch

from fusion_lab.measuring.plotting import require_matplotlib
from fusion_lab.measuring.tables import aligned
from fusion_lab.study import design
from fusion_lab.study.batch_size import device_memory_mb, find_batch_sizes
from fusion_lab.study.plots import draw
from fusion_lab.study.recommendation import Accuracy, print_recommendation, recommend
from fusion_lab.study.regression import check, read_reference, speedup_text
from fusion_lab.study.report import report
from fusion_lab.study.runner import (
    VISIBLE_GPUS,
    Results,
    Runner,
    Stopped,
    duration,
    raise_stopped,
    run_points,
    seconds_left,
)
from fusion_lab.study.summary import as_csv, summarise
from fusion_lab.training.files import UserError, write_atomically, write_json
from fusion_lab.training.flags import MODES, Parser, ProfilerConfig, flag, read_configs
from fusion_lab.training.flags import make_parser as trainer_parser
from fusion_lab.training.machine import choose_device, cpu_name

SCRIPT = "launch_performance_study.sh"
SPARE_BYTES = 20 * 2 ** 20  # results, report and logs of a large study
LOCK_PATIENCE_SECONDS = 5
OWNED = {"batch_size", "seq_len", "num_seqs", "num_steps", "warmup_steps", "log_every", "use_amp",
         "amp_dtype", "device", "save_checkpoint", "resume", "plot_contacts", "compare_with_v1",
         "fusion_preset", "enable_all_profiling",
         *(f.name for f in dataclasses.fields(ProfilerConfig)),
         *design.SWITCHES.values(), *(name[2:].replace("-", "_") for name in MODES)}
EPILOG = f"""Everything after -- goes to tiny_openfold_v2.py for every point, model sizes for instance.

settings: {', '.join(design.NAMED)}, only-X, without-X, X+Y; baseline is no fusion, fused the defaults,
compiled the defaults with torch.compile, all whatever makes steps faster. X and Y are among
{textwrap.fill(', '.join(design.SWITCHES), 100, initial_indent="  ", subsequent_indent="  ",
               break_on_hyphens=False)}

examples:
  ./{SCRIPT} --batch-sizes "2 4 8" --seq-lens "32 64 128" --num-runs 3
  ./{SCRIPT} --batch-sizes 4 --seq-lens 64 --ablation --study-name ablation
  ./{SCRIPT} --settings "baseline fused all" --amp-dtype bfloat16 --jobs 8 -- --num-blocks 8
  ./{SCRIPT} --check-against results_summary.json --min-speedup 1.3 --max-regression 5%
  ./{SCRIPT} --find-batch-size --seq-lens 128 --target-memory-usage 0.8

exit codes: 0 done, 1 the check failed or nothing could be measured, 2 wrong use, 3 package missing, 4 no such
GPU, 130 or 143 interrupted: the same command with that --study-name continues
"""


# Command line

def size_list(text):
    words = text.replace(",", " ").split()
    if not words or not all(word.isascii() and word.isdigit() and int(word) > 0 for word in words):
        raise argparse.ArgumentTypeError(f'{text!r}: must be whole numbers of at least 1, such as "2 4 8"')
    return sorted({int(word) for word in words})


def setting_list(text):
    try:
        names = [design.setting_name(design.parse_setting(word)) for word in text.replace(",", " ").split()]
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    if not names:
        raise argparse.ArgumentTypeError(f'{text!r}: must be settings, such as "baseline fused"')
    return names


def switch_list(text):
    words = list(dict.fromkeys(text.replace(",", " ").split()))
    unknown = [word for word in words if word not in design.SWITCHES]
    if unknown or not words:
        wrong = unknown[0] if unknown else text
        raise argparse.ArgumentTypeError(f"{wrong!r}: must be among {', '.join(design.SWITCHES)}")
    return words


def whole(low):
    def convert(text):
        if not text.isascii() or not text.isdigit() or int(text) < low:
            raise argparse.ArgumentTypeError(f"{text!r}: must be a whole number of at least {low}")
        return int(text)
    return convert


def positive(limit=float("inf")):
    def convert(text):
        try:
            value = float(text)
        except ValueError:
            value = 0.0
        if not 0 < value <= limit or value == float("inf"):
            raise argparse.ArgumentTypeError(
                f"{text!r}: must be a number above 0" + (f", at most {limit:g}" if limit < 1e9 else ""))
        return value
    return convert


def share(text):
    match = re.fullmatch(r"(\d+(?:\.\d*)?|\.\d+)(%?)", text)
    if not match or not match[2] and float(match[1]) > 1:  # 5 means 5% to some and 500% to others
        raise argparse.ArgumentTypeError(f"{text!r}: must be a share such as 5% or 0.05")
    return float(match[1]) / (100 if match[2] else 1)


def make_parser():
    parser = Parser(prog=SCRIPT, description=__doc__.partition("\n")[0], epilog=EPILOG, allow_abbrev=False,
                    usage=f"./{SCRIPT} [options] [-- flags of tiny_openfold_v2.py]",
                    formatter_class=lambda prog: argparse.RawDescriptionHelpFormatter(prog, width=110))
    add = parser.add_argument_group("What is measured").add_argument
    add("--batch-sizes", type=size_list, default=[2, 4], metavar="LIST", help='default: "2 4"')
    add("--seq-lens", type=size_list, default=[32, 64], metavar="LIST", help='default: "32 64"')
    add("--num-seqs", type=size_list, default=[16], metavar="LIST", help="alignment rows (default: 16)")
    add("--num-runs", type=whole(1), default=3, metavar="N",
        help="processes per point, each more narrows the intervals, which need two; may grow when a study is "
             "continued (default: %(default)s)")
    add("--settings", type=setting_list, metavar="LIST",
        help='see below (default: "baseline fused"; with --find-batch-size: fused)')
    add("--no-baseline", action="store_true", help="leave the baseline out (default: off)")
    add("--ablation", action="store_true",
        help="add each fusion alone, each left out, all and none (default: off)")
    add("--all-combinations", action="store_true", help="add every combination of switches (default: off)")
    add("--switches", type=switch_list, metavar="LIST",
        default=[name for name in design.SWITCHES if name in design.ALL],
        help="what --ablation and --all-combinations combine; others stay off (default: those of all)")
    add("--num-steps", type=whole(1), default=20, metavar="N", help="measured steps (default: %(default)s)")
    add("--warmup-steps", type=whole(0), default=5, metavar="N",
        help="steps before them (default: %(default)s)")
    add("--device", default="auto", help="as for the trainer (default: %(default)s)")
    add("--amp-dtype", choices=("float16", "bfloat16"),
        help="mixed precision in this type (default: float32)")
    add = parser.add_argument_group("How").add_argument
    add("--study-name", metavar="DIR", help="directory of the study; one that exists is continued "
        "(default: performance_study_<time>)")
    add("--seed", type=whole(0), default=42, help="of the order of points (default: %(default)s)")
    add("--jobs", type=whole(1), default=1, metavar="N",
        help="points that start, compile and warm up at the same time; they measure in planned order, and "
             "while one does, the others are stopped (default: %(default)s)")
    add("--gpus", type=whole(1), default=1, metavar="N",
        help="with --jobs, spread their processes over the first N GPUs, which must be alike; still one at a "
             "time measures (default: %(default)s)")
    add("--timeout", type=positive(), default=900.0, metavar="SECONDS",
        help="per point (default: %(default)g)")
    add("--retry-failed", action="store_true", help="when continuing, run failed points again (default: off)")
    add("--report-only", action="store_true",
        help="run nothing: summary and report of the runs that --study-name holds (default: off)")
    add("--no-plots", action="store_true",
        help="a report without plots, so without matplotlib (default: off)")
    add("--dry-run", action="store_true", help="list points and an estimate, run nothing (default: off)")
    add_decisions(parser.add_argument_group("What to do with it").add_argument)
    return parser


def add_decisions(add):
    add("--recommend", action="store_true",
        help="per shape, the fastest setting that passes --verify-accuracy within --memory-limit-mb "
             "(default: off)")
    add("--memory-limit-mb", type=positive(), metavar="MB",
        help="of tensor memory, MB of 2**20 bytes (default: none; --find-batch-size: the GPU's memory)")
    add("--check-against", metavar="FILE",
        help="compare with an earlier results_summary.json; exit code 1 if a point got worse beyond noise or "
             "if noise leaves every verdict on time undecided")
    add("--min-speedup", type=positive(), metavar="X",
        help="with --check-against, wanted of the settings fused, compiled and all (default: none)")
    add("--max-regression", type=share, default=0.05, metavar="SHARE",
        help="with --check-against, allowed loss of time or memory (default: 5%%)")
    add("--find-batch-size", action="store_true",
        help="find the best batch per length, depth and setting, instead of a study (default: off)")
    add("--target-memory-usage", type=positive(1.0), default=0.8, metavar="SHARE",
        help="share of the memory that a batch may use (default: %(default)s)")
    add("--optimize", choices=("throughput", "memory"), default="throughput",
        help="the batch with most samples/s, or the largest that fits (default: %(default)s)")


def choose_settings(options):
    names = options.settings or (["fused"] if options.find_batch_size else ["baseline", "fused"])
    wanted = [design.parse_setting(name) for name in names]
    if options.ablation:
        wanted += design.ablation(options.switches)
    if options.all_combinations:
        wanted += design.combinations(options.switches)
    names = list(dict.fromkeys(design.setting_name(on) for on in wanted))
    return [name for name in names if not (options.no_baseline and name == "baseline")]


def parse(argv):
    """(options, study): the study is everything that a result depends on. Ends the program on wrong use."""
    cut = argv.index("--") if "--" in argv else len(argv)
    parser = make_parser()
    options = parser.parse_args(argv[:cut])
    study = dict(
        mode="find-batch-size" if options.find_batch_size else "study",
        batch_sizes=[] if options.find_batch_size else options.batch_sizes, seq_lens=options.seq_lens,
        num_seqs=options.num_seqs, settings=choose_settings(options), switches=options.switches,
        num_runs=1 if options.find_batch_size else options.num_runs, num_steps=options.num_steps,
        warmup_steps=options.warmup_steps, device=options.device, amp_dtype=options.amp_dtype,
        trainer_flags=argv[cut + 1:], seed=options.seed, torch_version=torch.__version__, host_cpu=cpu_name())
    if not study["settings"]:
        parser.error("argument --no-baseline: no setting is left, so there are zero points")
    check_combinations(parser, options, study)
    check_trainer_flags(parser, study)
    limit = options.memory_limit_mb or options.find_batch_size and device_memory_mb(options.device)
    if options.find_batch_size and not limit:
        parser.error("argument --find-batch-size: without a GPU needs --memory-limit-mb")
    return options, study


def check_combinations(parser, options, study):
    """End the program where options contradict each other."""
    if options.min_speedup and not options.check_against:
        parser.error("argument --min-speedup: needs --check-against")
    if options.min_speedup and "baseline" not in study["settings"]:
        parser.error("argument --min-speedup: needs the baseline among the settings")
    if options.find_batch_size and (options.check_against or options.recommend or options.dry_run):
        parser.error("argument --find-batch-size: not with --check-against, --recommend or --dry-run")
    if options.report_only and (not options.study_name or options.check_against or options.recommend):
        parser.error("argument --report-only: needs --study-name, not with --check-against or --recommend")
    if options.gpus > 1 and options.device not in ("auto", "cuda"):
        parser.error(f"argument --gpus: not with --device {options.device}")
    if options.device not in ("auto", "cpu"):
        choose_device(options.device)


def check_trainer_flags(parser, study):
    """Let the trainer's own parser and configs judge every point before the first one runs."""
    theirs = trainer_parser()
    theirs.prog = f"{SCRIPT}: flags after --"
    plain, given = vars(theirs.parse_args([])), vars(theirs.parse_args(study["trainer_flags"]))
    for name, value in given.items():
        if name in OWNED and (name not in plain or plain[name] != value):
            parser.error(f"flag {flag(name)} after --: the study sets it itself")
    shapes = design.shapes(dict(study, batch_sizes=study["batch_sizes"] or [1]))
    for shape, setting in [*((shape, study["settings"][0]) for shape in shapes),
                           *((shapes[0], setting) for setting in study["settings"])]:
        try:
            read_configs(theirs.parse_args(design.point_flags(study, shape, setting)))
        except ValueError as error:
            name, _, rest = str(error).partition(" = ")
            parser.error(f"argument {flag(name)}: {rest}")


# The study directory

def open_directory(options, study, argv):
    """Make or find the study's directory and return its path. Raises UserError."""
    path = os.path.abspath(options.study_name or time.strftime("performance_study_%Y%m%d_%H%M%S"))
    config = os.path.join(path, "config.json")
    if options.study_name is None and os.path.exists(path):
        os.rename(path, path + time.strftime(".old-%Y%m%d_%H%M%S"))
    if not os.path.exists(config):
        if os.path.isdir(path) and os.listdir(path):
            raise UserError(f"--study-name {options.study_name}: is not empty and holds no study")
        write_json(config, dict(study=study, command=command_of(argv),
                                created=time.strftime("%Y-%m-%dT%H:%M:%S%z")))
    free = shutil.disk_usage(path).free
    if free < SPARE_BYTES:
        raise UserError(f"cannot write {path}: {free / 2 ** 20:.0f} MB free, "
                        f"{SPARE_BYTES / 2 ** 20:.0f} MB needed: disk full")
    return path


def command_of(argv):
    return shlex.join([f"./{SCRIPT}", *argv])


@contextlib.contextmanager
def locked(path):
    """The study's directory, for this process alone. A killed study's lock outlives it for as long as a point
    that it was starting just then takes from fork to exec, hence the patience."""
    lock, deadline = os.open(path, os.O_RDONLY), time.monotonic() + LOCK_PATIENCE_SECONDS
    try:
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except OSError:
                if time.monotonic() > deadline:
                    raise UserError(f"{path}: this study is running already") from None
                time.sleep(0.05)
        yield
    finally:
        os.close(lock)


def require_same_study(directory, study):
    """The config of a study that this one continues: all is as it was, but there may be more runs."""
    config = read_config(directory)
    before = config["study"]
    different = [f"{key} {before.get(key)} there, {value} now" for key, value in study.items()
                 if before.get(key) != value and not (key == "num_runs" and value > before.get(key, value))]
    if different:
        raise UserError(f"{directory}: a study with other settings ({'; '.join(different)}); only --num-runs "
                        "may differ, and only grow; choose another --study-name")
    return config


def read_config(directory):
    path = os.path.join(directory, "config.json")
    try:
        with open(path, encoding="utf-8") as file:
            config = json.load(file)
        if isinstance(config["study"], dict) and config["command"] and config["created"]:
            return config
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}") from None
    except (ValueError, KeyError, TypeError):
        pass
    raise UserError(f"{path}: not the config of a study")


# What happens

def dry_run(options, study):
    points, rows = design.points(study), []
    if options.study_name and os.path.exists(os.path.join(options.study_name, "config.json")):
        require_same_study(options.study_name, study)
        results = Results(options.study_name)
        results.load(mend=False)
        rows = results.rows
    done = {design.Point.of(row) for row in rows}
    todo = [point for point in points if point not in done]
    for point in todo:
        print(f"{point}: {shlex.join(design.point_flags(study, point.shape, point.setting))}")
    basis = "from the finished ones" if rows else "a guess: start-up and compilation, steps not counted"
    print(f"{len(todo)} points to run, {len(points) - len(todo)} finished; about "
          f"{duration(seconds_left(todo, rows, options.jobs))} ({basis})")
    return 0


def earlier_recommendation(directory, summary):
    """{"recommendation": ..} of the summary in directory, if it is from the same runs; else {}."""
    def runs(of):
        return [(design.shape_of(p), p["setting"], p["run_medians_ms"]) for p in of["points"]]
    try:
        with open(os.path.join(directory, "results_summary.json"), encoding="utf-8") as file:
            earlier = json.load(file)
        return {"recommendation": earlier["recommendation"]} if runs(earlier) == runs(summary) else {}
    except (OSError, ValueError, KeyError, TypeError):
        return {}


def write_results(directory, summary, plots):
    """results_summary.json, results.csv, report.html and its PNGs."""
    summary = earlier_recommendation(directory, summary) | summary
    write_json(os.path.join(directory, "results_summary.json"), summary)
    figures = draw(summary, directory) if plots else []
    for name, text in (("results.csv", as_csv(summary)),
                       ("report.html", report(summary, read_config(directory), figures))):
        write_atomically(os.path.join(directory, name), lambda file, text=text: file.write(text.encode()))
    print(f"\nReport: {os.path.join(directory, 'report.html')}")


def print_table(summary):
    rows = [("shape", "setting", "runs", "step ms", "p20", "p80", "speed-up", "MB", "saved")]
    for p in summary["points"]:
        head = (str(design.shape_of(p)), p["setting"], str(p["n"]))
        if not p["n"]:
            rows.append((*head, p["reason"]))
            continue
        gain = "" if p["speedup"] is None or p["setting"] == "baseline" else speedup_text(p)
        memory = "n/a" if p["peak_memory_mb"] is None else f"{p['peak_memory_mb']:.1f}"
        less = "" if p["memory_reduction_percent"] is None else f"{p['memory_reduction_percent']:.1f}%"
        times = (f"{p[key]:.2f}" for key in ("median_ms", "p20_ms", "p80_ms"))
        rows.append((*head, *times, gain, memory, less))
    print("", *aligned(rows), sep="\n")


def first_gpus(number):
    """Names of the first GPUs that this process sees; none if one is enough. UserError if there are fewer."""
    if number == 1:
        return []
    found = torch.cuda.device_count()
    if number > found:
        raise UserError(f"--gpus {number}: there are {found}", code=4)
    visible = os.environ.get(VISIBLE_GPUS) or os.environ.get("CUDA_VISIBLE_DEVICES")  # ROCm obeys both
    return (visible.split(",") if visible else [str(i) for i in range(found)])[:number]


def run_study(options, study, directory, gpus, argv):
    config = require_same_study(directory, study)
    reference = read_reference(options.check_against, study) if options.check_against else None
    results = Results(directory)
    results.load()
    if options.retry_failed and (dropped := results.forget_failures()):
        print(f"{dropped} failed runs are run again")
    turns_taken = max((row.get("turn") or 0 for row in results.rows), default=0)
    runner = Runner(study, directory, options.timeout, options.jobs, gpus, turns_taken)
    accuracy = Accuracy(runner) if options.recommend else None
    if study["num_runs"] > config["study"]["num_runs"]:
        write_json(os.path.join(directory, "config.json"),
                   dict(config, study=study, command=command_of(argv)))
    print(f"Study in {directory}; to continue it if interrupted: --study-name {shlex.quote(directory)}")
    if study["mode"] == "find-batch-size":
        return find_batch_sizes(runner, results, options.memory_limit_mb,
                                          options.target_memory_usage, options.optimize)
    run_points(runner, results, design.points(study))
    summary = summarise(read_config(directory), results.rows)
    print_table(summary)
    if accuracy:
        summary["recommendation"] = recommend(summary, accuracy, options.memory_limit_mb)
        print_recommendation(summary["recommendation"])
    write_results(directory, summary, not options.no_plots)
    if not any(point["n"] for point in summary["points"]):
        raise UserError(f"no point could be measured: {summary['points'][0]['reason']}", code=1)
    if reference:
        return check(summary, reference, options.min_speedup, options.max_regression)
    return 0


def report_only(options):
    """Summary and report of whatever runs a study has, on any machine."""
    directory = os.path.abspath(options.study_name)
    results = Results(directory)
    if not os.path.exists(results.path):
        raise UserError(f"--study-name {options.study_name}: holds no results")
    if read_config(directory)["study"].get("mode") != "study":
        raise UserError(f"--study-name {options.study_name}: is a --find-batch-size, not a study")
    results.load(mend=False)
    summary = summarise(read_config(directory), results.rows)
    print_table(summary)
    write_results(directory, summary, not options.no_plots)
    return 0


def run(argv):
    options, study = parse(argv)
    if options.dry_run:
        return dry_run(options, study)
    if not options.no_plots and study["mode"] == "study":
        try:
            require_matplotlib()
        except UserError as error:
            raise UserError(f"{error}, or add --no-plots", code=error.code) from None
    if options.report_only:
        return report_only(options)
    if options.check_against:
        read_reference(options.check_against, study)
    gpus = first_gpus(options.gpus)
    directory = open_directory(options, study, argv)
    with locked(directory):
        try:
            return run_study(options, study, directory, gpus, argv)
        finally:
            shutil.rmtree(os.path.join(directory, "running"), ignore_errors=True)


def main(argv=None):
    """run(), with every expected failure as one line on stderr and its exit code."""
    previous = {number: signal.signal(number, raise_stopped) for number in (signal.SIGINT, signal.SIGTERM)}
    sys.stdout = sys.stdout or open(os.devnull, "w")  # noqa: SIM115  closed by whoever started the program
    try:
        return run(sys.argv[1:] if argv is None else argv)
    except UserError as error:
        message, code = str(error), error.code
    except Stopped as stopped:
        message = "interrupted; results so far are kept, the same --study-name continues"
        code = 128 + stopped.args[0]
    except OSError as error:
        if error.filename is None:  # stdout: its reader has gone, or its disk is full
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or Python fails again at exit
        if isinstance(error, BrokenPipeError):
            return 141
        message, code = f"cannot write {error.filename or 'output'}: {error.strerror}", 2
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
    print(f"{SCRIPT}: error: {message}", file=sys.stderr)
    return code


if __name__ == "__main__":
    sys.exit(main())
