"""What a profiler session says: launch-bound or not, findings, report, plots, two sessions compared.

All is computed from the analysis dict that run_pytorch_profiler.py writes as fusion_analysis.json.
"""
import json
import os

import numpy as np

from fusion_lab.measuring.plotting import require_matplotlib
from fusion_lab.measuring.tables import markdown
from fusion_lab.training.files import UserError, write_atomically, write_json
from fusion_lab.training.machine import MEGABYTE

ANALYSIS, REPORT = "fusion_analysis.json", "comprehensive_profiling_report.md"
TOP = 20
COMPILED = "The blocks are compiled, each as one piece, so there are no sub-layers to see inside them."
LAUNCH_BOUND, BUSY = 0.5, 0.85  # shares of the step: below, the GPU mostly waits; above, it mostly works
NO_WORK = ("view", "autograd's own", "other")  # kinds of operations that say nothing about the device
LAST_RESORT = 1e-3  # weight of a finding that is made where nothing heavier was found


def launch_arithmetic(launches, step_s, busy_s=None, host_s=None):
    """Is the step bound by launching? A dict with the figures, the verdict and the arithmetic in words. On a
    GPU busy_s is the time with a kernel running, of a whole step. On CPU step_s is forward and backward, and
    host_s what as many operations take with next to no work; None where compiled code dispatches none."""
    figures = dict(launches=launches, step_ms=1e3 * step_s, busy_ms=busy_s and 1e3 * busy_s,
                   host_ms=host_s and 1e3 * host_s)
    if busy_s is not None:
        share = busy_s / step_s
        verdict = "launch-bound" if share < LAUNCH_BOUND else "partly launch-bound" if share < BUSY \
            else "not launch-bound"
        sums = (f"kernels run during {1e3 * busy_s:.2f} ms of a {1e3 * step_s:.2f} ms step "
                f"({100 * share:.0f}%), the GPU waits for the other {1e3 * max(step_s - busy_s, 0):.2f} ms; "
                f"of {launches:.0f} kernels one comes every {1e6 * step_s / launches:.1f} µs and runs "
                f"{1e6 * busy_s / launches:.1f} µs on average")
    elif host_s is not None:
        share = host_s / step_s
        verdict = "launch-bound" if share > LAUNCH_BOUND else "not launch-bound"
        sums = (f"{launches:.0f} operations on two residues and one row, next to no work, take "
                f"{1e3 * host_s:.2f} ms forward and backward, of {1e3 * step_s:.2f} ms at this size "
                f"({100 * share:.0f}%)")
    else:
        verdict, sums = "unknown", "compiled code on CPU dispatches no operations"
    return dict(figures, verdict=verdict, text=f"{verdict}: {sums}")


def by_sublayer(analysis, key="share"):
    """{sub-layer: sum of key over forward and backward}, "rest" left out."""
    sums = {}
    for entry in analysis["sublayers"]:
        if entry["name"] != "rest":
            sums[entry["name"]] = sums.get(entry["name"], 0) + (entry[key] or 0)
    return sums


def findings(analysis):
    """Three sentences on what matters most in this data: the heaviest sub-layer, then of all candidates those
    that are about the largest share of the step."""
    first, found = [], []
    shares = by_sublayer(analysis)
    flops, saved = analysis["flops_share"], analysis["saved_activation_mb"]
    if shares:
        name = max(shares, key=shares.get)
        first = [f"`{name}` takes most time of the nine sub-layers: {100 * shares[name]:.0f}% of the step, "
                 f"with {100 * flops[name]:.0f}% of their FLOPs."]
        gaps = {n: shares[n] - flops[n] for n in shares}
        worst = max(gaps, key=gaps.get)
        if worst != name and gaps[worst] > 0:
            found.append((gaps[worst], f"`{worst}` is the least efficient: {100 * shares[worst]:.0f}% of the "
                          f"time for {100 * flops[worst]:.0f}% of the sub-layers' FLOPs: it moves data or "
                          "waits."))
        total = sum(saved.values())
        heavy = max(saved, key=saved.get)
        if total:
            found.append((saved[heavy] / total / 2, f"`{heavy}` keeps {saved[heavy]:.1f} MB for backward, "
                          f"{100 * saved[heavy] / total:.0f}% of all saved activations ({total:.1f} MB)."))
    launch = analysis["launch"]
    if launch["verdict"] in ("launch-bound", "partly launch-bound"):
        busy = launch["busy_ms"]
        idle = launch["host_ms"] if busy is None else launch["step_ms"] - busy
        found.append((idle / launch["step_ms"], f"The step is {launch['text']}."))
    kinds = {k: v for k, v in analysis["kinds"].items() if k not in NO_WORK and k != "matrix product"}
    if kinds:
        name = max(kinds, key=lambda k: kinds[k]["share"])
        entry = kinds[name]
        product = analysis["kinds"].get("matrix product", dict(share=0.0))["share"]
        found.append((entry["share"], f"Beside matrix products ({100 * product:.0f}%), the kind that takes "
                      f"most is {name}: {100 * entry['share']:.0f}% of the {analysis['unit']}s' own time in "
                      f"{entry['calls']:.0f} calls."))
    phases = analysis["step"]["phases_ms"]
    if not (analysis["unit"] == "kernel" and analysis["fusion_config"]["enable_cuda_graphs"]):  # one phase
        slowest = max(phases, key=phases.get)
        share = phases[slowest] / sum(phases.values())
        found.append((LAST_RESORT, f"The {slowest} phase takes most of the step: {100 * share:.0f}%, "
                      f"{phases[slowest]:.2f} ms."))
    small = analysis["short_kernels"]
    if analysis["unit"] == "kernel":
        found.append((small["time_share"], f"{100 * small['count_share']:.0f}% of the kernels are shorter "
                      f"than {small['limit_us']} µs; together they take {100 * small['time_share']:.0f}% of "
                      "the time."))
    top = analysis["kernels"][0]
    found.append((top["share"], f"The longest {analysis['unit']} is `{top['name'][:80]}`: "
                  f"{100 * top['share']:.0f}% of all {analysis['unit']}s' own time in {top['calls']:.0f} "
                  f"calls of {top['self_us'] / top['calls']:.1f} µs."))
    return [*first, *(text for _, text in sorted(found, key=lambda pair: -pair[0]))][:3]


def number(value, form=".2f", scale=1.0):
    return "" if value is None else format(value * scale, form)


def sublayer_rows(analysis):
    rows = [["sub-layer", "direction", "calls", "total ms", "share", "self ms, traced", "host ms, traced",
             "launches", "allocated MB", "saved MB"]]
    for e in analysis["sublayers"]:
        rows.append([e["name"], e["direction"], number(e["calls"], ".0f"), number(e["total_us"], ".3f", 1e-3),
                     number(e["share"], ".1f", 100) + "%", number(e["self_us"], ".3f", 1e-3),
                     number(e["traced_host_us"], ".3f", 1e-3), number(e["launches"], ".0f"),
                     number(e["allocated_mb"], ".1f"), number(e["saved_activation_mb"], ".1f")])
    return rows


def kernel_rows(analysis):
    rows = [[analysis["unit"], "kind", "calls", "self ms", "total ms", "share", "launches", "allocated MB"]]
    for e in analysis["kernels"][:TOP]:
        rows.append([f"`{e['name'][:90]}`", e["kind"], number(e["calls"], ".0f"),
                     number(e["self_us"], ".3f", 1e-3), number(e["total_us"], ".3f", 1e-3),
                     number(e["share"], ".1f", 100) + "%", number(e["launches"], ".0f"),
                     number(e["allocated_bytes"], ".1f", 1 / MEGABYTE)])
    return rows


def scaling_rows(scaling):
    rows = [["attention", "S", "peak MB", "saved MB", ""]]
    for e in scaling["points"]:
        rows.append([e["attention"], str(e["seq_len"]), number(e["peak_memory_mb"], ".1f"),
                     number(e["saved_activation_mb"], ".1f"), e["reason"] or ""])
    for name, e in scaling["exponents"].items():
        if e["peak_memory_mb"] is None and e["saved_activation_mb"] is None:
            continue  # of one length
        rows.append([name, "exponent", number(e["peak_memory_mb"]), number(e["saved_activation_mb"]),
                     "of S, fitted; between the two largest S: peak "
                     f"{number(e['last_peak_memory_mb'])}, saved {number(e['last_saved_activation_mb'])}"])
    return [*rows, ["fused", "runs", scaling["fused_runs"]]]


def roofline_rows(table):
    rows = [["sub-layer", "GFLOP", "minimal MB", "FLOP/byte", "compute ms", "memory ms", "launch ms",
             "measured ms", "bound", "share of ceiling"]]
    for e in table:
        rows.append([e["name"], number(e["flops"], ".2f", 1e-9),
                     number(e["minimal_bytes"], ".1f", 1 / MEGABYTE),
                     number(e["flops_per_byte"], ".1f"), number(e["compute_s"], ".3f", 1e3),
                     number(e["memory_s"], ".3f", 1e3), number(e["launch_s"], ".3f", 1e3),
                     number(e["measured_s"], ".3f", 1e3), e["bound"], number(e["share"], ".1f", 100) + "%"])
    return rows


def prediction_rows(table):
    rows = [["B", "S", "N", "bound ms", "measured ms", "measured/bound", "predicted peak MB", "measured MB",
             "error"]]
    for e in table:
        sizes = [str(e[key]) for key in ("batch_size", "seq_len", "num_seqs")]
        if e["reason"]:
            rows.append([*sizes, e["reason"]])
            continue
        rows.append([*sizes, number(e["step_s"], ".3f", 1e3), number(e["measured_s"], ".3f", 1e3),
                     number(e["time_ratio"]),
                     number(e["peak_memory_mb"], ".1f"), number(e["measured_peak_memory_mb"], ".1f"),
                     number(e["peak_error_percent"], "+.1f") + "%"])
    return rows


def ceiling_line(ceilings):
    speeds = ", ".join(f"{k} {v / 1e12:.2f}" for k, v in ceilings["matmul_flops_per_s"].items())
    return (f"Ceilings, measured here: copy {ceilings['copy_bytes_per_s'] / 1e9:.1f} GB/s; matrix product "
            f"{speeds} TFLOP/s; launch {1e6 * ceilings['dispatch_s']:.2f} µs. This run: {ceilings['dtype']}.")


def report_lines(analysis):
    """The report as markdown lines."""
    system, c, step = analysis["system_info"], analysis["config"], analysis["step"]
    on = [k.removeprefix("enable_") for k, v in analysis["fusion_config"].items() if v is True]
    cover = analysis["coverage"]
    lines = ["# PyTorch profiler session", "",
             f"{system['gpu_name'] or system['host_cpu']}, torch {system['torch_version']}, "
             f"{analysis['timestamp']}, commit {(system['git_commit'] or 'unknown')[:12]}.",
             f"B {analysis['training_params']['batch_size']}, N {c['num_seqs']}, S {c['seq_len']}, "
             f"{c['num_blocks']} blocks, c_m {c['msa_dim']}, c_z {c['pair_dim']}; on: "
             f"{', '.join(on) or 'nothing'}.",
             f"{analysis['profile_steps']} steps traced after warm-up: {step['traced_ms']:.2f} ms each under "
             f"the profiler, {step['untraced_ms']:.2f} ms without it (median). Shares are of "
             f"{analysis['time_kind']}, {analysis['total_us'] / 1e3:.2f} ms per step.", "",
             f"Trace: `{analysis['trace']}`, for https://ui.perfetto.dev or TensorBoard. All figures are per "
             f"step, all blocks together; machine-readable in `{ANALYSIS}`.", "", "## Findings", "",
             *(f"{i}. {text}" for i, text in enumerate(analysis["findings"], 1)), "",
             "## Launch-bound?", "", analysis["launch"]["text"] + ".", "",
             "## Time and memory by sub-layer", "",
             f"The nine sub-layers, forward and backward, hold {100 * cover['sublayers']:.1f}% of the time; "
             f"{100 * cover['rest']:.1f}% is outside them but in a phase of the step (embedding, residuals, "
             f"heads, loss, gradient sums, optimizer: \"rest\"), {100 * cover['unattributed']:.2f}% in none.",
             *([] if cover["sublayers"] else [COMPILED]), "",
             *markdown(sublayer_rows(analysis)), "", f"## Top {TOP} {analysis['unit']}s", "",
             f"Shares are of the sum of their own times under the profiler, "
             f"{sum(e['self_us'] for e in analysis['kernels']) / 1e3:.2f} ms per step.", "",
             *markdown(kernel_rows(analysis))]
    if analysis["memory_peak_mb"] is not None:
        saved = sum(analysis["saved_activation_mb"].values())
        lines += ["", "## Memory", "", f"Peak of a step: {analysis['memory_peak_mb']:.1f} MB. Saved for "
                  f"backward: {saved:.1f} MB."]
    for key, title, rows in (("scaling", "Memory against length", scaling_rows),
                             ("roofline", "Roofline", roofline_rows)):
        if analysis.get(key):
            lines += ["", f"## {title}", ""]
            lines += [ceiling_line(analysis["ceilings"]), ""] if key == "roofline" else []
            lines += markdown(rows(analysis[key]))
    if analysis.get("compared_with"):
        lines += ["", *comparison_lines(analysis["compared_with"])]
    return lines


def write_text(path, lines):
    write_atomically(path, lambda file: file.write(("\n".join(lines) + "\n").encode()))


def write_report(directory, analysis, timeline, durations):
    """All files of a session but the trace; returns the names of the plots."""
    write_json(os.path.join(directory, ANALYSIS), analysis)
    write_text(os.path.join(directory, REPORT), report_lines(analysis))
    try:
        pyplot = require_matplotlib()
    except UserError as error:
        print(f"No plots: {error}")
        return []
    plots = dict(time_by_sublayer=(plot_sublayers, analysis), memory_timeline=(plot_timeline, timeline),
                 kernel_histogram=(plot_durations, durations, analysis["unit"]))
    for name, (plot, *data) in plots.items():
        figure, axis = pyplot.subplots(figsize=(8, 4.5), layout="constrained")
        plot(axis, *data)
        figure.savefig(os.path.join(directory, f"{name}.png"), dpi=110)
        pyplot.close(figure)
    return [f"{name}.png" for name in plots]


def plot_sublayers(axis, analysis):
    names = list(dict.fromkeys(e["name"] for e in analysis["sublayers"]))
    left = np.zeros(len(names))
    for direction in dict.fromkeys(e["direction"] for e in analysis["sublayers"]):
        times = {e["name"]: e["total_us"] / 1e3 for e in analysis["sublayers"] if e["direction"] == direction}
        widths = np.array([times.get(name, 0.0) for name in names])
        axis.barh(names, widths, left=left, label=direction)
        left += widths
    axis.invert_yaxis()
    axis.set(xlabel=f"ms per step ({analysis['time_kind']})")
    axis.legend()


def plot_timeline(axis, timeline):
    if timeline:
        times, sizes = np.array(timeline).T
        axis.plot(times / 1e3, sizes / MEGABYTE, linewidth=0.8)
    axis.set(xlabel="ms since the trace began", ylabel="MB, change since the trace began")


def plot_durations(axis, durations, unit):
    positive = [d for d in durations if d > 0]
    if positive:
        low, high = np.log10(min(positive)), np.log10(max(positive) * 1.01)
        edges = np.logspace(low, high, 50)
        axis.hist(positive, bins=edges, label="number")
        axis.hist(positive, bins=edges, weights=np.array(positive) / np.mean(positive), histtype="step",
                  label="time, scaled to the same area")
        axis.legend()
    axis.set(xscale="log", xlabel=f"duration of one {unit}, µs", ylabel="count in the trace")


def read_analysis(directory):
    """The analysis of an earlier session. Raises UserError."""
    path = os.path.join(directory, ANALYSIS)
    try:
        with open(path, encoding="utf-8") as file:
            analysis = json.load(file)
        if analysis["mode"] == "pytorch_profiler":
            return analysis
    except OSError as error:
        raise UserError(f"--compare-with {directory}: {path}: {error.strerror}") from None
    except (ValueError, KeyError, TypeError):
        pass
    raise UserError(f"--compare-with {directory}: {path} is not the analysis of a profiler session")


def compare_sessions(before, after, directory):
    """Per sub-layer and per kernel: µs before and after, and after / before (None where one is missing)."""
    def join(table, key):
        sides = [{key(e): e["total_us" if table == "sublayers" else "self_us"] for e in run[table]}
                 for run in (before, after)]
        rows = [dict(name=name, before_us=sides[0].get(name), after_us=sides[1].get(name))
                for name in dict.fromkeys([*sides[0], *sides[1]])]
        for entry in rows:
            entry["ratio"] = entry["after_us"] / entry["before_us"] \
                if entry["before_us"] and entry["after_us"] is not None else None
        return sorted(rows, key=lambda e: -max(e["before_us"] or 0, e["after_us"] or 0))
    different = [f"{k} {before[s].get(k)} -> {after[s][k]}"
                 for s in ("config", "fusion_config", "training_params")
                 for k in after[s] if before[s].get(k) != after[s][k]]
    different += [f"{k} {before['system_info'][k]} -> {after['system_info'][k]}"
                  for k in ("gpu_name", "host_cpu", "torch_version")
                  if before["system_info"][k] != after["system_info"][k]]
    return dict(before=str(directory), differences=different,
                time_kind=[before["time_kind"], after["time_kind"]],
                step_ms=[before["step"]["untraced_ms"], after["step"]["untraced_ms"]],
                sublayers=join("sublayers", lambda e: f"{e['name']}.{e['direction']}"),
                kernels=join("kernels", lambda e: e["name"]))


def comparison_rows(rows, title):
    return [[title, "before ms", "after ms", "ratio"],
            *([f"`{e['name'][:90]}`", number(e["before_us"], ".3f", 1e-3), number(e["after_us"], ".3f", 1e-3),
               number(e["ratio"]) or ("gone" if e["after_us"] is None else "new")] for e in rows)]


def comparison_lines(comparison):
    """Two sessions side by side, as markdown."""
    before, after = comparison["step_ms"]
    lines = [f"## Against {comparison['before']}", "",
             f"Step without profiler: {before:.2f} -> {after:.2f} ms, ratio {after / before:.2f}, of two "
             f"sessions, one after the other. Different: "
             f"{'; '.join(comparison['differences']) or 'nothing in the settings'}.", ""]
    base, own = comparison.get("interleaved", (None, None))
    if own and not own["measured"]:
        lines += [f"Interleaved steps were not measured: {own['reason']}", ""]
    elif own:
        lines += [f"Interleaved steps of both: {1e3 * base['median_batch_time']:.2f} -> "
                  f"{1e3 * own['median_batch_time']:.2f} ms, {own['speedup']:.2f}x (p20 "
                  f"{own['speedup_p20']:.2f}, p80 {own['speedup_p80']:.2f}).", ""]
    if len(set(comparison["time_kind"])) > 1:
        lines += [f"These are different clocks: {' and '.join(comparison['time_kind'])}.", ""]
    return [*lines, *markdown(comparison_rows(comparison["sublayers"], "sub-layer")), "",
            *markdown(comparison_rows(comparison["kernels"][:2 * TOP], "kernel"))]
