"""Sessions of the PyTorch profiler: a training run with the profiler on and a report of what it found; and an
ablation, which is a comparison and a session of each of its rows."""
import contextlib
import os
from collections import Counter

from fusion_lab.measuring import variants
from fusion_lab.measuring.analysis import ANALYSIS
from fusion_lab.measuring.bench import release
from fusion_lab.measuring.compare import compare
from fusion_lab.measuring.comparison_table import Notes, below, table, to_copy
from fusion_lab.measuring.roofline import measure_ceilings, roofline_rows, roofline_table
from fusion_lab.measuring.tables import markdown
from fusion_lab.measuring.trace import TraceAnalysis, read_trace
from fusion_lab.measuring.variants import BASELINE, COMPILED, FUSED, ONLY, WITHOUT
from fusion_lab.profiler import report
from fusion_lab.profiler.plots import write_ablation_plot, write_plots
from fusion_lab.training.errors import FAILED, StopRequest, UserError
from fusion_lab.training.files import finite, read_json, write_json, write_text
from fusion_lab.training.machine import choose_device
from fusion_lab.training.reporting import command_of

SUMMARY = "ablation_summary"


def run_session(program, settings, directory, train, roofline=False, earlier=None):
    """A whole session into a directory; returns its analysis, as JSON has it. train: train(program, settings)
    runs it. earlier: (name, analysis) to compare with. Raises UserError where it ended before its trace, and
    where a signal ended it, after the report on what is there."""
    settings = settings.having(enable_pytorch_profiler=True, enable_memory_profiling=True,
                               profile_dir=directory)
    code = train(program, settings)
    path = os.path.join(directory, ANALYSIS)
    if not os.path.exists(path):
        raise UserError(f"{'interrupted' if code > 128 else 'ended'} before the trace, so there is no report",
                        code or FAILED)
    analysis = read_json(path)
    if roofline and not code:
        device = choose_device(settings.training.device)
        ceilings = measure_ceilings(device, settings.training)
        measured = Counter()
        for e in analysis["sublayers"]:
            measured[e["name"]] += e["total_us"] / 1e6
        analysis.update(ceilings=ceilings, roofline=roofline_table(program, settings, device.type == "cuda",
                                                                   ceilings, measured))
    if earlier:
        analysis["compared_with"] = report.compare_sessions(earlier[1], analysis, earlier[0])
    trace = TraceAnalysis(read_trace(os.path.join(directory, analysis["trace"])), program.model.SUBLAYERS)
    write_json(path, finite(analysis))
    path = os.path.join(directory, report.REPORT)
    write_text(path, report.text(program, settings, analysis))  # before pictures, which may fail or last
    pictures = [] if code else write_plots(directory, analysis, trace)
    write_text(path, report.text(program, settings, analysis, pictures))
    print_session(analysis, directory, pictures)
    print(f"To copy, without the profiler: {command_of(program, settings)}")
    if code:
        raise UserError("interrupted: the report is of the steps that there were", code)
    return analysis


def print_session(analysis, directory, pictures):
    """What a session says on the terminal, the findings last."""
    if "roofline" in analysis:
        print("\n".join(markdown(roofline_rows(analysis["roofline"]))))
    if "compared_with" in analysis:
        print("\n".join(report.comparison_lines(analysis["compared_with"], analysis["unit"])))
    print(f"Results in {directory}: {', '.join([report.REPORT, ANALYSIS, analysis['trace'], *pictures])}")
    for text in analysis["unrecorded"]:
        print(f"Caution: {text}")
    print("Findings:")
    for number, text in enumerate(analysis["findings"], 1):
        print(f"   {number}. {text}")


def ablation_names(program):
    """The baseline, each default fusion alone, all of them, all without each one, and all compiled."""
    usual = program.fusion_config()
    switches = [variants.spelled(name) for name in usual.names() if getattr(usual, name)]
    return [BASELINE, *(f"{ONLY}{name}" for name in switches), FUSED,
            *(f"{WITHOUT}{name}" for name in switches), COMPILED]


def ablation(program, settings, directory, names, rounds, **options):
    """compare() of variants by name, then a session of each that was measured, with run_session's options, in
    a folder of its own; what a session prints goes into a log beside its folder. Returns the content of
    ablation_summary.json, which is written again after each session. Raises UserError after a signal."""
    path, folders, baseline = os.path.join(directory, SUMMARY), {}, None

    def save(comparison):
        result = dict(comparison.as_dict(), mode="ablation", folders=folders)
        write_json(f"{path}.json", result)
        return result

    comparison = compare(program, settings, names, rounds, save, Notes(), stop := StopRequest())
    release()
    if stop.signal:
        raise UserError("interrupted: what is known so far was kept", 128 + stop.signal)
    last = to_copy(program, settings, comparison.rows)
    lines, result = [*table(comparison.rows), "", *below(comparison), "", *last], save(comparison)
    print("\n".join(lines))
    about = f"{report.machine_line(result)}, {program.sample(settings)}."
    write_text(f"{path}.md", "\n".join(["# Ablation", "", about, "", *lines, ""]))
    write_ablation_plot(f"{path}.png", result["variants"])
    for name in [row.name for row in comparison.rows if row.measured]:
        chosen = variants.with_fusion(settings, variants.fusion_named(name, settings.fusion))
        place = os.path.join(directory, name)
        print(f"Session of {name} in {place}", flush=True)
        with open(f"{place}.log", "w", encoding="utf-8") as log, contextlib.redirect_stdout(log):
            analysis = run_session(program, chosen, place, **options, earlier=baseline)
        baseline = baseline or (place, analysis)
        release()
        folders[name] = name
        result = save(comparison)
    return result
