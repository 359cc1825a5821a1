"""Pictures, where matplotlib is installed."""
from fusion_lab.training.files import MISSING, UserError


def require_matplotlib():
    """matplotlib's pyplot, drawing into files. Raises UserError (code 3) where it is not installed."""
    try:
        import matplotlib
    except ImportError:
        raise UserError("plots need matplotlib: pip install matplotlib", code=MISSING) from None
    matplotlib.use("Agg")
    from matplotlib import pyplot
    return pyplot
