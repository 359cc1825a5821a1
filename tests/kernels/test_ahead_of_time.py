"""Triton kernels compiled for GPUs that are not here: registers, shared memory, instructions."""
import warnings

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed (pip install triton)")
import triton
import triton.language as tl

with warnings.catch_warnings():  # Triton 3.9 announces 3.10's default for contracting multiplications
    warnings.simplefilter("ignore")
    from tests.kernels.triton_targets import SHARED, compiled_for, overwritten

from fusion_lab.kernels import ahead_of_time, projections, tuner
from tests.kernels.launches import LAUNCHES, has_products, spills_too_often


def test_kernels_on_a_cpu_say_what_they_need():
    x, vector = torch.zeros(1, 3, 5, 16), torch.zeros(16)
    with pytest.raises(RuntimeError, match="norm_project is .* needs a GPU, or TRITON_INTERPRET=1"):
        projections.head_bias(x, vector, vector, torch.zeros(2, 16), 1e-5)


def described(kernel):
    return dict(ahead_of_time.resources(kernel), overwritten=overwritten(kernel))


def check_resources(target, launches):
    """Every configuration that is shipped for the widths of these launches compiles without spills and fits
    shared memory, and no loop overwrites what is still read. Returns the keys of tiles.json that this was
    said of."""
    faults, met = [], set()
    for name in launches:
        function, *arguments = LAUNCHES[name]
        with compiled_for(target, met, described) as found:
            function(*arguments)
        assert found
        faults += [f"{name}: {kernel}: {used}" for kernel, used in found.items()
                   if spills_too_often(target, kernel, used) or used["shared"] > SHARED[target]
                   or used["overwritten"]
                   or (used["mma"] > 0) != has_products(kernel)]
    assert not faults, "\n".join(faults)
    return met


@pytest.mark.full
@pytest.mark.sample
def test_compiles_for_a_gpu_of_amd():
    check_resources("gfx942", ["attention, columns, N 16"])


@triton.jit
def product_kernel(a, b, out, sums, K, SUM: tl.constexpr, BM: tl.constexpr):
    """out (BM, BM) = a b, and parts of sums (16, K) of a's columns, as no kernel must make them."""
    acc, i, r = tl.zeros((BM, BM), tl.float32), tl.arange(0, BM), tl.arange(0, 16)
    for k0 in range(0, K, BM):
        left, right = tl.load(a + i[:, None] * K + k0 + i), tl.load(b + (k0 + i[:, None]) * BM + i)
        if SUM:
            tl.store(sums + k0 + r[:, None] * K + i, tl.dot(tl.full((16, BM), 1, left.dtype), left))
        acc = tl.dot(left, right, acc)
    tl.store(out + i[:, None] * BM + i, acc)


@pytest.mark.full
@pytest.mark.parametrize("stages", [pytest.param(2, marks=pytest.mark.sample), 3])
def test_what_a_loop_overwrites_too_early_is_seen(stages):
    a, out, sums = (torch.empty(64, 256, dtype=dtype) for dtype in (torch.bfloat16, *[torch.float32] * 2))
    with ahead_of_time.compiling("sm_90") as launches:
        for wrong in (False, True):
            product_kernel[1,](a, a, out, sums, 256, SUM=wrong, BM=64, num_stages=stages)
    assert [overwritten(each.compiled) for each in launches] == [0, 1]


@pytest.mark.full
@pytest.mark.parametrize("target", SHARED)
def test_compiles_for(target):
    assert check_resources(target, LAUNCHES) == set(tuner.read(tuner.SHIPPED).get(target, {}))
