"""What arithmetic a tensor's products get, the dtype of sums, and the architecture of an AMD GPU."""
from functools import cache

import torch

HALF = (torch.float16, torch.bfloat16)  # in which alone kernels run on a GPU


def tf32_products():
    """Whether float32 matrix products may run in TF32. A torch that has the newer setting refuses to tell the
    older one once anybody used the newer one."""
    matmul = torch.backends.cuda.matmul
    return matmul.fp32_precision == "tf32" if hasattr(matmul, "fp32_precision") else matmul.allow_tf32


# What torch.compiler.assume_constant_result() does, which would import the compiler: it cannot read the newer
# setting, and compiles again where that has changed.
tf32_products._dynamo_marked_constant = True


def set_tf32_products(on):
    matmul = torch.backends.cuda.matmul
    if hasattr(matmul, "fp32_precision"):
        matmul.fp32_precision = "tf32" if on else "ieee"
    else:
        matmul.allow_tf32 = on


def at_least_float32(dtype):
    """The dtype of softmax, sums, counts and losses."""
    return torch.promote_types(dtype, torch.float32)


def strict_float32(dtype):
    """Whether matrix products of tensors of this dtype are float32 throughout, without TF32."""
    return dtype == torch.float32 and not tf32_products()


def product_dtype(x):
    """The dtype that autocast gives to products of x, where it is on; else that of x, as of float64."""
    kind = x.device.type
    on = kind != "meta" and x.dtype != torch.float64 and torch.is_autocast_enabled(kind)
    return torch.get_autocast_dtype(kind) if on else x.dtype


def architecture(on_gpu):
    """"gfx942", say, for an AMD GPU; "" for any other device."""
    return amd_architecture() if on_gpu and torch.version.hip else ""


@cache
def amd_architecture():
    return torch.cuda.get_device_properties(torch.cuda.current_device()).gcnArchName.partition(":")[0]
