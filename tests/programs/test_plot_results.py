"""The README's plot and table: what benchmarks/plot_results.py reads from the raw files, digit by digit."""
import re
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "benchmarks"))
plot_results = pytest.importorskip("plot_results")
if not plot_results.RESULTS.exists():
    pytest.skip("raw results were deleted", allow_module_level=True)
README = (ROOT / "README.md").read_text(encoding="utf-8")


def test_the_committed_plot_is_of_the_raw_files():
    assert (ROOT / "docs" / "results.svg").read_text(encoding="utf-8") == plot_results.drawing()
    assert "docs/results.svg" in README


@pytest.mark.parametrize("row", range(len(plot_results.ROWS)))
def test_the_table_has_the_plot_s_figures(row):
    """In the column of the plot's size, in the rows of the plot."""
    table = re.search(r"^\| a training step.*\n\|[-|]*\n((?:\|.*\n)+)", README, re.MULTILINE).group(1)
    cell = table.splitlines()[row].split("|")[3]
    milliseconds, mb = plot_results.figures(*plot_results.ROWS[row][1:])
    assert cell.replace("*", "").split(", ") == [f" {milliseconds:.2f}", f"{mb:.0f} "]
