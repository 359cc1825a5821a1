"""The outer product's layouts in Triton's interpreter: output and gradients by the 3x rule, and mutants."""
import pytest
import torch

from fusion_lab.kernels import tuner
from fusion_lab.kernels.outer_product_mean import layout as outer_layout
from fusion_lab.kernels.precision import product_dtype
from tests.kernels.rule import counted_flops, in_dtypes, mutant, violations

pytestmark = [pytest.mark.interpreted, pytest.mark.full]

CASES = {  # B, N, S, h, c, packed[, scale[, whether there is a residual]]
    "two samples, odd": (2, 7, 9, 8, 12, True, 0.3),
    "many rows": (1, 77, 5, 16, 16, False),
    "usual width": (2, 16, 5, 32, 32, True),
    "odd widths": (1, 3, 13, 6, 20, False),
    "one position, one row": (1, 1, 1, 16, 128, True),
    "more channels than a tile sums": (1, 2, 3, 8, 80, True),
    "whole tiles": (2, 16, 8, 32, 16, True),
    "parts of lines": (1, 5, 2, 128, 8, False),
    "whole tiles, few rows": (1, 5, 16, 32, 24, True, 0.3),
    "residual": (2, 7, 9, 8, 16, True, 0.3, True),
    "residual, not by the kernel": (1, 3, 5, 8, 20, False, 0.3, True),
}
MUTANTS = {
    "strides exchanged": ("(m1 * (N1 * M2 * N2) + m2 * N2)[:", "(m2 * (N1 * M2 * N2) + m1 * N2)[:"),
    "columns' strides exchanged": ("(n1 * (M2 * N2) + n2)", "(n2 * (M2 * N2) + n1)"),
    "as the library writes it": (
        "(m1 * (N1 * M2 * N2) + m2 * N2)[:, None] + (n1 * (M2 * N2) + n2)[None, :]",
        "(m * (N1 * N2))[:, None] + n[None, :]"),
    "last tile of rows dropped": ("kernel[row_tiles *", "kernel[max(1, M1 * M2 // bm) *"),
    "last tile of columns dropped": ("triton.cdiv(N1 * N2, bn * column_tiles)", "max(1, N1 * N2 // bn)"),
    "last tile of a sum dropped": ("BK if ONE_STEP else K, BK)", "BK if ONE_STEP else K - BK, BK)"),
    "last number of a sum dropped": (" < K - k0", " < K - k0 - 1"),
    "always the first tile of a sum": ("            b_at += BK * b_stride_k\n", ""),
    "one tile of every sum": ("ONE_STEP=K <= bk", "ONE_STEP=True"),
    "the first sample alone": ("a + sample * a_stride_sample", "a"),
    "all samples into the first": ("out += sample * M1 * M2 * N1 * N2", "out += 0"),
    "last columns not stored": ("LINES > 0 else N1)", "LINES > 0 else N1 - 1)"),
    "whole tiles: all of the first lines": ("a += m1 * a_stride_m1", "a += 0 * m1"),
    "whole tiles: all of one part of a line": ("+ m2 * a_stride_m2\n", "\n"),
    "whole tiles: all of the first columns": ("b += n1 * b_stride_n1", "b += 0"),
    "whole tiles: all of one part of the columns": ("b_stride_n1 + n2 * b_stride_n2\n",
                                                    "b_stride_n1\n"),
    "whole tiles: one line": ("m // WM", "0 * m"),
    "whole tiles: stored as the first": ("out += m1 * (N1 * M2 * N2)", "out += 0 * m1"),
    "several tiles: always the first columns": ("            b_at += BN // N2 * b_stride_n1\n", ""),
    "several tiles: each over the first": ("            out_at += BN // N2 * (M2 * N2)\n", ""),
    "several tiles: last number of a sum dropped": ("mask=k[None, :] < K, other",
                                                    "mask=k[None, :] < K - 1, other"),
    "several tiles: the last one dropped": ("range(MANY)", "range(MANY - 1)"),
    "left's gradient transposed": ("right.flatten(2) @ douter.mT", "right.flatten(2) @ douter"),
    "right's gradient of right": ("left.flatten(2) @ douter", "right.flatten(2) @ douter"),
    "bias without a gradient": ("sums.OP(partial", "sums.OP(0 * partial"),
    "bias: gradient not scaled": ("BM, scale, K - k0", "BM, None, K - k0"),
    "bias: rows beyond the last one": ("there = row_inside[:, None] &",
                                       "there = (row_inside == row_inside)[:, None] &"),
    "bias: gradient of the last tile alone": ("sample * tl.cdiv(M1 * M2, BM) + tile // tiles_across", "0"),
    "bias: gradient of the last sample alone": ("sample * tl.cdiv(M1 * M2, BM) +", ""),
    "bias: last channel forgotten": ("scale, K - k0", "scale, K - k0 - 1"),
    "bias: all channels into the first": ("partial_sums + k0, k", "partial_sums, k"),
    "several tiles: bias without a gradient": ("store_sums(partial_sums, k",
                                               "store_sums(partial_sums, 0 * k"),
    "several tiles: gradient of the bias not scaled": ("BM, scale, K)", "BM, None, K)"),
    "several tiles: last channel of the bias forgotten": ("BM, scale, K)", "BM, scale, K - 1)"),
    "bias not scaled": ("+ bias * scale", "+ bias"),
    "residual: bias not scaled": ("residual, None, scale)", "residual, None)"),
    "residual forgotten": ("bias, residual, None,", "bias, 0 * residual, None,"),
    "residual without a gradient": ("gradient if ctx.residual", "0 * gradient if ctx.residual"),
    "residual forgotten by plain code": ("(residual + update)", "update"),
    "product not scaled": ("(acc * scale)", "acc"),
    "gradient not scaled": ("weight, ctx.scale, count", "weight, 1.0, count"),
}
WHERE = {"last tile of a sum dropped": "many rows", "always the first tile of a sum": "many rows",
         "last number of a sum dropped": "many rows", "last tile of columns dropped": "odd widths",
         "one tile of every sum": "many rows",
         "bias: all channels into the first": "more channels than a tile sums",
         "whole tiles: all of one part of a line": "parts of lines",
         "whole tiles: all of one part of the columns": "parts of lines",
         **dict.fromkeys(("whole tiles: all of the first lines", "whole tiles: all of the first columns",
                          "whole tiles: one line", "whole tiles: stored as the first"), "whole tiles"),
         **dict.fromkeys(("residual: bias not scaled", "residual forgotten", "residual without a gradient"),
                         "residual"), "residual forgotten by plain code": "residual, not by the kernel"}


def problem(dtype, samples, rows, size, h, channels, packed, scale=1.0, adds=False, module=outer_layout):
    """(ours, plain, tensors) of a case"""
    torch.manual_seed(0)
    both = torch.randn(samples, rows, size, 2 * h)
    tensors = [*([both] if packed else both.chunk(2, -1)), torch.randn(channels, h * h) / h,
               torch.randn(channels), *[torch.randn(samples, size, size, channels)] * adds]

    def unpacked(function):
        def call(*given):
            sides, rest = (given[0].chunk(2, -1), given[1:]) if packed else (given[:2], given[2:])
            return function(*sides, *rest[:2], scale, *rest[2:])
        return call
    return (unpacked(module.outer_layout), unpacked(outer_layout.reference),
            [t.to(dtype).contiguous() for t in tensors])


@pytest.mark.sample
@pytest.mark.parametrize("case, dtype", [
    pytest.param(case, dtype, marks=[pytest.mark.slow] * ((case, dtype) == ("parts of lines", torch.float32)))
    for case, dtype in in_dtypes(CASES)])
def test_forward_and_gradients(case, dtype):
    assert not violations(*problem(dtype, *CASES[case]))


def several_tiles(kernel, shape, candidates, run):
    """tuner.launch() with the first candidate of several tiles of columns."""
    run(next(each for each in candidates if each["MANY"] > 1))


@pytest.mark.slow
@pytest.mark.parametrize("broken", MUTANTS)
def test_mutants_are_caught(broken, tmp_path, monkeypatch):
    module = mutant(outer_layout, *MUTANTS[broken], tmp_path)
    several = broken.startswith("several tiles")
    case = "whole tiles, few rows" if several else WHERE.get(broken, "two samples, odd")
    whole = several or broken.startswith("whole tiles")
    if several:
        monkeypatch.setattr(tuner, "launch", several_tiles)
    assert violations(*problem(torch.bfloat16 if whole else torch.float32, *CASES[case], module=module))


@pytest.mark.parametrize("case", ["many rows", "whole tiles", "whole tiles, few rows"])
@pytest.mark.parametrize("number", range(1, len(outer_layout.TILES[2])))
def test_every_candidate_of_the_tuner(number, case, monkeypatch):
    monkeypatch.setattr(tuner, "launch", lambda kernel, shape, candidates, run: run(candidates[number]))
    assert not violations(*problem(torch.bfloat16, *CASES[case]))


def test_autocast_rounds_products_and_not_the_residual():
    """Whose gradient is that of the result."""
    ours, plain, tensors = problem(torch.float32, *CASES["residual"])
    exact = plain(*(t.double() for t in tensors))
    with torch.autocast("cpu", torch.bfloat16):
        results = [function(*(t.requires_grad_() for t in tensors)) for function in (ours, plain)]
    errors = [(result - exact).abs().max() for result in results]
    assert results[0].dtype == torch.float32 and 1e-4 < errors[0] <= 3 * errors[1]
    gradient = torch.randn_like(results[0])
    results[0].backward(gradient)
    assert torch.equal(tensors[-1].grad, gradient) and all(t.grad.dtype == torch.float32 for t in tensors)


def test_a_bias_may_have_any_strides():
    ours, _, (both, weight, bias, residual) = problem(torch.float32, *CASES["residual"])
    strided = torch.stack([bias, -bias], -1)[:, 0]
    assert torch.equal(ours(both, weight, strided, residual), ours(both, weight, bias, residual))


def test_each_tensor_lies_as_its_reader_wants_it():
    left, right = torch.randint(-3, 4, (2, 2, 5, 6, 4)).float()  # whole numbers, which add exactly
    weight, gradient = torch.randint(-3, 4, (7, 16)).float(), torch.randint(-3, 4, (2, 6, 6, 7)).float()
    outer = torch.einsum("bnic,bnjd->bijcd", left, right)
    found = torch.ops.fusion_lab.outer_layout(left, right)
    assert found.is_contiguous() and torch.equal(found, outer.flatten(-2))
    assert torch.equal(torch.ops.fusion_lab.outer_layout(left, right, 0.5), found / 2)
    found, parts = torch.ops.fusion_lab.outer_layout_backward(gradient, weight, 0.5, 2)
    expected = (gradient @ weight).unflatten(-1, (4, 4)).permute(0, 1, 3, 2, 4) / 2  # (B, i, c, j, d)
    assert found.is_contiguous() and torch.equal(found.view(2, 6, 4, 6, 4), expected)
    assert torch.equal(parts, gradient.sum((1, 2)) / 2)  # one of each sample


@pytest.mark.parametrize("name, given, numbers", [
    ("outer_layout", [(2, 3, 5, 4), (2, 3, 5, 4)], ()),
    ("outer_layout_backward", [(2, 5, 5, 7), (7, 16)], (1.0, 3))])
def test_fake_tensors_have_the_same_sizes(name, given, numbers):
    op, tensors = getattr(torch.ops.fusion_lab, name), [torch.randn(size) for size in given]
    results = [op(*(t.to(device) for t in tensors), *numbers) for device in ("cpu", "meta")]
    for found, fake in zip(*(r if isinstance(r, tuple) else (r,) for r in results), strict=True):
        assert found.shape == fake.shape and found.stride() == fake.stride() and found.dtype == fake.dtype


def test_flops_are_those_of_plain_code():
    ours, plain, tensors = problem(torch.float32, *CASES["two samples, odd"])
    assert counted_flops(ours, tensors) == counted_flops(plain, tensors) > 0


def test_autocast_s_dtype_is_that_of_products():
    ours, _, tensors = problem(torch.float32, *CASES["two samples, odd"])
    with torch.autocast("cpu", torch.bfloat16):
        assert ours(*tensors).dtype == product_dtype(tensors[0]) == torch.bfloat16


def test_a_dtype_without_a_kernel_is_refused():
    ours, _, tensors = problem(torch.float64, *CASES["two samples, odd"])
    with pytest.raises(ValueError, match="no Triton outer product in float64"):
        ours(*tensors)


def test_compiles_in_one_piece():
    ours, plain, tensors = problem(torch.float32, *CASES["two samples, odd"])
    assert not violations(torch.compile(ours, fullgraph=True, backend="aot_eager"), plain, tensors)
