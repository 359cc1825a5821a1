"""The README's plot and table: what benchmarks/plot_results.py reads from the raw files, digit by digit."""
import re

import pytest

from benchmarks import plot_results
from tests.support import ROOT

README = (ROOT / "README.md").read_text(encoding="utf-8")


def test_the_committed_plot_is_of_the_raw_files():
    assert (ROOT / "docs" / "results.svg").read_text(encoding="utf-8") == plot_results.drawing()
    assert "docs/results.svg" in README


def cells():
    """The README's table, a list of rows of texts."""
    table = re.search(r"^\| a training step(?:.*\n)((?:\|.*\n)+)", README, re.MULTILINE).group(1)
    return [[cell.strip(" *") for cell in line.split("|")[1:-1]] for line in table.splitlines()[1:]]


@pytest.mark.parametrize("column, shape", [(1, "B4 S64 N16"), (2, "B1 S256 N64"),
                                           (3, "B1 S384 N128 c_m 256")])
def test_the_table_has_the_figures_of_the_raw_file(column, shape):
    assert [row[column].replace("*", "") for row in cells()[:-2]] == [
        f"{ms:.2f}, {mb:.0f}" for ms, mb in plot_results.figures(shape)]


@pytest.mark.parametrize("column, size", [(2, 256), (3, 384)])
def test_other_people_s_layers_too(column, size):
    results = plot_results.json.loads((plot_results.RESULTS / "patches_h100_2026-11-25.json").read_text())
    found = [[results["results"][f"{model} S{size}"][way]["gpu_ms"] for way in ways] for model, *ways in (
        ("openfold", "as it is", "patched"), ("boltz", "as it is", "cuEquivariance", "patched"))]
    assert [row[column] for row in cells()[-2:]] == [
        f"{' → '.join(f'{ms:.1f}' for ms in row)} ms" for row in found]
