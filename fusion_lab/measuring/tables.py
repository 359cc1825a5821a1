"""Rows of cells as a table, and what stands in cells."""
import re

from fusion_lab.training.words import printable


def markdown(rows, least=()):
    """Rows of cells, the header first, as lines of a Markdown table with columns of equal width, whatever is
    in the cells. The last cell of a short row may overhang. least: widths, where more rows are to come."""
    rows = [[printable(cell).replace("|", "\\|") for cell in row] for row in rows]
    count = len(rows[0])
    widths = [max([*least[i:i + 1], *(len(row[i]) for row in rows if len(row) == count or i < len(row) - 1)])
              for i in range(count)]
    lines = ["| " + " | ".join(cell.ljust(width) for cell, width in zip(
        [*row, *[""] * (count - len(row))], widths, strict=True)) + " |" for row in rows]
    return [lines[0], "|" + "|".join("-" * (width + 2) for width in widths) + "|", *lines[1:]]


def code(text, longest=90):
    """A name from elsewhere as code in markdown, which a backtick in it would end."""
    text = printable(text).replace("`", "'")
    return "`" + (text if longest is None or len(text) <= longest else text[:longest - 3] + "...") + "`"


def escaped(text):
    """Words from elsewhere as plain text in markdown."""
    return re.sub(r"([\\`*\[\]<>])", r"\\\1", printable(text))


def cell(value, form=".2f", scale=1.0, unit=""):
    """A number as a cell: scaled, formatted, without a sign where it rounds to 0, with its unit; empty for
    None."""
    text = "" if value is None else format(value * scale, form) + unit
    return text if any(digit in text for digit in "123456789") else text.removeprefix("-")
