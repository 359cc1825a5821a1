"""What sort of work a GPU kernel does, judged by its name. Standard library only.

All profiles of this project use these words, whether torch.profiler, rocprofv3 or another tool recorded them.
"""
import re

KINDS = ("matrix product", "attention", "softmax", "normalisation", "elementwise", "reduction", "optimizer",
         "communication", "copy", "fill", "compiled code", "other")


def rules(*pairs):
    return tuple((kind, re.compile(pattern, re.IGNORECASE)) for kind, pattern in pairs)


# The first match wins. Names come from PyTorch, Inductor, Triton, rocBLAS and hipBLASLt
# (Cijk_), Composable Kernel, MIOpen, cuBLAS (nvjet, xmma), CUTLASS, rocPRIM and CUB.
NORMS = r"(layer|batch|group|rms)_?norm"
OF_KERNELS = rules(
    ("communication", r"nccl|rccl"),
    # Inductor's own prefix says more than the operators it lists after it: a kernel with the name
    # triton_poi_fused__scaled_dot_product_attention_clone is a pointwise one.
    ("elementwise", r"^triton_(poi|for)_"),
    ("softmax", r"^triton_(per|red|mix)_.*softmax"),
    ("normalisation", rf"^triton_(per|red|mix)_.*{NORMS}"),
    ("reduction", r"^triton_(per|red|mix)_"),
    ("reduction", r"^(sums?|attention_bias_gradient)_kernel"),
    ("attention", r"attn_|attention|fmha|flash|sdpa|bwd_kernel_(dk|dq|fuse)|bwd_preprocess"),
    ("matrix product", r"Cijk_|gem[mv]|^triton_(tem|mm|bmm)|splitk|nvjet|cutlass|xmma|ampere_|sm\d\d+_|matmul"
                       r"|miopen\w*conv|winograd|weight_gradients"),
    ("softmax", r"softmax"),
    ("normalisation", rf"{NORMS}|RowwiseMoments|GammaBeta|ComputeGradInput|ComputeInternalGradients"),
    ("fill", r"memset|fillBuffer|FillFunctor"),
    ("copy", r"copy|CatArray|memcpy|transpose"),
    ("reduction", r"LpNorm"),  # of a list of tensors, by multi_tensor_apply
    ("optimizer", r"adam|multi_tensor"),
    ("reduction", r"reduc|rocprim|hipcub|cub::|nll_loss|_dot_|argm(ax|in)|grad_weight|topk"),
    ("elementwise", r"elementwise|pointwise|Functor|OpTensor|index|gather|scatter|embedding|dropout"
                    r"|distribution|arange|where|threshold|clamp|swiglu|rotary"),
    ("compiled code", r"^triton_"),
)


def kind_of_kernel(name):
    """One of KINDS, for a GPU kernel, or a copy or fill on a GPU, under the name that a profiler prints."""
    return next((kind for kind, pattern in OF_KERNELS if pattern.search(name)), "other")
