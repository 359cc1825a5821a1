"""docs/promised.md: every figure of ours is made anew from the raw file that its row names."""
import json
import re

import pytest

from fusion_lab.measuring.roofline import roofline_table, sums
from fusion_lab.training.program import load_program
from tests.support import ROOT

LINES = (ROOT / "docs" / "promised.md").read_text(encoding="utf-8").splitlines()
ROWS = [[cell.strip() for cell in line.strip("| ").split(" | ")]
        for line in LINES if re.match(r"\| [OLUFM]: ", line)]


def raw(name):
    return json.loads((ROOT / "benchmarks" / "results" / f"{name}.json").read_text())


def fusion(name, precision, key="median_batch_time"):
    """{variant: a figure}"""
    [found] = [v for k, v in raw(name)["compare"].items() if k.endswith(precision)]
    return {row["name"]: row.get(key) for row in found["variants"] if row["measured"]}


def medians(rows):
    return {row["name"]: row["median"] for row in rows}


def less(before, after):
    return f"{100 * (1 - after / before):.0f}%"


def of_openfold():
    small, large = "fusion_h200_2026-11-21_b4_s64_n16", "fusion_h200_2026-11-21_b1_s256_n64"
    time, half = fusion(small, "fp32"), fusion(small, "bf16")
    gain = {name: f"{time['baseline'] / seconds:.2f}x" for name, seconds in time.items()}
    launches = fusion(small, "fp32", "launches_per_step")
    memory = [fusion(large, precision, "peak_memory_mb") for precision in ("fp32", "bf16")]
    compiled = "all + torch.compile"
    in_half = f"{half['baseline'] / half['triangle alone']:.2f}x"
    return {"O: all": [gain["all"], gain[compiled], gain["cuda_graphs alone"]],
            "O: MSA QKV": [gain["qkv_msa alone"]], "O: triangle QKV": [gain["qkv_triangle alone"]],
            "O: flash": [gain["flash_attention alone"]],
            "O: triangle fusion": [gain["triangle alone"], in_half],
            "O: torch.compile": [f"{time['all'] / time[compiled]:.2f}x"],
            "O: memory": [less(m["baseline"], m["flash_attention alone"]) for m in memory],
            "O: kernels": [f"{launches[name]:,}" for name in ("baseline", "all")]
            + [less(launches["baseline"], launches["all"])]}


def of_llama():
    ours, theirs = raw("llama_h200_large_2026-11-23")["tables"]["bfloat16"]["rows"]
    one, _, four, _ = ({way["name"]: way for way in shape["ways"]}
                       for shape in raw("ultra_block_h200_2026-11-22")["shapes"])
    ultra, plain = "Ultra-fused", "Standard"
    gains = {part: [f"{ways[plain]['seconds'][part][1] / ways[ultra]['seconds'][part][1]:.2f}x"
                    for ways in (one, four)] for part in ("forward", "step")}
    counts = {part: [one[name]["kernels"][part] for name in (plain, ultra)] for part in ("forward", "step")}
    return {"L: all": [f"{theirs['median'] / ours['median']:.2f}x", less(theirs["peak_mb"], ours["peak_mb"])],
            "U: one kernel": gains["forward"] + gains["step"],
            "U: memory": [less(ways[plain]["peak_mb"], ways[ultra]["peak_mb"]) for ways in (one, four)],
            "U: launches": [*map(str, counts["forward"] + counts["step"]), less(*counts["forward"])]}


def of_mpnn_and_patterns():
    [rows] = raw("mpnn_h200_bf16_2026-11-23")["tables"].values()
    step = medians(rows)
    patterns = {p["name"]: p for p in raw("fusion_patterns_h200_2026-11-22")["patterns"]}
    times = {name: {way["name"]: way["forward"]["median"] for way in p["ways"] if way["forward"]}
             for name, p in patterns.items()}
    moved = {name: f"{p['plain_bytes'] / p['least_bytes']:.1f}" for name, p in patterns.items()}
    plain = {name: found["plain"] for name, found in times.items()}
    return {"M: fusion": [f"{step['ours, baseline'] / step[name]:.2f}x" for name in
                          ("ours, fused", "ours, compiled, graph, message kernel")],
            "F: convolution": [f"{plain['conv'] / times['conv']['library']:.2f}x"],
            "F: bias": [f"{plain['relu'] / times['relu']['library']:.2f}x", moved["relu"]],
            "F: residual": [f"{plain['add_norm'] / times['add_norm']['ours']:.1f}x", moved["add_norm"]],
            "F: top-k": [f"{plain['topk'] / times['topk']['ours']:.1f}x"]}


def of_roofline():
    ceilings, found = dict(copy_bytes_per_s=1.0, matmul_flops_per_s=1.0), {}
    for name, sizes in (("tiny_llama", dict(batch_size=8, data=str(ROOT / "README.md"))),
                        ("protein_mpnn", dict(batch_size=1, seq_len=106))):
        program = load_program(ROOT / "companions" / f"{name}.py")
        table = roofline_table(program, program.settings(**sizes, device="cpu"), False, ceilings, {})
        found[name] = {row["name"]: row for row in [*table, sums(table)]}
    whole, mpnn = found["tiny_llama"]["all"], found["protein_mpnn"]
    return {"U: 50 FLOP": [f"{whole['flops'] / whole[f'{what}_bytes']:.1f}"
                           for what in ("baseline", "minimal")],
            "M: 28 times": [f"{mpnn[name]['baseline_bytes'] / mpnn[name]['minimal_bytes']:.1f}"
                            for name in ("encoder", "all")]}


SIZES = re.compile(r"\b(?:[BS]\d+|float32|bfloat16)\b")  # no figures


def check(figures):
    """Each row of these has all of its figures in the cell "measured", and no other number."""
    for start, expected in figures.items():
        [row] = [row for row in ROWS if row[0].startswith(start)]
        numbers = re.findall(r"\d[\d,.]*\d(?:x|%)?|\d(?:x|%)?", SIZES.sub("", row[1]))
        assert sorted(numbers) == sorted(expected), row[0]


def test_figures_are_those_of_the_raw_files():
    figures = of_openfold() | of_llama() | of_mpnn_and_patterns()
    check(figures)
    of_files = [row for row in ROWS if row[2].startswith("`")]
    assert len(of_files) == len(figures) and len(ROWS) > 20
    for row in of_files:
        assert re.fullmatch(r"`\w*h200_\w*2026-[\w-]*`", row[2])


@pytest.mark.slow
def test_computed_figures_are_those_of_the_roofline():
    figures = of_roofline()
    check(figures)
    assert len(figures) == sum(row[2] == "computed" for row in ROWS)


def test_what_was_not_measured_says_what_stands_in_the_way():
    """And with which command it is measured."""
    for row in ROWS:
        assert len(row) == 4 and row[3].endswith(".")
        assert (row[1] == "not measured") == (row[2] == "–") == row[3].endswith("till to run.")
        if row[2] == "–":
            [line] = [n for n, line in enumerate(LINES)
                      if line.startswith("# ") and row[0].startswith(line[2:].partition(";")[0])]
            assert re.match(r"python |\./run", LINES[line + 1]), row[0]
    assert {row[0][0] for row in ROWS} == set("OLUFM")
