"""One session of the PyTorch profiler: where time and memory go, by sub-layer, forward and backward."""

from fusion_lab.measuring.attribution import ANALYSIS, analysis_of
from fusion_lab.measuring.ceilings import measure_ceilings
from fusion_lab.measuring.clocks import PhaseTimer
from fusion_lab.measuring.probe import peak_of_two_steps, warm_up
from fusion_lab.measuring.ranges import Profiling
from fusion_lab.measuring.roofline import roofline_rows, roofline_table
from fusion_lab.measuring.tables import aligned
from fusion_lab.measuring.trace import PHASES
from fusion_lab.profiler.report import REPORT, compare_sessions, comparison_lines, write_report
from fusion_lab.training.feeding import batches, to_device
from fusion_lab.training.machine import choose_device, process_settings
from fusion_lab.training.options import ProfilerConfig
from fusion_lab.training.reporting import describe_start


def time_and_trace(trainer, source, found, directory, steps):
    """Seconds of untraced steps (steps, 4 phases), then a trace of as many; returns (times, path)."""
    device = trainer.device
    timer = PhaseTimer(device)
    supply = batches(source, range(2 * steps + 1), device)
    for _ in range(steps):
        timer.start()
        batch = next(supply)
        timer.mark()
        trainer.step(batch, timer.mark)
    untraced = timer.seconds()
    config = ProfilerConfig(enable_pytorch_profiler=True, enable_memory_profiling=True, profile_dir=directory)
    with Profiling(config, device, trainer.model.sublayers(), found, steps + 1, steps) as profiling:
        timer = PhaseTimer(device, PHASES, profiling.enter, profiling.leave)
        for _ in range(steps + 1):
            timer.start()
            batch = next(supply)
            timer.mark()
            trainer.step(batch, timer.mark)
            profiling.step()
    return untraced, profiling.trace


def analyse(trainer, source, found, directory, steps):
    """Time, trace and count; returns (Analysis, TraceAnalysis). found: the probe's Findings."""
    untraced, path = time_and_trace(trainer, source, found, directory, steps)
    return analysis_of(trainer, source, found, untraced, path, steps)


def measured_times(analysis):
    """{sub-layer: seconds and launches per step, forward and backward}"""
    measured = {}
    for e in analysis.sublayers:
        entry = measured.setdefault(e.name, dict(seconds=0.0, launches=0))
        entry["seconds"] += e.total_us / 1e6
        entry["launches"] += e.launches or 0
    return measured


def run_session(program, settings, directory, steps=5, roofline=False, earlier=None):
    """A whole session into a directory; returns its Analysis. earlier: (name, analysis as JSON has it) to
    compare with."""
    device = choose_device(settings.training.device)
    process_settings(settings, device)
    trainer, source = program.trainer(program, settings, device), program.data(settings)
    describe_start(trainer, source)
    found = warm_up(trainer, source)
    found.peak_memory_mb = peak_of_two_steps(trainer, to_device(source.batch(0), device), found)
    analysis, trace = analyse(trainer, source, found, directory, steps)
    if roofline:
        analysis.ceilings = measure_ceilings(device, settings.training)
        analysis.roofline = roofline_table(program, settings, analysis.ceilings, measured_times(analysis),
                                           device.type == "cuda")
    if earlier:
        analysis.compared_with = compare_sessions(earlier[1], analysis.as_dict(), earlier[0])
    pictures = write_report(directory, analysis, trace)
    print_session(analysis, directory, pictures, bool(earlier))
    return analysis


def print_session(analysis, directory, pictures, compared):
    """What a session says on the terminal, the findings last."""
    if analysis.roofline:
        print("\n".join(aligned(roofline_rows(analysis.roofline))))
    if compared:
        print("\n".join(comparison_lines(analysis.compared_with)))
    print(f"Results in {directory}: {', '.join([REPORT, ANALYSIS, analysis.trace, *pictures])}")
    if analysis.launch and not any(analysis.launch.text in finding for finding in analysis.findings()):
        print(f"Launch: {analysis.launch.text}")
    for text in analysis.unrecorded:
        print(f"Caution: {text}")
    print("Findings:")
    for number, text in enumerate(analysis.findings(), 1):
        print(f"   {number}. {text}")
