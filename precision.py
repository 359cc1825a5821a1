"""What arithmetic a tensor's products get, and the dtype of sums."""
import torch


def at_least_float32(dtype):
    """The dtype of softmax, sums, counts and losses."""
    return torch.promote_types(dtype, torch.float32)


def strict_float32(x):
    """Whether products of x are float32 throughout, so that arithmetic costs more than memory traffic."""
    return x.dtype == torch.float32 and not torch.backends.cuda.matmul.allow_tf32


def has_tensor_float32(device):
    """Whether TF32 means something on this GPU: on NVIDIA from Ampere on. AMD's numbers begin at 9."""
    return torch.cuda.get_device_properties(device).major >= 8
