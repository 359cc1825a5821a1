"""What sort of work a GPU kernel or a CPU operation does, judged by its name. Standard library only.

Every profile of this project uses these words, whoever recorded it: torch.profiler, rocprofv3 or another.
"""
import re

KINDS = ("matrix product", "attention", "softmax", "normalisation", "elementwise", "reduction", "optimizer",
         "communication", "copy", "fill", "compiled code", "other")
OPERATION_KINDS = (*KINDS, "view", "autograd's own")  # these two do no work of their own


def rules(*pairs):
    return tuple((kind, re.compile(pattern, re.IGNORECASE)) for kind, pattern in pairs)


# In both tables the first match wins. Names come from PyTorch, Inductor, Triton, rocBLAS and hipBLASLt
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
VIEWS = ("view", "view_as", "reshape", "transpose", "t", "mT", "numpy_T", "permute", "as_strided",
         "_reshape_alias", "expand", "unsqueeze", "squeeze", "slice", "select", "chunk", "split",
         "split_with_sizes", "narrow", "unflatten", "flatten", "detach", "alias", "_unsafe_view",
         "to", "linear", "resolve_conj", "resolve_neg", "lift_fresh")  # these call others, or hand input on
OF_OPERATIONS = rules(
    ("view", rf"^(aten::)?({'|'.join(VIEWS)})$"),
    ("communication", r"c10d|gloo:|nccl:"),
    # A node of the graph: what it calls are operations of their own, the rest of its time is autograd's.
    ("autograd's own", r"autograd::|HookFunction$|^(?!.*compiled)(?!aten::).*Backward\d*$"),
    ("attention", r"attention|flash"),
    ("softmax", r"softmax"),
    ("normalisation", NORMS),
    ("matrix product", r"aten::(_?addmm|b?mm|baddbmm|(add)?mv|matmul|_scaled_mm)|gemm|mkl|convolution"),
    ("copy", r"copy|memcpy|aten::(cat|stack|clone|contiguous)"),
    ("reduction", r"foreach_norm"),
    ("optimizer", r"adam|foreach"),
    ("fill", r"memset|(?<!masked_)fill|zero_|aten::(empty|zeros|ones|full|new_)"),
    ("reduction", r"reduce|sum|norm|nll_loss|aten::(mean|any|all|topk|a?(max|min)\b|embedding_\w*backward)"),
    ("elementwise", r"elementwise|masked_fill|threshold|clamp|dropout|embedding|gather|scatter|arange"
                    r"|bernoulli|aten::(mul|add|sub|rsub|div|neg|reciprocal|sigmoid|relu|where|pow|r?sqrt|exp"
                    r"|log|abs|index|bucketize|[gl][et]\b|eq\b|ne\b)"),
    ("compiled code", r"compiledfunction|torch-compiled|torchdynamo|triton_"),
)


def kind_of_kernel(name):
    """One of KINDS, for a GPU kernel, or a copy or fill on a GPU, under the name that a profiler prints."""
    return next((kind for kind, pattern in OF_KERNELS if pattern.search(name)), "other")


def kind_of_operation(name):
    """One of OPERATION_KINDS, for a CPU operation of a trace: aten::..., a node of autograd, a view."""
    return next((kind for kind, pattern in OF_OPERATIONS if pattern.search(name)), "other")
