"""What this project's Triton kernels take: fits() says which parts of the Evoformer run in them.

What runs where with --enable-ultra in 16 bits on a GPU, by the channels of what a layer reads, c_m or c_z.
Heads have up to 128 channels, an outer product's sides 16 or 32. "library" is PyTorch's operations.

    layer                      16, 32, 64 or 128           256                          any other number
    attention, of all kinds    all of it in kernels        kernels between the          as with 256
                                                           library's projections
    row attention's bias, c_z  LayerNorm and projection    the same                     library
    transitions                all of it in kernels        gradient of the hidden       library
                                                           layer, the rest library
    triangle multiplication    all but the large product   the same                     library
    outer product's sides      LayerNorm and projections   library                      library
    outer product, by c_z      sum over rows; projection   sum over rows; the rest      as with 256
                                                           library

Of few rows and many residues the outer product multiplies by its weight first, in library products alone
(FusionConfig.weight_first). Without Triton, in float32 and on a CPU all of it is the library's.

A twin in tiny_openfold/proteins/fast_evoformer.py asks fits() for its parts. The kernels themselves refuse
what takes() does not say (common.check_part). No torch here: flags are judged before it is imported.
"""
import importlib.util

HAS_TRITON = importlib.util.find_spec("triton") is not None
CHANNELS = (16, 32, 64, 128, 256)  # of a position: a program holds all of them, in a tile of a power of two
LAYER_CHANNELS = CHANNELS[:-1]  # of projections: wider ones are faster by the library
MOST_HEADS = 64  # whose bias one kernel projects
SIDES = (16, 32)  # channels of the outer product's whose weights' gradients fit into registers
WIDEST_HEAD = 128  # of attention: a program holds all channels of a head
CHANNELS_OF = {  # a part of the Evoformer: channels of a position for which it has kernels
    "attention sub-layer": LAYER_CHANNELS,  # for other widths "attention", between the library's projections
    "projection": LAYER_CHANNELS,  # LayerNorm and projections before, or the projection behind a sub-layer
    "head bias": CHANNELS,  # LayerNorm and the projection to heads, of rows' attention
    "sides": LAYER_CHANNELS,  # LayerNorm and projections of the outer product
    "transition": LAYER_CHANNELS,  # all of it; for other widths "two layers"
    "two layers": CHANNELS,  # the gradient of a transition's hidden layer
    "triangle multiplication": CHANNELS}


def runs(x):
    """Whether x lies on a GPU, and its products are in 16 bits, in which alone kernels run there. All that
    the outer product asks for."""
    from evoformer_kernels.precision import HALF, product_dtype
    return x.is_cuda and HAS_TRITON and product_dtype(x) in HALF


def takes(part, channels, heads=1, side=SIDES[0]):
    """Whether a part has a kernel for so many channels; side: channels of a side of the outer product."""
    if part == "attention":
        return channels // heads <= WIDEST_HEAD
    return channels in CHANNELS_OF[part] and heads <= MOST_HEADS and side in SIDES


def fits(part, x, heads=1, side=SIDES[0]):
    """Whether kernels run this part of the Evoformer for x (..., channels)."""
    return runs(x) and takes(part, x.shape[-1], heads, side)
