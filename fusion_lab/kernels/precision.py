"""What arithmetic a tensor's products get, and the dtype of sums."""
import torch

HALF = (torch.float16, torch.bfloat16)  # in which alone kernels run on a GPU

def at_least_float32(dtype):
    """The dtype of softmax, sums, counts and losses."""
    return torch.promote_types(dtype, torch.float32)


def strict_float32(dtype):
    """Whether matrix products of tensors of this dtype are float32 throughout, without TF32."""
    return dtype == torch.float32 and not torch.backends.cuda.matmul.allow_tf32


def product_dtype(x):
    """The dtype that autocast gives to products of x, where it is on; else that of x."""
    kind = x.device.type
    on = kind != "meta" and torch.is_autocast_enabled(kind)
    return torch.get_autocast_dtype(kind) if on else x.dtype


def amp_dtype(training, device):
    """The dtype of --use-amp, None without it. float16 needs a gradient scaler, and CPUs are slow in it."""
    if not training.use_amp:
        return None
    return getattr(torch, training.amp_dtype or ("float16" if device.type == "cuda" else "bfloat16"))


def runs_in_tf32(training, device):
    """Whether --use-tf32 has effect: NVIDIA from Ampere on, AMD where torch says so (CDNA 3 and 4)."""
    return bool(training.use_tf32 and device.type == "cuda" and torch.cuda.is_tf32_supported())
