"""How q, k, v and the gate of attention lie in memory, and how kernels see them: as (B, R, H, L, D).

`qkvg` is [packed] (B, X, Y, 4 c), q, k, v and the gate behind each other, or [q, k, v, gate], each
(B, X, Y, c), with attention along `axis` 1 or 2. With axis 0 it is [q, k, v], (B, R, H, L, D), without gate.
"""
from evoformer_kernels.common import check_dtype
from evoformer_kernels.limits import WIDEST_HEAD


def as_rows(x, heads, axis):
    """(B, X, Y, c) -> a view (B, R, H, L, D); for axis 0 x itself."""
    if axis == 0:
        return x
    return x.unflatten(-1, (heads, -1)).permute((0, 2, 3, 1, 4) if axis == 1 else (0, 1, 3, 2, 4))


def views(qkvg, heads, axis):
    """[q, k, v] or [q, k, v, gate], each (B, R, H, L, D)."""
    if axis == 0:
        return qkvg
    qkvg = qkvg[0].chunk(4, dim=-1) if len(qkvg) == 1 else qkvg
    return [as_rows(x, heads, axis) for x in qkvg]


def with_gate(qkvg, heads, axis):
    """[q, k, v, gate], each (B, R, H, L, D); without a gate q in its place, which no kernel reads then."""
    q, k, v, *gate = views(qkvg, heads, axis)
    return [q, k, v, *(gate or [q])]


def strides(x):
    """Those of sample, row, head and position of x (B, R, H, L, D), as a kernel takes them: in one tuple."""
    return x.stride()[:4]


def check(q, k, v, gate):
    """ValueError for what the kernels would misread: they take k's and v's strides and dtype to be q's."""
    for name, x in (("k", k), ("v", v), ("gate", gate)):
        if x.shape != q.shape or x.dtype != q.dtype or x.device != q.device:
            raise ValueError(f"{name} is {tuple(x.shape)}, {x.dtype} on {x.device}, but q {tuple(q.shape)}, "
                             f"{q.dtype} on {q.device}")
        if x.stride(-1) != 1 or name != "gate" and strides(x) != strides(q):
            raise ValueError(f"{name} has strides {x.stride()} and q {q.stride()}: they must be equal, and 1 "
                             "along channels")
    check_dtype(q, "attention")
    if not 1 <= q.shape[-1] <= WIDEST_HEAD:
        raise ValueError(f"no Triton attention for heads of {q.shape[-1]} channels, only up to {WIDEST_HEAD}")
