"""One session of the PyTorch profiler: a training run with the profiler on, and a report of what it found."""
import os

from fusion_lab.measuring.analysis import ANALYSIS
from fusion_lab.measuring.roofline import measure_ceilings, roofline_rows, roofline_table
from fusion_lab.measuring.tables import aligned
from fusion_lab.measuring.trace import TraceAnalysis, read_trace
from fusion_lab.profiler.report import REPORT, compare_sessions, comparison_lines, write_report
from fusion_lab.training.files import FAILED, UserError, read_json
from fusion_lab.training.machine import choose_device


def run_session(program, settings, directory, train, roofline=False, earlier=None):
    """A whole session into a directory; returns its analysis, as JSON has it. train: train(program, settings)
    runs it. earlier: (name, analysis) to compare with. Raises UserError where it ended before its trace, and
    where a signal ended it, after the report on what is there."""
    settings = settings.having(enable_pytorch_profiler=True, enable_memory_profiling=True,
                               profile_dir=directory)
    code = train(program, settings)
    path = os.path.join(directory, ANALYSIS)
    if not os.path.exists(path):
        raise UserError(f"{'interrupted' if code else 'ended'} before the trace, so there is no report",
                        code or FAILED)
    analysis = read_json(path)
    if roofline and not code:
        ceilings = measure_ceilings(choose_device(settings.training.device), settings.training)
        analysis.update(ceilings=ceilings, roofline=roofline_table(program, settings, ceilings,
                                                                   seconds_of_sublayers(analysis)))
    if earlier:
        analysis["compared_with"] = compare_sessions(earlier[1], analysis, earlier[0])
    trace = TraceAnalysis(read_trace(os.path.join(directory, analysis["trace"])), program.model.SUBLAYERS)
    pictures = write_report(directory, program, settings, analysis, trace)
    print_session(analysis, directory, pictures)
    if code:
        raise UserError("interrupted: the report is of the steps that there were", code)
    return analysis


def seconds_of_sublayers(analysis):
    """{sub-layer: seconds per step, forward and backward}"""
    measured = {}
    for e in analysis["sublayers"]:
        measured[e["name"]] = measured.get(e["name"], 0.0) + e["total_us"] / 1e6
    return measured


def print_session(analysis, directory, pictures):
    """What a session says on the terminal, the findings last."""
    if "roofline" in analysis:
        print("\n".join(aligned(roofline_rows(analysis["roofline"]))))
    if "compared_with" in analysis:
        print("\n".join(comparison_lines(analysis["compared_with"])))
    print(f"Results in {directory}: {', '.join([REPORT, ANALYSIS, analysis['trace'], *pictures])}")
    for text in analysis["unrecorded"]:
        print(f"Caution: {text}")
    print("Findings:")
    for number, text in enumerate(analysis["findings"], 1):
        print(f"   {number}. {text}")
