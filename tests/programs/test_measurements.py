"""Tables of measurements in documents: every figure stands in a raw file that its section names."""
import json
import re
from itertools import chain

import pytest

from tests.support import ROOT

RESULTS = ROOT / "benchmarks" / "results"
if not RESULTS.exists():
    pytest.skip("raw results were deleted", allow_module_level=True)
PAGES = ("benchmarks/FINDINGS.md", "benchmarks/RECORDS.md", "docs/companions.md", "docs/folding.md",
         "tiny_openfold/models/README.md")
TEXT = "\n".join((ROOT / page).read_text(encoding="utf-8") for page in PAGES)
SECTIONS = dict(re.findall(r"^## (.*?)\n(.*?)(?=^#+ |\Z)", TEXT, re.MULTILINE | re.DOTALL))
NUMBER = re.compile(r"(?<![\w.,-])[\d,]*\d*\.?\d+(?![\w.]*\d)")
ELSEWHERE = "e77e90b"  # a row of this source is not traced
UNITS = (1, 1e3, 2 ** -20)  # s to ms, bytes to MB


def numbers(value):
    """Every number of a raw file, those in its texts too."""
    if isinstance(value, dict | list):
        return chain.from_iterable(map(numbers, value.values() if isinstance(value, dict) else value))
    return map(float, re.findall(r"\d+\.?\d*(?:e-?\d+)?", str(value)))


def raw(section):
    """Sorted numbers of the raw files that a section names."""
    found = set()
    for name in set(re.findall(r"`(?:[\w/]+/)?(\w+_20[\d-]+\w*)(?:\.\w+)?`", section)):
        for path in [*RESULTS.glob(f"{name}.*"), *RESULTS.glob(f"{name}/*.json")]:
            text = path.read_text(encoding="utf-8")
            found.update(numbers(json.loads(text) if path.suffix == ".json" else text))
    return found


def figures(section):
    """Figures of three digits or more in the traced rows of a section's tables, as texts; a row's first cell
    is its name."""
    for row in re.findall(r"^\|[^|]*\|(.*)\|$", section, re.MULTILINE):
        if ELSEWHERE not in row:
            cells = re.sub(r"`[^`]*`|\b[BSN] ?\d+", "", row)
            digits = {text: re.sub(r"\D", "", text).lstrip("0") for text in NUMBER.findall(cells)}
            yield from (text for text in digits if len(digits[text]) > 2)


@pytest.mark.parametrize("title", [title for title, text in SECTIONS.items() if any(figures(text))])
def test_figures_stand_in_the_raw_files(title):
    known = raw(SECTIONS[title])
    missing = []
    for text in figures(SECTIONS[title]):
        digits = len(text.partition(".")[2])
        half = 0.5001 * 10 ** -digits
        figure = float(text.replace(",", ""))
        if not any(abs(unit * number - figure) <= half for unit in UNITS for number in known):
            missing.append(text)
    assert missing == []
