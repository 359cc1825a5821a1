"""The README's plot and table: what benchmarks/plot_results.py reads from the raw files, digit by digit."""
import re

import pytest

from benchmarks import plot_results
from tests.support import ROOT

README = (ROOT / "README.md").read_text(encoding="utf-8")


def test_the_committed_plot_is_of_the_raw_files():
    assert (ROOT / "docs" / "results.svg").read_text(encoding="utf-8") == plot_results.drawing()
    assert "docs/results.svg" in README


def cells(heading):
    """The README's table whose first heading this is, a list of rows of texts; bold ones without stars."""
    table = re.search(rf"^\| {heading}(?:.*\n)((?:\|.*\n)+)", README, re.MULTILINE).group(1)
    return [[cell.strip(" *") for cell in line.split("|")[1:-1]] for line in table.splitlines()[1:]]


@pytest.mark.parametrize("column, shape", [(1, "B4 S64 N16"), (3, "B1 S256 N64"),
                                           (5, "B1 S384 N128 c_m 256")])
def test_the_table_has_the_figures_of_the_raw_file(column, shape):
    assert [row[column:column + 2] for row in cells("a training step")] == [
        [f"{ms:.2f}", f"{mb:.0f}"] for ms, mb in plot_results.figures(shape)]


def test_other_people_s_layers_too():
    results = plot_results.json.loads((plot_results.RESULTS / "patches_h200_2026-11-28.json").read_text())
    found = cells("one block in training")
    assert len(found) == 4
    for name, *figures in found:
        ways = results["results"][f"{re.match('[A-Za-z]+3?', name)[0].lower()} S256"]
        assert [figure.strip("*") for figure in figures] == [
            f"{ways[way]['median_ms']:.2f}" for way in ("as it is", "patched", "patched, graphs")]
