"""Which Triton switches change nothing, and why, by the widths that their kernels take. No torch here: flags
are judged before it is imported."""
from evoformer_kernels import limits

SWITCH = "enable_triton_"


def switch_takes(switch, width):
    """Whether the kernels of a switch take this width: of a head for attention; any for the outer product's
    layout and for what the compiler gathers; else of a position."""
    if switch in (f"{SWITCH}outer_layout", f"{SWITCH}weight_gradients"):
        return True
    return width <= limits.WIDEST_HEAD if switch == f"{SWITCH}attention" else width in limits.CHANNELS


def projections_by_library(**widths):
    """For the start-up line: whose attention, of {name: (channels, heads)}, keeps the library's projections
    beside our kernels."""
    names = [name for name, width in widths.items() if not limits.takes("attention sub-layer", *width)]
    return f"; {', '.join(names)}: projections by the library" if names else ""


def in_words(switch, widths):
    """"48 or 96 channels", of attention "heads of 48 or 96 channels" """
    heads = "heads of " if switch == f"{SWITCH}attention" else ""
    return f"{heads}{' or '.join(dict.fromkeys(map(str, widths)))} channels"


def idle_kernels(fusion, widths, bias, use_amp, on_gpu):
    """{switch: why it changes nothing here} of a model's Triton switches; widths: {switch: those that it
    would give its kernels}; bias: channels and heads of one that triton-attention would make even so."""
    names = [name for name in fusion.names() if name in widths and getattr(fusion, name)]
    if not (on_gpu and limits.HAS_TRITON):
        needed = "Triton (pip install triton)" if on_gpu else "a GPU"
        return dict.fromkeys(names, f"Triton kernels need {needed}")
    if not use_amp:
        return dict.fromkeys(names, "Triton kernels need --use-amp: float32 is more exact without them")
    idle = [name for name in names if not any(switch_takes(name, width) for width in widths[name])
            and not (name == f"{SWITCH}attention" and limits.takes("head bias", *bias))]
    return {name: f"{name.removeprefix('enable_').replace('_', '-')} has no kernel for "
            f"{in_words(name, widths[name])}" for name in idle}
