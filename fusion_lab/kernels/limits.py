"""What this project's Triton kernels take. No torch: flags are judged before it is imported."""
import importlib.util

HAS_TRITON = importlib.util.find_spec("triton") is not None
CHANNELS = (16, 32, 64, 128, 256)  # of a position: a program holds all of them, in a tile of a power of two
LAYER_CHANNELS = CHANNELS[:-1]  # of a whole attention sub-layer: wider ones are faster by the library
MOST_HEADS = 64  # whose bias one kernel projects
SIDES = (16, 32)  # channels of the outer product's whose weights' gradients fit into registers
WIDEST_HEAD = 128  # of attention: a program holds all channels of a head
SWITCH = "enable_triton_"
UNTUNED = f"{SWITCH}adamw"  # has no tile sizes to choose from


def takes(switch, width):
    """Whether the kernels of a switch take this width: of a head for attention; any for the outer product's
    layout and for what the compiler gathers; else of a position."""
    if switch in (f"{SWITCH}outer_layout", f"{SWITCH}weight_gradients"):
        return True
    return width <= WIDEST_HEAD if switch == f"{SWITCH}attention" else width in CHANNELS


def takes_layer(channels, heads):
    """Whether kernels make all projections of an attention sub-layer, those before attention and behind."""
    return channels in LAYER_CHANNELS and heads <= MOST_HEADS


def takes_bias(channels, heads):
    """Whether LayerNorm and projection of a bias for so many heads have a kernel."""
    return channels in CHANNELS and heads <= MOST_HEADS


def takes_sides(channels, h):
    """Whether LayerNorm and projections to both sides of an outer product, of h channels, have kernels."""
    return channels in LAYER_CHANNELS and h in SIDES


def in_words(switch, widths):
    """"48 or 96 channels", of attention "heads of 48 or 96 channels" """
    heads = "heads of " if switch == f"{SWITCH}attention" else ""
    return f"{heads}{' or '.join(dict.fromkeys(map(str, widths)))} channels"


def idle_kernels(fusion, widths, bias, use_amp, on_gpu):
    """{switch: why it changes nothing here} of a model's Triton switches; widths: {switch: those that it
    would give its kernels}; bias: channels and heads of one that triton-attention would make even so."""
    names = [name for name in fusion.names() if name in widths and getattr(fusion, name)]
    if not (on_gpu and HAS_TRITON):
        needed = "Triton (pip install triton)" if on_gpu else "a GPU"
        return dict.fromkeys(names, f"Triton kernels need {needed}")
    if not use_amp:
        return dict.fromkeys(names, "Triton kernels need --use-amp: float32 is more exact without them")
    idle = [name for name in names if not any(takes(name, width) for width in widths[name])
            and not (name == f"{SWITCH}attention" and takes_bias(*bias))]
    return {name: f"{name.removeprefix('enable_').replace('_', '-')} has no kernel for "
            f"{in_words(name, widths[name])}" for name in idle}
