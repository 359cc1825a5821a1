"""What the companions' Triton kernels take. No torch: flags are judged before it is imported."""
from fusion_lab.kernels.limits import HAS_TRITON

ULTRA_WIDTHS = (32, 64, 128)  # of a head in the ultra-fused block


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
