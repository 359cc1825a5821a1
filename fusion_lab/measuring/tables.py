"""Rows of cells as text and as markdown."""
import re

from fusion_lab.training.files import printable


def aligned(rows):
    """Rows of cells, the header first, as text in columns of equal width; a short row may overhang."""
    full = [row for row in rows if len(row) == len(rows[0])]
    widths = [max(len(row[i]) for row in full) for i in range(len(rows[0]))]
    widths[0] = max(len(row[0]) for row in rows)
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=False)).rstrip()
            for row in rows]


def markdown(rows):
    """The same rows as lines of a markdown table, whatever is in the cells."""
    width = len(rows[0])
    lines = ["| " + " | ".join(printable(cell).replace("|", "\\|") for cell in
                               [*row, *[""] * (width - len(row))]) + " |" for row in rows]
    return [lines[0], "|" + "---|" * width, *lines[1:]]


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
