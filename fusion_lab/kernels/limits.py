"""What this project's Triton kernels take. No torch: flags are judged before it is imported."""
import importlib.util

HAS_TRITON = importlib.util.find_spec("triton") is not None
CHANNELS = (16, 32, 64, 128, 256)  # of a position, for kernels whose programs hold all of them
LAYER_CHANNELS = CHANNELS[:-1]  # of a whole attention sub-layer: wider products are the library's (LOG.md)
MOST_HEADS = 64  # whose bias one kernel projects
OUTER_WIDTHS = (4, 8, 16, 32, 64)  # of the outer product's sides
SIDES = (16, 32)  # of them those with whole projections, whose weights' gradients fit into registers
WIDEST_HEAD = 128
ULTRA_WIDTHS = (32, 64, 128)  # of a head in the ultra-fused block
SWITCH = "enable_triton_"
UNTUNED = f"{SWITCH}adamw"  # has no tile sizes to choose from


def takes(switch, width):
    """Whether the kernels of a switch take this width: of a head for attention; (of a position, heads) for
    projections of a whole sub-layer; (of a side, of the result) for the outer product; any for its layout and
    for what the compiler gathers; else of a position."""
    if switch == f"{SWITCH}outer_product":
        return width[0] in OUTER_WIDTHS and width[1] in CHANNELS
    if switch in (f"{SWITCH}outer_layout", f"{SWITCH}weight_gradients", f"{SWITCH}sums"):
        return True
    if switch == f"{SWITCH}projection":
        return width[0] in LAYER_CHANNELS and width[1] <= MOST_HEADS
    return width <= WIDEST_HEAD if switch == f"{SWITCH}attention" else width in CHANNELS


def takes_bias(channels, heads):
    """Whether LayerNorm and projection of a bias for so many heads have a kernel."""
    return channels in CHANNELS and heads <= MOST_HEADS


def takes_sides(channels, h):
    """Whether LayerNorm and projections to both sides of an outer product, of h channels, have kernels."""
    return channels in LAYER_CHANNELS and h in SIDES


WIDTHS = {"attention": "heads of {} channels", "projection": "attention over {} channels",
          "outer_product": "sides of {} channels"}  # how a sentence names them; "{} channels" for others


def in_words(switch, widths):
    """"48 or 96 channels" """
    links = {f"{SWITCH}projection": "{} ({} heads)", f"{SWITCH}outer_product": "{} to {}"}
    each = dict.fromkeys(links[switch].format(*width) if switch in links else str(width) for width in widths)
    return WIDTHS.get(switch.removeprefix(SWITCH), "{} channels").format(" or ".join(each))


def idle_kernels(fusion, widths, bias, use_amp, on_gpu):
    """Sentences on why Triton switches of a model change nothing here; widths: {switch: those that it would
    give its kernels}; bias: channels and heads of one that triton-projection would make beside them."""
    names = [name for name in fusion.names() if name in widths and getattr(fusion, name)]
    if not names:
        return []
    if not (on_gpu and HAS_TRITON):
        return [f"Triton kernels need {'Triton (pip install triton)' if on_gpu else 'a GPU'}"]
    if not use_amp:
        return ["Triton kernels need --use-amp: float32 is more exact without them"]
    idle = [name for name in names if not any(takes(name, width) for width in widths[name])
            and not (name == f"{SWITCH}projection" and takes_bias(*bias))]
    return [f"{name.removeprefix('enable_').replace('_', '-')} has no kernel for "
            f"{in_words(name, widths[name])}" for name in idle]


def idle_ultra(width, use_amp, on_gpu):
    """Sentences on why a LLaMA block with heads of this width is not one kernel here."""
    if not (on_gpu and HAS_TRITON and use_amp):
        return ["the ultra-fused block needs a GPU, Triton and --use-amp"]
    if width not in ULTRA_WIDTHS:
        return [f"ultra-fused blocks are for heads of {', '.join(map(str, ULTRA_WIDTHS))} channels"]
    return []


def idle_pointwise(packed, on_gpu):
    """Sentences on why kernels between a LLaMA block's projections do not run here; packed: any of these."""
    if on_gpu and HAS_TRITON and packed:
        return []
    return ["the pointwise kernel needs a GPU, Triton and packed projections (--enable-qkv-fusion, "
            "--enable-swiglu-fusion)"]
