"""Pictures, where matplotlib is installed. They come last, so that a failing one costs no result."""
import contextlib
import os
import sys

from fusion_lab.training.errors import MISSING, UserError
from fusion_lab.training.files import write_atomically
from fusion_lab.training.words import printable


def require_matplotlib():
    """matplotlib's pyplot, drawing into files. Raises UserError (code 3) where it is not installed, or is and
    cannot be imported."""
    try:
        import matplotlib
        matplotlib.use("Agg")
        from matplotlib import pyplot
    except Exception as error:  # not there, built for another numpy, half removed, ...
        raise UserError(f"plots need matplotlib ({reason(error)}): pip install --force-reinstall matplotlib",
                        code=MISSING) from None
    return pyplot


def reason(error):
    """An exception in a line."""
    return printable(" ".join(str(error).split()) or type(error).__name__)


@contextlib.contextmanager
def spared(what):
    """Within, a picture is drawn; if that fails, there is a line on stderr and the program goes on."""
    try:
        yield
    except Exception as error:  # matplotlib fails in many ways
        print(f"warning: no {what}: {reason(error)}", file=sys.stderr)


def drawn(path, plot, *data, **layout):
    """Draw plot(axes, *data) on matplotlib's subplots of this layout, as a PNG; returns its path. What goes
    wrong is a line on stderr, and None is returned."""
    with spared(os.path.basename(path)):
        pyplot = require_matplotlib()
        figure, axes = pyplot.subplots(layout="constrained", **layout)
        try:
            plot(axes, *data)
            write_atomically(path, lambda file: figure.savefig(file, dpi=110, format="png"))
        finally:
            pyplot.close(figure)
        return path
