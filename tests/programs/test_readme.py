"""The README: short, and its figures are those of the raw files that it names."""
import json
import re

import pytest

from benchmarks import plot_results
from tests.support import ROOT

README = (ROOT / "README.md").read_text(encoding="utf-8")
SHAPE = "B1 S256 N64"  # of the claims


def raw(name):
    return json.loads((ROOT / "benchmarks" / "results" / name).read_text(encoding="utf-8"))


def test_it_is_short():
    assert README.count("\n") <= 125


@pytest.mark.parametrize("column, shape", [(1, "B4 S64 N16"), (3, "B1 S384 N128 c_m 256")])
def test_the_table_has_the_figures_of_the_raw_file(column, shape):
    table = re.search(r"^\| a training step(?:.*\n)((?:\|.*\n)+)", README, re.MULTILINE).group(1)
    rows = [[cell.strip(" *") for cell in line.split("|")[1:-1]] for line in table.splitlines()[1:]]
    assert [row[column:column + 2] for row in rows] == [
        [f"{ms:.2f}", f"{mb:.0f}"] for ms, mb in plot_results.figures(shape)]


def test_its_claims_are_those_of_the_raw_files():
    steps = {row["name"]: row for row in raw("ladder_h100_2026-11-27.json")["rows"]}
    baseline, best, ultra = (steps[f"{SHAPE} | {name}"] for name in ("baseline fp32", "best", "ultra"))
    block = raw("patches_h200_2026-11-28.json")["results"]["boltz S256"]
    own, patched = (block[way]["median_ms"] for way in ("as it is", "patched, graphs"))
    eager = raw("fusion_h200_2026-11-21_b1_s256_n64.json")["compare"]
    plain = [eager[f"{SHAPE} {precision}"]["variants"][0] for precision in ("fp32", "tf32", "bf16")]
    plain = [f"{1e3 * row['median_batch_time']:.0f}" for row in plain]
    gains = [f"{row['median_ms'] / ultra['median_ms']:.1f}" for row in (baseline, best)]
    for claim in (f"{gains[0]} times as fast as plain PyTorch in float32",
                  f"{gains[1]} times as fast as compiled fusions in bfloat16",
                  f"kernel launches ({baseline['launches']:,} become {ultra['launches']})",
                  f"takes {patched:.1f} ms instead of {own:.1f} ms",
                  "takes {} ms in float32, {} in TF32 and {} in bfloat16".format(*plain),
                  f"TM-score is {raw('example_1a3a_cpu_2026-11-28.json')['fold']['scores']['tm_score']:.2f}"):
        assert claim in re.sub(r"\s+", " ", README), claim
