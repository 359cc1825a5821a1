"""The pictures of a session: time by sub-layer, live memory; and of an ablation."""
import os

import numpy as np

from fusion_lab.measuring.plotting import drawn
from fusion_lab.measuring.trace import NOT_RECORDED, OUTSIDE
from fusion_lab.training.machine import MEGABYTE

SUBLAYERS, TIMELINE = "time_by_sublayer.png", "memory_timeline.png"


def write_plots(directory, analysis, trace):
    """The pictures of a session, into its directory; returns the names of those that could be made."""
    plots = {SUBLAYERS: (plot_sublayers, analysis["sublayers"], analysis["time_kind"]),
             TIMELINE: (plot_timeline, trace.memory_timeline(), trace.phase_begins())}
    return [name for name, plot in plots.items()
            if drawn(os.path.join(directory, name), *plot, figsize=(8, 4.5))]


def plot_sublayers(axis, entries, time_kind):
    """A bar for every sub-layer, its directions one after the other."""
    def name_of(entry):  # what lies outside of all steps is no part of "rest", as in the report
        return entry["direction" if entry["direction"] in (OUTSIDE, NOT_RECORDED) else "name"]

    names, left = list(dict.fromkeys(map(name_of, entries))), 0.0
    for direction in dict.fromkeys(e["direction"] for e in entries):
        times = {name_of(e): e["total_us"] / 1e3 for e in entries if e["direction"] == direction}
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


def write_ablation_plot(path, rows):
    """Step times and saved activations of the rows that were measured, the first one as a line."""
    drawn(path, plot_ablation, [row for row in rows if row["measured"]], nrows=1, ncols=2, sharey=True,
          figsize=(11, 0.5 + 0.35 * len(rows)))


def plot_ablation(axes, rows):
    names = [row["name"] for row in rows]
    times = np.array([[1e3 * row[f"{q}_batch_time"] for q in ("p20", "median", "p80")] for row in rows]).T
    axes[0].barh(names, times[1], xerr=np.abs(times[[0, 2]] - times[1]), color="0.6")
    axes[0].axvline(times[1][0], color="0.2", linewidth=0.8)
    axes[0].set(xlabel="ms per step: median, p20 to p80")
    axes[1].barh(names, [row["saved_activation_mb"] for row in rows], color="0.6")
    axes[1].set(xlabel="saved activations, MB")
    axes[0].invert_yaxis()
