#!/usr/bin/env python3
"""Draw the plots of the documents as SVG.

    python benchmarks/plot_results.py results > docs/results.svg  # a training step, before and after
    python benchmarks/plot_results.py patches > docs/patches.svg  # blocks of other projects, the same
    python benchmarks/plot_results.py timeline BEFORE AFTER       # what a step of two sessions ran, and when

Results and patches come from the raw results. BEFORE and AFTER are directories of profiler sessions
(run_pytorch_profiler.sh), whose names head the two steps. The same input gives the same bytes, so a test can
compare them. On a CPU, TORCHINDUCTOR_CPP_ENABLE_KERNEL_PROFILE=1 lets a session see compiled operations.
docs/timeline.svg is of `--num-blocks 1 --seq-len 16 --num-seqs 8 --batch-size 1`, with one thread.
"""
import argparse
import json
import pathlib
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
from fusion_lab.training import files
from fusion_lab.training.errors import exit_code
from fusion_lab.training.words import printable

RESULTS = ROOT / "benchmarks" / "results"

# --- SVG ------------------------------------------------------------------------------------------------

# Colours of Okabe and Ito (2008), as in model.svg: grey plain, light blue fused, dark blue with our kernels
STYLE = """.page{fill:#fff}text{font:13px system-ui,"Segoe UI","DejaVu Sans",sans-serif;fill:#1a1a1a}
.h{font-size:17px;font-weight:600}.t{font-weight:600}.s{font-size:12px;fill:#555}
.plain{fill:#8a8a8a;stroke:#8a8a8a}.fused{fill:#56b4e9;stroke:#56b4e9}.ours{fill:#0072b2;stroke:#0072b2}
.bar{stroke:none!important}polyline{stroke-width:2;fill:none!important}.axis{stroke:#ccc;stroke-width:1}
@media(prefers-color-scheme:dark){.page{fill:#15181c}text{fill:#e8e8e8}.s{fill:#a9b0b8}.axis{stroke:#444}
.ours{fill:#3d9be0;stroke:#3d9be0}.fused{fill:#a6dcff;stroke:#a6dcff}}"""
PLAIN, FUSED, OURS = "plain", "fused", "ours"


def text(x, y, words, kind="", anchor="start"):
    escaped = str(words).replace("&", "&amp;").replace("<", "&lt;")
    return f'<text x="{x:g}" y="{y:g}" class="{kind}" text-anchor="{anchor}">{escaped}</text>'


def bar(x, y, width, height, kind):
    return f'<rect x="{x:.2f}" y="{y:g}" width="{width:.2f}" height="{height:g}" class="bar {kind}"/>'


def line(points, kind):
    places = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
    return f'<polyline points="{places}" class="{kind}"/>'


def page(width, height, title, below, body):
    """A whole picture: its title, the lines below it, and the parts of its body."""
    return "\n".join([
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" '
        f'height="{height}" role="img">', f"<title>{title}</title>", f"<style>{STYLE}</style>",
        '<rect width="100%" height="100%" class="page"/>', text(20, 28, title, "h"),
        *(text(20, 48 + 17 * row, words, "s") for row, words in enumerate(below)), *body, "</svg>"]) + "\n"


def legend(x, y, entries):
    """One row of (words, kind)."""
    for words, kind in entries:
        yield bar(x, y - 10, 12, 12, kind)
        yield text(x + 18, y, words)
        x += 46 + 6.7 * len(words)


def read(name):
    """(a raw result, the GPU, torch and date that it was measured with)."""
    result = json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))
    system = result["system_info"]
    return result, f"{system['gpu_name']}, torch {system['torch_version']}, {result['date']}"


# --- A training step of ours ----------------------------------------------------------------------------

LADDER, SHAPE = "ladder_h100_2026-11-27", "B1 S256 N64"  # of measure_ladder.py
ROWS = (  # label as in the README's table, precision, kind, name in the file
    ("baseline: plain PyTorch", "float32 without TF32", PLAIN, "baseline fp32"),
    ("default fusions, compiled, one CUDA graph", "bfloat16", FUSED, "+ compile"),
    ("--enable-all-fusion", "bfloat16", FUSED, "best"),
    ("--enable-ultra: our kernels, too", "bfloat16", OURS, "ultra"),
    ("ultra, selective checkpointing", "bfloat16", OURS, "ultra, selective checkpointing"))
LABELS, LONGEST, ROW = 310, 230, 40  # pixels: labels, the longest bar, one row


def figures(shape):
    """[(milliseconds, MB)] of a training step of this shape, for each of ROWS."""
    rows = {row["name"]: row for row in read(LADDER)[0]["rows"]}
    found = [rows[f"{shape} | {name}"] for *_, name in ROWS]
    return [(row["median_ms"], row["peak_mb"]) for row in found]


def results():
    body = []
    for row, (label, precision, *_) in enumerate(ROWS):
        body += [text(LABELS - 12, 118 + ROW * row, label, anchor="end"),
                 text(LABELS - 12, 133 + ROW * row, precision, "s", "end")]
    for x, title, unit, numbers in zip((LABELS, LABELS + LONGEST + 90), ("time", "peak memory"), ("ms", "MB"),
                                       zip(*figures(SHAPE), strict=True), strict=True):
        body.append(text(x, 94, title, "t"))
        for row, number in enumerate(numbers):
            width, y = LONGEST * number / max(numbers), 106 + ROW * row
            body += [bar(x, y, width, 26, ROWS[row][2]),
                     text(round(x + width + 6), y + 18, f"{number:,.{2 if number < 100 else 0}f} {unit}")]
    sizes = "batch B 1, S 256 residues, N 64 alignment rows; 4 blocks, c_m 64, c_z 128; medians"
    return page(960, 118 + ROW * len(ROWS), "A training step, before and after fusion",
                [sizes, read(LADDER)[1]], body)


# --- Blocks of other projects ---------------------------------------------------------------------------

PATCHES = "patches_h200_2026-11-28"  # of measure_patches.py; cuEquivariance has none on this GPU
PROJECTS = {"boltz": "Boltz-2", "openfold3": "OpenFold3", "protenix": "Protenix",
            "openfold": "OpenFold, N 64"}
WAYS = {"as it is": ("own code", PLAIN), "patched": ("our kernels: patch(model)", FUSED),
        "patched, graphs": ("and CUDA graphs: patch(model, graphs=True)", OURS)}
SIZES, AT = (128, 256, 384, 512), 256  # where the factor is written
PANEL, HIGH, MOST = 190, 240, 70  # pixels: a panel's width and height; ms at its top


def panel(left, title, times):
    """A project's lines over S, and how many times as fast graphs make it; times: {way: [ms by SIZES]}."""
    bottom = 136 + HIGH

    def place(size, ms):
        return left + PANEL * (size - 128) / 384, bottom - HIGH * ms / MOST

    yield text(left, 124, title, "t")
    for size in SIZES:
        yield text(place(size, 0)[0], bottom + 18, size, "s", "middle")
    for ms in range(0, MOST, 20):
        yield line([place(128, ms), place(512, ms)], "axis")
    for way, (_, kind) in WAYS.items():
        yield line([place(size, ms) for size, ms in zip(SIZES, times[way], strict=True)], kind)
        yield from (f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3.5" class="{kind}"/>'
                    for x, y in map(place, SIZES, times[way]))
    before, _, after = (times[way][SIZES.index(AT)] for way in WAYS)
    yield line([place(AT, before), place(AT, after)], "axis")
    yield text(left + 4, place(0, 52)[1], f"S {AT}: {before:.1f} to {after:.1f} ms", "s")
    yield text(left + 4, place(0, 52)[1] + 18, f"{before / after:.1f} times as fast", "t")


def patches():
    result, where = read(PATCHES)
    body = [*legend(20, 94, WAYS.values()), text(40, 124, "ms", "s", "end")]
    body += [text(46, 140 + HIGH * (1 - ms / MOST), ms, "s", "end") for ms in range(0, MOST, 20)]
    for number, (key, title) in enumerate(PROJECTS.items()):
        times = {way: [result["results"][f"{key} S{size}"][way]["median_ms"] for size in SIZES]
                 for way in WAYS}
        body += panel(60 + (PANEL + 36) * number, title, times)
    body.append(text(60 + 2 * PANEL + 54, 174 + HIGH, "S, residues", "s", "middle"))
    return page(960, 190 + HIGH, "A block in training, four projects, before and after patch(model)",
                ["forward and backward of one block, called from Python; bfloat16, c_z 128; medians",
                 where], body)


# --- Two sessions on one time line ----------------------------------------------------------------------

PHASES = {"forward": FUSED, "backward": OURS, "optimizer": PLAIN}
AXIS, BAND, GAP = 660, 96, 0.4  # pixels: the longer step, the height of one, between marks


def session(directory):
    """(analysis, Step) of a profiler session's directory. Raises UserError."""
    from fusion_lab.measuring.analysis import ANALYSIS
    from fusion_lab.measuring.traced_step import fastest_step
    folder = pathlib.Path(directory)
    analysis = files.read_json(folder / ANALYSIS, "profiler session")
    return analysis, fastest_step(folder / analysis["trace"])


def step_band(y, name, analysis, step, longest, most):
    """One step: a mark for each launch, and a bar for the new tensors; longest µs, most bytes."""
    unit = "kernels" if step.on_gpu else "operations"
    yield text(20, y, printable(name), "t")
    yield text(20, y + 18, f"{len(step.marks)} {unit} in {step.length / 1e3:,.1f} ms", "s")
    yield line([(20, y + 58), (20 + AXIS * step.length / longest, y + 58)], "axis")
    for start, length, phase in step.marks:
        yield bar(20 + AXIS * start / longest, y + 28, max(AXIS * length / longest - GAP, GAP), 30,
                  PHASES.get(phase, PLAIN))
    yield bar(AXIS + 60, y + 28, 180 * step.new_bytes / most, 30, PLAIN)
    yield text(AXIS + 60, y + 18, f"{step.new_bytes / 2 ** 20:.0f} MB", "s")


def on_a_gpu():
    """How many kernels a larger step launches, in a sentence."""
    raw = read(LADDER)[0]
    counts = {row["name"]: row["launches"] for row in raw["rows"]}
    before, after = (counts[f"{SHAPE} | {name}"] for name in ("baseline fp32", "ultra"))
    return (f"On one {raw['system_info']['gpu_name']}, a step of {SHAPE} launches {before:,} kernels unfused "
            f"and {after:,} with --enable-ultra.")


def timeline(before, after):
    """The fastest traced steps of two sessions, on one scale."""
    found = {directory: session(directory) for directory in (before, after)}
    steps = [step for _, step in found.values()]
    longest, most = max(step.length for step in steps), max(step.new_bytes for step in steps)
    body = [*legend(20, 96, PHASES.items()), text(AXIS + 60, 96, "written to new tensors", "t")]
    for number, (directory, (analysis, step)) in enumerate(found.items()):
        body += step_band(132 + BAND * number, pathlib.Path(directory).resolve().name, analysis, step,
                          longest, most)
    if not steps[1].on_gpu:
        body.append(text(20, 140 + 2 * BAND, on_a_gpu(), "s"))
    analysis = found[after][0]
    system, training = analysis["system_info"], analysis["training_params"]
    where = (f"GPU, kernels: {system['gpu_name']}" if steps[1].on_gpu else
             f"CPU, operations: {system['host_cpu']}")
    sizes = {"batch_size": training["batch_size"], **analysis["config"]}
    return page(960, 160 + 2 * BAND, "The same training step before and after fusion", [
        f"{where}, torch {system['torch_version']}, {analysis['timestamp'][:10]}; traced, which adds time",
        ", ".join([training["amp_dtype"] or "float32",
                   *(f"{key} {value}" for key, value in sizes.items() if type(value) is int)])], body)


def run(argv=None):
    """Print a picture; returns the exit code. Raises UserError."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    pictures = parser.add_subparsers(required=True, metavar="results | patches | timeline")
    for draw in (results, patches, timeline):
        picture = pictures.add_parser(draw.__name__)
        picture.set_defaults(draw=draw)
        for name in ("before", "after") if draw is timeline else ():
            picture.add_argument(name, metavar=name.upper(), help="directory of a profiler session")
    given = vars(parser.parse_args(argv))
    sys.stdout.write(given.pop("draw")(**given))
    return 0


if __name__ == "__main__":
    sys.exit(exit_code(run, None, "plot_results.py"))
