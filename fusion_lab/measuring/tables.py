"""Rows of cells as text and as markdown."""



def aligned(rows):
    """Rows of cells, the header first, as text in columns of equal width; a short row may overhang."""
    full = [row for row in rows if len(row) == len(rows[0])]
    widths = [max(len(row[i]) for row in full) for i in range(len(rows[0]))]
    widths[0] = max(len(row[0]) for row in rows)
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=False)).rstrip()
            for row in rows]


def markdown(rows):
    """The same rows as lines of a markdown table."""
    width = len(rows[0])
    lines = ["| " + " | ".join([*row, *[""] * (width - len(row))]) + " |" for row in rows]
    return [lines[0], "|" + "---|" * width, *lines[1:]]


def cell(value, form=".2f", scale=1.0, unit=""):
    """A number as a cell: scaled, formatted, with its unit; empty for None."""
    return "" if value is None else format(value * scale, form) + unit
