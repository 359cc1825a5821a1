#!/usr/bin/env python3
"""Draw the README's plot from the raw results: time and peak memory of a training step at B1 S256 N64.

    python benchmarks/plot_results.py > docs/results.svg

Plain SVG, written here, so that the same results give the same bytes and a test can compare them.
"""
import argparse
import json
import sys
from pathlib import Path

RESULTS = Path(__file__).resolve().parent / "results"
FILE, SHAPE = RESULTS / "ladder_h100_2026-11-27.json", "B1 S256 N64"  # of measure_ladder.py
ROWS = {  # what the plot calls it: its name in the file
    "plain PyTorch, float32": "baseline fp32",
    "bf16, compiled, CUDA graph": "+ compile",
    "every PyTorch fusion": "best",
    "our Triton kernels": "ultra",
    "... and selective checkpointing": "ultra, selective checkpointing",
}
LEFT, BAR, GAP, LINE = 230, 220, 88, 27  # pixels: labels, longest bar, room for a number, one row
COLORS = ("#8a8a8a", "#8a8a8a", "#8a8a8a", "#1f6fb4", "#1f6fb4")  # grey: PyTorch's; blue: ours


def figures(shape):
    """[(milliseconds, MB)] of a training step of this shape, for each of ROWS."""
    rows = {row["name"]: row for row in json.loads(FILE.read_text(encoding="utf-8"))["rows"]}
    found = [rows[f"{shape} | {name}"] for name in ROWS.values()]
    return [(row["median_ms"], row["peak_mb"]) for row in found]


def panel(x, title, numbers, unit):
    """One column of bars, the longest BAR wide, each with its number behind it."""
    yield f'<text x="{x}" y="22" font-weight="bold">{title}</text>'
    for row, (number, color) in enumerate(zip(numbers, COLORS, strict=True)):
        width, y = BAR * number / max(numbers), 36 + LINE * row
        yield f'<rect x="{x}" y="{y}" width="{width:.1f}" height="18" fill="{color}"/>'
        text = f"{number:.2f}" if number < 100 else f"{number:,.0f}"
        yield f'<text x="{x + width + 5:.1f}" y="{y + 13}">{text} {unit}</text>'


def drawing():
    times, memory = zip(*figures(SHAPE), strict=True)
    width, height = LEFT + 2 * (BAR + GAP), 46 + LINE * len(ROWS)
    second = LEFT + BAR + GAP
    labels = [f'<text x="{LEFT - 8}" y="{49 + LINE * row}" text-anchor="end">{label}</text>'
              for row, label in enumerate(ROWS)]
    return "\n".join([
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" '
        f'height="{height}" font-family="sans-serif" font-size="13" role="img">',
        f"<title>Training step at {SHAPE}, one NVIDIA H100: time and peak memory</title>",
        f'<rect width="{width}" height="{height}" fill="white"/>', *labels,
        *panel(LEFT, "time of a training step", times, "ms"),
        *panel(second, "peak memory", memory, "MB"), "</svg>"]) + "\n"


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter).parse_args()
    sys.stdout.write(drawing())
