"""From panels to pictures: one PNG of all, and for a page an SVG of each."""
import io
import re
from collections.abc import Callable
from dataclasses import dataclass

STYLE = {"svg.fonttype": "none", "font.family": "sans-serif", "font.size": 9,
         "font.sans-serif": ["DejaVu Sans", "Arial", "Helvetica"], "axes.spines.top": False,
         "axes.spines.right": False, "axes.titlesize": 9, "legend.frameon": False,
         "svg.hashsalt": "study"}  # or ids are random, and the same results make another page each time
MAX_COLUMNS = 3
PIXELS_PER_POINT = 4 / 3


@dataclass(frozen=True)
class Panel:
    """One diagram: inches, and what draws it on matplotlib's axes."""
    width: float
    height: float
    draw: Callable


@dataclass(frozen=True)
class Figure:
    """A drawn picture: its file, what it shows, and the SVG text of every panel."""
    name: str
    title: str
    caption: str
    svgs: tuple


def compose(pyplot, panels):
    """matplotlib's figure of all panels, in rows."""
    columns = min(len(panels), MAX_COLUMNS)
    rows = -(-len(panels) // columns)
    width, height = max(panel.width for panel in panels), max(panel.height for panel in panels)
    figure, axes = pyplot.subplots(rows, columns, figsize=(width * columns, height * rows), squeeze=False,
                                   layout="constrained")
    for spare in axes.flat[len(panels):]:
        spare.set_visible(False)
    for panel, axis in zip(panels, axes.flat, strict=False):
        panel.draw(axis)
    return figure


def svg_of(pyplot, panel, name):
    picture, text = compose(pyplot, [panel]), io.StringIO()
    picture.savefig(text, format="svg", metadata={"Date": None})
    pyplot.close(picture)
    return inline(text.getvalue(), name)


def inline(svg, name):
    """SVG text to put into a page: without the XML head, every id made the picture's own, its width between
    the smallest at which its letters can be read and somewhat more than it was drawn in."""
    head, body = svg[svg.index("<svg"):].split(">", 1)
    body = re.sub(r'(\sid="|url\(#|href="#)', rf"\g<1>{name}-", body)
    width = float(re.search(r' width="([\d.]+)pt"', head)[1]) * PIXELS_PER_POINT
    head = re.sub(r' (width|height)="[^"]*"', "", head)
    return f'{head} style="width: {1.05 * width:.0f}px; min-width: {0.75 * width:.0f}px">{body}'
