"""Triton kernels of AlphaFold 2's Evoformer with their derivatives, for any model in PyTorch.

    from evoformer_kernels import triangle_attention, triangle_multiplicative_update, patch

The first two have the names, shapes and main arguments of cuEquivariance's functions; patch(model) puts our
kernels into other projects' layers. They load at first use, and need Triton: without it a warning says so,
and there are no such attributes. README.md beside this file: which GPUs, dtypes and widths.
"""
import importlib
import warnings

__version__ = "0.1.0"
HOME = dict(triangle_attention="attention.drop_in", patch="patches",
            triangle_multiplicative_update="triangle_multiplication.drop_in")  # where each is defined
__all__ = list(HOME)


def __getattr__(name):
    if name not in HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        return getattr(importlib.import_module(f"{__name__}.{HOME[name]}"), name)
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "triton":
            raise
        needed = f"{__name__}.{name} needs Triton: pip install triton"
        warnings.warn(needed, stacklevel=2)  # "from ... import" hides what an AttributeError says
        raise AttributeError(needed) from None


def __dir__():
    return sorted({*globals(), *HOME})
