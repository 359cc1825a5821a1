"""Pictures, where matplotlib is installed."""
from fusion_lab.training.files import MISSING, UserError, write_atomically


def require_matplotlib():
    """matplotlib's pyplot, drawing into files. Raises UserError (code 3) where it is not installed."""
    try:
        import matplotlib
    except ImportError:
        raise UserError("plots need matplotlib: pip install matplotlib", code=MISSING) from None
    matplotlib.use("Agg")
    from matplotlib import pyplot
    return pyplot


def save(figure, path):
    """A figure as PNG. Raises UserError."""
    write_atomically(path, lambda file: figure.savefig(file, dpi=110, format="png"))
