#!/usr/bin/env python3
"""Store in a notebook what its cells print and draw: python tests/notebook.py [docs/first_hour.ipynb]

Runs the cells in order in one namespace, as Jupyter does, but needs only matplotlib.
"""
import base64
import contextlib
import io
import json
import os
import sys
from pathlib import Path
from unittest import mock

import matplotlib.pyplot as plt
from PIL import Image

ROOT = Path(__file__).resolve().parent.parent
BOOK = ROOT / "docs" / "first_hour.ipynb"


def png():
    """The figure that is drawn, in base64 and few colours, so that the notebook stays small."""
    drawn, small = io.BytesIO(), io.BytesIO()
    plt.savefig(drawn, dpi=72, bbox_inches="tight")
    plt.close()
    Image.open(drawn).convert("RGB").quantize(24).save(small, "png", optimize=True)
    return base64.b64encode(small.getvalue()).decode()


def outputs(source, names):
    """What a cell prints and shows, in the notebook's format."""
    printed, pictures = io.StringIO(), []
    with contextlib.redirect_stdout(printed), mock.patch.object(plt, "show", lambda: pictures.append(png())):
        exec(compile(source, "cell", "exec"), names)
    text = printed.getvalue().splitlines(keepends=True)
    return ([dict(output_type="stream", name="stdout", text=text)] if text else []) + [
        dict(output_type="display_data", data={"image/png": picture}, metadata={}) for picture in pictures]


def main(path=BOOK):
    path, names = Path(path).resolve(), {"__name__": "__main__"}
    book = json.loads(path.read_text(encoding="utf-8"))
    cells = [cell for cell in book["cells"] if cell["cell_type"] == "code"]
    os.chdir(BOOK.parent)
    outputs("".join(cells[0]["source"]), names)  # once more below, as people run the first cell twice
    for number, cell in enumerate(cells, 1):
        cell.update(execution_count=number, outputs=outputs("".join(cell["source"]), names))
    path.write_text(json.dumps(book, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
