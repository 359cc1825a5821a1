"""The report of a session, and two sessions side by side."""
import os
from dataclasses import fields

from fusion_lab.measuring.analysis import ANALYSIS, at_most, shares_of_sublayers
from fusion_lab.measuring.gains import Gain, gain_over_earlier
from fusion_lab.measuring.ranges import REST
from fusion_lab.measuring.roofline import ceiling_line, roofline_rows
from fusion_lab.measuring.summary import differing
from fusion_lab.measuring.tables import cell, code, escaped, markdown
from fusion_lab.measuring.variants import spelled
from fusion_lab.profiler.plots import SUBLAYERS, TIMELINE
from fusion_lab.training.errors import UserError
from fusion_lab.training.files import read_json

REPORT = "comprehensive_profiling_report.md"
TOP = 20
MACHINE = [("system_info", key) for key in ("gpu_name", "host_cpu", "torch_version")]
TIMES = {  # by the unit of the analysis: what the table's times and their shares are
    "kernel": "Times are those of kernels and copies on the GPU, in the traced steps; the time of a step "
              "above is of the steps before these. Where the GPU waits for launches, the step gains less "
              "than \"at most\" says.",
    "operation": "Times are the CPU's, in the same steps as the time of a step above."}


def sublayer_rows(analysis):
    """A row for each sub-layer, the heaviest first, then one for each phase of the time outside them."""
    # "of it backward" includes what backward computes again (ranges.RECOMPUTE)
    rows = [["sub-layer", "ms", "of it backward", "share", "at most", "launches", "allocated MB", "saved MB"]]

    def add(name, entries, ceiling=None):
        def total(key, among=entries):
            known = [e[key] for e in among if e[key] is not None]
            return sum(known) if known else None
        backward = [e for e in entries if e["direction"] != "forward"] if ceiling else []
        rows.append([name, cell(total("total_us"), ".3f", 1e-3),
                     cell(total("total_us", backward), ".3f", 1e-3), cell(total("share"), ".1f", 100, "%"),
                     cell(ceiling, ".2f", unit="x"), cell(total("launches"), ".0f"),
                     cell(total("allocated_mb"), ".1f"), cell(total("saved_activation_mb"), ".1f")])

    for name, share in shares_of_sublayers(analysis).items():
        add(name, [e for e in analysis["sublayers"] if e["name"] == name], at_most(share))
    for e in analysis["sublayers"]:
        if e["name"] == REST and e["total_us"]:
            add(f"{REST}, {e['direction']}", [e])
    return rows


def switch_rows(program, analysis):
    """A row for each switch that says which sub-layers it changes, and for these together: no switch saves
    more than their time. Where a block is compiled whole their time is not known, so there is no row."""
    rows, shares = [["switch", "changes", "share", "at most"]], shares_of_sublayers(analysis)
    for field in fields(program.fusion_config):
        parts = [each.partition(" with ") for each in field.metadata["acts_on"]]
        prefixes = tuple(prefix for prefix, _, needed in parts
                         if not needed or analysis["fusion_config"].get(f"enable_{needed}"))
        changed = [name for name in program.model.SUBLAYERS if name.startswith(prefixes)]
        share = sum(shares.get(name, 0.0) for name in changed)
        if share:
            rows.append([spelled(field.name), ", ".join(changed), cell(share, ".1f", 100, "%"),
                         cell(at_most(share), ".2f", unit="x")])
    return rows


def kernel_rows(analysis):
    """A row for each of the longest ones; operations of a CPU have neither kind nor launches."""
    rows = [[analysis["unit"], "calls", "share", "kind", "launches"]]
    rows += [[code(e["name"]), cell(e["calls"], ".0f"), cell(e["share"], ".1f", 100, "%"), e["kind"],
              cell(e["launches"], ".0f")] for e in analysis["kernels"][:TOP]]
    return rows if analysis["unit"] == "kernel" else [row[:3] for row in rows]


def machine_line(result):
    """Where and when a result was measured, and of which commit."""
    system = result["system_info"]
    return (f"{code(system['gpu_name'] or system['host_cpu'])}, torch {system['torch_version']}, "
            f"{result['timestamp']}, commit {(system['git_commit'] or 'unknown')[:12]}")


def run_lines(program, settings, analysis):
    """What was run, where, and how long a step takes."""
    step = analysis["step"]
    sizes = ", ".join(f"{name} {value}" for name, value in analysis["config"].items()
                      if name not in program.axes)
    on = [name.removeprefix("enable_") for name, value in analysis["fusion_config"].items() if value is True]
    return [f"{machine_line(analysis)}.",
            f"{program.name}: {program.sample(settings)}; {sizes}; on: {', '.join(on) or 'nothing'}.",
            "",
            f"A step takes **{step['untraced_ms']:.2f} ms** (median of {len(step['step_times'])}; p20 "
            f"{step['p20_ms']:.2f}, p80 {step['p80_ms']:.2f}). Launches: "
            f"{analysis['launches_per_step'] or 'not counted'}."]


def text(program, settings, analysis, pictures=()):
    """The report in markdown; pictures: names of those that lie beside it."""
    def picture(name):
        return ["", f"![{name.removesuffix('.png').replace('_', ' ')}]({name})"] if name in pictures else []
    cover, unit, switches = analysis["coverage"], analysis["unit"], switch_rows(program, analysis)
    saved = sum(analysis["saved_activation_mb"].values())
    peak = cell(analysis["memory_peak_mb"], ".1f", unit=" MB") or "not measured"
    lines = ["# PyTorch profiler session", "", *run_lines(program, settings, analysis), "",
             *(f"**Caution:** {each}\n" for each in analysis["unrecorded"]), "## Findings", "",
             *(f"{i}. {each}" for i, each in enumerate(analysis["findings"], 1)), "",
             "## Time and memory by sub-layer", "",
             f"Forward and backward of all blocks, per step. Sub-layers hold {100 * cover['sublayers']:.1f}% "
             f"of the time; \"{REST}\" is what surrounds them. {TIMES[unit]} \"At most\": so many times as "
             "fast would all be if the sub-layer took no time.", "",
             *markdown(sublayer_rows(analysis)), *picture(SUBLAYERS), "",
             *([*markdown(switches), ""] if len(switches) > 1 else []),
             f"Memory: the peak of a step is {peak}; {saved:.1f} MB are saved for the backward pass.",
             *picture(TIMELINE), "", f"## Top {TOP} {unit}s", "",
             "Shares of the sum of their own times, under the profiler.", "",
             *markdown(kernel_rows(analysis))]
    if "roofline" in analysis:
        lines += ["", "## Roofline", "", ceiling_line(analysis["ceilings"]), "",
                  *markdown(roofline_rows(analysis["roofline"]))]
    if "compared_with" in analysis:
        lines += ["", *comparison_lines(analysis["compared_with"], unit)]
    return "\n".join([*lines, "", f"Trace of {analysis['profile_steps']} steps: `{analysis['trace']}`, for "
                      f"https://ui.perfetto.dev. All figures: `{ANALYSIS}`.\n"])


def read_analysis(directory):
    """The analysis of an earlier session, as JSON has it. Raises UserError now rather than after the new
    session where it lacks what a comparison needs."""
    path = os.path.join(directory, ANALYSIS)
    analysis = read_json(path, f"--compare-with {directory}:")
    try:
        if analysis["mode"] == "pytorch_profiler":
            comparison_lines(compare_sessions(analysis, analysis, directory), analysis["unit"])
            return analysis
    except (AttributeError, LookupError, TypeError, ValueError, ArithmeticError):
        pass
    raise UserError(f"--compare-with {directory}: {path} is not the analysis of a profiler session")


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
    keys = [(section, key) for section in ("config", "fusion_config", "training_params")
            for key in after[section]]
    steps = [session["step"] for session in (before, after)]  # older ones have no times of single steps
    rates = [[1 / seconds for seconds in step.get("step_times") or [step["untraced_ms"] / 1e3]]
             for step in steps]
    return dict(before=str(directory), differences=differing(before, after, [*keys, *MACHINE]),
                **gain_over_earlier(*rates).as_dict(),
                time_kind=[before["time_kind"], after["time_kind"]],
                step_ms=[step["untraced_ms"] for step in steps],
                sublayers=matched(before["sublayers"], after["sublayers"],
                                  lambda e: f"{e['name']}.{e['direction']}", "total_us"),
                kernels=matched(before["kernels"], after["kernels"], lambda e: e["name"], "self_us"))


def comparison_rows(rows, title):
    return [[title, "before ms", "after ms", "ratio"],
            *([code(e["name"]), cell(e["before_us"], ".3f", 1e-3), cell(e["after_us"], ".3f", 1e-3),
               cell(e["ratio"]) or ("gone" if e["after_us"] is None else "new")] for e in rows)]


def comparison_lines(comparison, unit):
    """Two sessions side by side, as markdown; unit: "kernel" or "operation", of the later one."""
    before, after = comparison["step_ms"]
    different = escaped("; ".join(comparison["differences"])) or "nothing in the settings"
    lines = [f"## Against {escaped(comparison['before'])}", "",
             f"A step takes {before:.2f} -> {after:.2f} ms: {Gain.read(comparison).in_words()}. The sessions "
             "ran one after the other; how the machine changed between them is not in the interval, and "
             f"--compare-fusion lets steps alternate. Different: {different}.", ""]
    if len(set(comparison["time_kind"])) > 1:
        lines += [f"These are different clocks: {escaped(' and '.join(comparison['time_kind']))}.", ""]
    return [*lines, *markdown(comparison_rows(comparison["sublayers"], "sub-layer")), "",
            *markdown(comparison_rows(comparison["kernels"][:2 * TOP], unit))]
