"""The report of a session, and two sessions side by side."""
import os

from fusion_lab.measuring.attribution import ANALYSIS
from fusion_lab.measuring.ceilings import ceiling_line
from fusion_lab.measuring.clocks import quantiles
from fusion_lab.measuring.roofline import roofline_rows
from fusion_lab.measuring.tables import cell, code, escaped, markdown
from fusion_lab.profiler.plots import HISTOGRAM, SUBLAYERS, TIMELINE, write_plots
from fusion_lab.training.files import UserError, counted, read_json, write_json, write_text
from fusion_lab.training.machine import MEGABYTE

REPORT = "comprehensive_profiling_report.md"
TOP = 20
MACHINE = ("gpu_name", "host_cpu", "torch_version")  # what of system_info two sessions should share
LARGEST = 1e15  # µs; quotients of such times stay finite
TRACED = {  # by the unit of the analysis: what the columns of times are
    "kernel": "Total and self are GPU time in the trace, host is what the CPU took under the profiler.",
    "operation": "Total is measured without the profiler. The columns \"traced\" are of other steps, under "
                 "the profiler, which slows small operations down: compare them only with each other."}
COMPILED = "The blocks are compiled, each as one piece, so there are no sub-layers to see inside them."


def sublayer_rows(analysis):
    rows = [["sub-layer", "direction", "calls", "total ms", "share (p20, p80)", "self ms, traced",
             "host ms, traced", "launches", "allocated MB", "saved MB"]]
    for e in analysis.sublayers:
        shares = [sample[e.name, e.direction] for sample in analysis.samples]
        between = ""
        if len(shares) > 1:  # of medians, the share itself may lie beside those of the steps
            low, high = (f(e.share, end) for f, end in zip((min, max), quantiles(shares)[::2], strict=True))
            between = f" ({cell(low, '.1f', 100)}, {cell(high, '.1f', 100)})"
        rows.append([e.name, e.direction, cell(e.calls, ".0f"), cell(e.total_us, ".3f", 1e-3),
                     cell(e.share, ".1f", 100, "%") + between, cell(e.self_us, ".3f", 1e-3),
                     cell(e.traced_host_us, ".3f", 1e-3), cell(e.launches, ".0f"),
                     cell(e.allocated_mb, ".1f"), cell(e.saved_activation_mb, ".1f")])
    return rows


def kernel_rows(analysis):
    rows = [[analysis.unit, "kind", "calls", "self ms", "total ms", "share", "launches", "allocated MB"]]
    for e in analysis.kernels[:TOP]:
        rows.append([code(e["name"]), e["kind"], cell(e["calls"], ".0f"), cell(e["self_us"], ".3f", 1e-3),
                     cell(e["total_us"], ".3f", 1e-3), cell(e["share"], ".1f", 100, "%"),
                     cell(e["launches"], ".0f"), cell(e["allocated_bytes"], ".1f", 1 / MEGABYTE)])
    return rows


def sizes_text(program, settings):
    """"B 4, S 64, N 16" """
    return ", ".join(f"{letter} {settings.get(axis)}" for axis, letter in program.axes.items())


def run_lines(analysis):
    """What was run, where, and what times are of."""
    system, settings, step = analysis.system_info, analysis.settings, analysis.step
    configs = settings.as_dict()
    sizes = ", ".join(f"{name} {value}" for name, value in configs["config"].items()
                      if name not in analysis.program.axes)
    on = [name.removeprefix("enable_") for name, value in configs["fusion_config"].items() if value is True]
    return [f"{code(system['gpu_name'] or system['host_cpu'])}, torch {system['torch_version']}, "
            f"{analysis.timestamp}, commit {(system['git_commit'] or 'unknown')[:12]}.",
            f"{analysis.program.name}: {sizes_text(analysis.program, settings)}; {sizes}; on: "
            f"{', '.join(on) or 'nothing'}.",
            f"{counted(analysis.profile_steps, 'step')} traced after warm-up: {step['traced_ms']:.2f} ms "
            f"each under the profiler, {step['untraced_ms']:.2f} ms without it (median). Shares are of "
            f"{analysis.time_kind}, {analysis.total_us / 1e3:.2f} ms per step. Launches of a step: "
            f"{analysis.launches_per_step or 'not counted'}."]


def sublayer_lines(analysis, picture):
    """The section on sub-layers; picture(name) are the lines that show one."""
    cover, count = analysis.coverage, len(analysis.program.model.SUBLAYERS)
    return ["## Time and memory by sub-layer", "",
            f"The {count} sub-layers, forward and backward, hold {100 * cover['sublayers']:.1f}% of the "
            f"time; {100 * cover['rest']:.1f}% is outside them but in a phase of the step (what surrounds "
            "them in the model, loss, gradient sums, optimizer: \"rest\"), "
            f"{100 * cover['unattributed']:.2f}% in none.",
            *([] if cover["sublayers"] else [COMPILED]), TRACED[analysis.unit], "",
            *markdown(sublayer_rows(analysis)), *picture(SUBLAYERS)]


def report_lines(analysis, pictures=()):
    """The report as markdown lines; pictures: names of those that lie beside it."""
    def picture(name):
        return ["", f"![{name.removesuffix('.png').replace('_', ' ')}]({name})"] if name in pictures else []
    own_ms = sum(e["self_us"] for e in analysis.kernels) / 1e3
    lines = ["# PyTorch profiler session", "", *run_lines(analysis), "",
             f"Trace: `{analysis.trace}`, for https://ui.perfetto.dev. All figures are per "
             f"step, all blocks together; machine-readable in `{ANALYSIS}`.", "",
             *(f"**Caution:** {text}\n" for text in analysis.unrecorded), "## Findings", "",
             *(f"{i}. {text}" for i, text in enumerate(analysis.findings(), 1)), "",
             *(["## Launch-bound?", "", analysis.launch.text + ".", ""] if analysis.launch else []),
             *sublayer_lines(analysis, picture), "", f"## Top {TOP} {analysis.unit}s", "",
             f"Shares are of the sum of their own times under the profiler, {own_ms:.2f} ms per step.", "",
             *markdown(kernel_rows(analysis)), *picture(HISTOGRAM)]
    saved, peak = sum(analysis.saved_activation_mb.values()), cell(analysis.memory_peak_mb, ".1f", unit=" MB")
    lines += ["", "## Memory", "", f"Peak of a step: {peak or 'not measured'}. Saved for backward: "
              f"{saved:.1f} MB.", *picture(TIMELINE)]
    if analysis.roofline:
        lines += ["", "## Roofline", "", ceiling_line(analysis.ceilings), "",
                  *markdown(roofline_rows(analysis.roofline))]
    if analysis.compared_with:
        lines += ["", *comparison_lines(analysis.compared_with)]
    return lines


def write_report(directory, analysis, trace):
    """All files of a session but the trace; returns the names of the pictures."""
    write_json(os.path.join(directory, ANALYSIS), analysis.as_dict())
    write_lines(os.path.join(directory, REPORT), report_lines(analysis, []))  # before what may fail
    pictures = write_plots(directory, analysis, trace)
    write_lines(os.path.join(directory, REPORT), report_lines(analysis, pictures))
    return pictures


def write_lines(path, lines):
    write_text(path, "\n".join(lines) + "\n")


def read_analysis(directory):
    """The analysis of an earlier session, as JSON has it. Raises UserError."""
    path = os.path.join(directory, ANALYSIS)
    try:
        analysis = read_json(path, f"--compare-with {directory}:")
        if analysis.get("mode") == "pytorch_profiler" and comparable(analysis):
            return analysis
    except (AttributeError, KeyError, TypeError, ValueError):
        pass
    raise UserError(f"--compare-with {directory}: {path} is not the analysis of a profiler session")


def comparable(analysis):
    """Whether the analysis has all that compare_sessions() needs, which is told now rather than after the new
    session. Where it has not, this may also raise AttributeError, KeyError or TypeError."""
    parts = [analysis[name] for name in ("config", "fusion_config", "training_params", "system_info")]
    texts, numbers = [analysis["time_kind"]], [analysis["step"]["untraced_ms"]]
    for entries, names, microseconds in ((analysis["sublayers"], ("name", "direction"), "total_us"),
                                         (analysis["kernels"], ("name",), "self_us")):
        texts += [entry[name] for entry in entries for name in names]
        numbers += [entry[microseconds] for entry in entries]
    return (all(isinstance(part, dict) for part in parts) and {*MACHINE} <= set(analysis["system_info"])
            and all(isinstance(text, str) for text in texts) and numbers[0] > 0
            and all(type(n) in (int, float) and (n == 0 or 1 / LARGEST < n < LARGEST) for n in numbers))


def matched(before, after, name_of, microseconds):
    """Entries of two lists joined by name: µs before and after, and after / before (None where one is
    missing), the longest first."""
    sides = [{name_of(entry): entry[microseconds] for entry in entries} for entries in (before, after)]
    rows = [dict(name=name, before_us=sides[0].get(name), after_us=sides[1].get(name))
            for name in dict.fromkeys([*sides[0], *sides[1]])]
    for entry in rows:
        entry["ratio"] = entry["after_us"] / entry["before_us"] \
            if entry["before_us"] and entry["after_us"] is not None else None
    return sorted(rows, key=lambda entry: -max(entry["before_us"] or 0, entry["after_us"] or 0))


def compare_sessions(before, after, directory):
    """Two analyses, as JSON has them, per sub-layer and per kernel; directory is the earlier one's."""
    different = [f"{k} {before[s].get(k)} -> {after[s][k]}"
                 for s in ("config", "fusion_config", "training_params")
                 for k in after[s] if before[s].get(k) != after[s][k]]
    different += [f"{k} {before['system_info'][k]} -> {after['system_info'][k]}"
                  for k in MACHINE
                  if before["system_info"][k] != after["system_info"][k]]
    return dict(before=str(directory), differences=different,
                time_kind=[before["time_kind"], after["time_kind"]],
                step_ms=[before["step"]["untraced_ms"], after["step"]["untraced_ms"]],
                sublayers=matched(before["sublayers"], after["sublayers"],
                                  lambda e: f"{e['name']}.{e['direction']}", "total_us"),
                kernels=matched(before["kernels"], after["kernels"], lambda e: e["name"], "self_us"))


def comparison_rows(rows, title):
    return [[title, "before ms", "after ms", "ratio"],
            *([code(e["name"]), cell(e["before_us"], ".3f", 1e-3), cell(e["after_us"], ".3f", 1e-3),
               cell(e["ratio"]) or ("gone" if e["after_us"] is None else "new")] for e in rows)]


def interleaved_line(before, after):
    """Two rows of the comparison, whose steps alternated, in a sentence."""
    if not after["measured"]:
        return f"Interleaved steps were not measured: {after['reason']}"
    return (f"Interleaved steps of both: {1e3 * after['baseline_batch_time']:.2f} -> "
            f"{1e3 * after['median_batch_time']:.2f} ms, {after['speedup']:.2f}x (p20 "
            f"{after['speedup_p20']:.2f}, p80 {after['speedup_p80']:.2f}).")


def comparison_lines(comparison):
    """Two sessions side by side, as markdown."""
    before, after = comparison["step_ms"]
    lines = [f"## Against {escaped(comparison['before'])}", "",
             f"Step without profiler: {before:.2f} -> {after:.2f} ms, ratio {after / before:.2f}, of two "
             f"sessions, one after the other. Different: "
             f"{escaped('; '.join(comparison['differences'])) or 'nothing in the settings'}.", ""]
    if "interleaved" in comparison:
        lines += [interleaved_line(*comparison["interleaved"]), ""]
    if len(set(comparison["time_kind"])) > 1:
        lines += [f"These are different clocks: {escaped(' and '.join(comparison['time_kind']))}.", ""]
    return [*lines, *markdown(comparison_rows(comparison["sublayers"], "sub-layer")), "",
            *markdown(comparison_rows(comparison["kernels"][:2 * TOP], "kernel"))]
