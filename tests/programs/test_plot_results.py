"""The README's plot: what benchmarks/plot_results.py reads from the raw files, digit by digit."""
from benchmarks import plot_results
from tests.support import ROOT

README = (ROOT / "README.md").read_text(encoding="utf-8")


def test_the_committed_plot_is_of_the_raw_files():
    assert (ROOT / "docs" / "results.svg").read_text(encoding="utf-8") == plot_results.drawing()
    assert "docs/results.svg" in README
