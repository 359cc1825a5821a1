"""Pictures, where matplotlib is installed."""
from matplotlib import pyplot

from fusion_lab.training.files import UserError


def require_matplotlib():
    """matplotlib's pyplot, drawing into files. Raises UserError (code 3) where it is not installed."""
    try:
        import matplotlib
    except ImportError:
        raise UserError("plots need matplotlib: pip install matplotlib", code=3) from None
    matplotlib.use("Agg")
    return pyplot
