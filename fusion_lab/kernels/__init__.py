"""Kernels and operations on tensors. Two have the names, shapes and main arguments of cuEquivariance's:

    from fusion_lab.kernels import triangle_attention, triangle_multiplicative_update

They need Triton and a GPU. They load at first use; without Triton that raises an ImportError.
"""
import importlib

DROP_IN = dict(triangle_attention="attention.drop_in",
               triangle_multiplicative_update="triangle_multiplication.drop_in")


def __getattr__(name):
    if name not in DROP_IN:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        return getattr(importlib.import_module(f"{__name__}.{DROP_IN[name]}"), name)
    except ModuleNotFoundError as error:
        if error.name.partition(".")[0] != "triton":
            raise
        raise ModuleNotFoundError(f"{__name__}.{name} needs Triton: pip install triton",
                                  name="triton") from None
