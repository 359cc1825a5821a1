"""The pictures of a session: time by sub-layer, live memory; and of an ablation."""
import os

import numpy as np

from fusion_lab.measuring.plotting import require_matplotlib, save, spared
from fusion_lab.training.files import UserError
from fusion_lab.training.machine import MEGABYTE

SUBLAYERS, TIMELINE = "time_by_sublayer.png", "memory_timeline.png"


def pyplot_or_none():
    """matplotlib's pyplot; None, said in a line, where it is not installed."""
    try:
        return require_matplotlib()
    except UserError as error:
        print(f"No plots: {error}")
        return None


def write_plots(directory, analysis, trace):
    """The pictures of a session, into its directory; returns the names of those that could be made. What goes
    wrong with one is a line on stderr: the others, and the report, are still wanted."""
    pyplot, made = pyplot_or_none(), []
    if pyplot is None:
        return made
    plots = {SUBLAYERS: (plot_sublayers, analysis["sublayers"], analysis["time_kind"]),
             TIMELINE: (plot_timeline, trace.memory_timeline(), trace.phase_begins())}
    for name, (plot, *data) in plots.items():
        with spared(name):
            figure, axis = pyplot.subplots(figsize=(8, 4.5), layout="constrained")
            try:
                plot(axis, *data)
                save(figure, os.path.join(directory, name))
                made.append(name)
            finally:
                pyplot.close(figure)
    return made


def plot_sublayers(axis, entries, time_kind):
    """A bar for every sub-layer, its directions one after the other."""
    names, left = list(dict.fromkeys(e["name"] for e in entries)), 0.0
    for direction in dict.fromkeys(e["direction"] for e in entries):
        times = {e["name"]: e["total_us"] / 1e3 for e in entries if e["direction"] == direction}
        widths = np.array([times.get(name, 0.0) for name in names])
        axis.barh(names, widths, left=left, label=direction)
        left = left + widths
    axis.invert_yaxis()
    axis.set(xlabel=f"ms per step ({time_kind})", ylabel="sub-layer, all blocks",
             title="Time by sub-layer")
    axis.legend()


def plot_timeline(axis, timeline, begins):
    """Live bytes over time, which change in steps, with lines where phases begin."""
    if timeline:
        times, sizes = np.array(timeline).T
        axis.step(times / 1e3, sizes / MEGABYTE, where="post", linewidth=0.8, color="0.2")
        for number, phase in enumerate(dict.fromkeys(name for _, name in begins)):
            for again, time in enumerate(time for time, name in begins if name == phase):
                axis.axvline(time / 1e3, color=f"C{number}", linewidth=0.6,
                             label=None if again else f"{phase} begins")
        axis.legend(loc="upper right")
    axis.set(xlabel="ms since the trace began", ylabel="MB, change since the trace began")


def plot_ablation(path, results):
    """Step times and saved activations of all variants that were measured, the first one as a line."""
    pyplot = pyplot_or_none()
    if pyplot is not None:
        with spared(os.path.basename(path)):
            draw_ablation(pyplot, path, [r for r in results if r["measured"]])


def draw_ablation(pyplot, path, results):
    names = [r["name"] for r in results]
    figure, axes = pyplot.subplots(1, 2, figsize=(11, 0.5 + 0.35 * len(names)), layout="constrained",
                                   sharey=True)
    times = np.array([[1e3 * r[f"{q}_batch_time"] for q in ("p20", "median", "p80")] for r in results]).T
    axes[0].barh(names, times[1], xerr=np.abs(times[[0, 2]] - times[1]), color="0.6")
    axes[0].axvline(times[1][0], color="0.2", linewidth=0.8)
    axes[0].set(xlabel="ms per step: median, p20 to p80")
    axes[1].barh(names, [r["saved_activation_mb"] for r in results], color="0.6")
    axes[1].set(xlabel="saved activations, MB")
    axes[0].invert_yaxis()
    save(figure, path)
    pyplot.close(figure)
