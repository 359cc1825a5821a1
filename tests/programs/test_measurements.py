"""Measurements in documents: every figure stands in a raw file that its section names."""
import json
import re
from itertools import chain

import pytest

from tests.support import ROOT

RESULTS = ROOT / "benchmarks" / "results"
if not RESULTS.exists():
    pytest.skip("raw results were deleted", allow_module_level=True)
PAGES = ("benchmarks/FINDINGS.md", "benchmarks/RECORDS.md", "docs/companions.md", "docs/folding.md",
         "docs/kernels.md", "evoformer_kernels/README.md", "tiny_openfold/models/README.md")
SECTIONS = {f"{page}, {title}": text for page in PAGES for title, text in re.findall(
    r"^## (.*?)\n(.*?)(?=^#+ |\Z)", (ROOT / page).read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)}
NUMBER = re.compile(r"(?<![\w.,-])[\d,]*\d*\.?\d+(?![\w.]*\d)")
MEASURED = re.compile(rf"{NUMBER.pattern}(?:,? (?:to|and|instead of) {NUMBER.pattern})*(?= (?:ms|MB)\b)")
NO_FIGURE = re.compile(r"`[^`]*`|\b[BSN] ?\d+|(?<![\d.])\d+(?:, \d+)+(?![\d.])")  # files, sizes, widths
ELSEWHERE = "e77e90b"  # an older commit
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
    """Figures of three digits or more, as texts: of a section's tables, where a row's first cell is its name,
    and of ms and MB in its sentences. Rows and sentences of ELSEWHERE are not traced."""
    section = re.sub(r"```.*?```", "", section, flags=re.DOTALL)
    rows = re.findall(r"^\|[^|]*\|(.*)\|$", section, re.MULTILINE)
    prose = re.sub(r"^\|.*$", "", section, flags=re.MULTILINE).replace("\n", " ")
    for text in (*[NO_FIGURE.sub("", row) for row in rows if ELSEWHERE not in row],
                 *[" ".join(MEASURED.findall(words)) for words in re.split(r"(?<=[.:!?]) ", prose)
                   if ELSEWHERE not in words]):
        digits = {number: re.sub(r"\D", "", number).lstrip("0") for number in NUMBER.findall(text)}
        yield from (number for number in digits if len(digits[number]) > 2)


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
