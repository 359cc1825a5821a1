"""The outer product mean in Triton's interpreter: output and gradients by the 3x rule, and mutants."""
import pytest
import torch
from rule import in_dtypes, mutant, violations

from fusion_lab.kernels import outer_product, tuner

CASES = {  # B, N, S, h, c, residual, packed
    "two samples, odd": (2, 7, 9, 8, 16, True, True),
    "many rows": (1, 77, 5, 16, 16, True, False),
    "usual width": (1, 5, 5, 32, 32, True, False),
    "narrow": (2, 3, 7, 4, 64, False, True),
    "one position, one row": (1, 1, 1, 16, 128, True, True),
}
MUTANTS = {
    "rows after the first tile dropped": ("for n0 in range(0, N, BN):", "for n0 in range(0, BN, BN):"),
    "last channels dropped": ("for c0 in range(0, H, CC):", "for c0 in range(0, H - CC, CC):"),
    "positions exchanged": ("i, j = i0 + ij // TJ, j0 + ij % TJ", "j, i = i0 + ij // TJ, j0 + ij % TJ"),
    "channels of W exchanged": ("(tl.permute(outer, (0, 2, 1, 3)), (TI * TJ, CC * H))",
                                "(tl.permute(outer, (0, 2, 3, 1)), (TI * TJ, CC * H))"),
    "norm of the first sample": ("tl.load(norm + b)", "tl.load(norm)"),
    "rows read beyond the last": ("lt = tl.load(at, mask=n[None, :] < N, other=0.0)",
                                  "lt = tl.load(at, mask=n[None, :] < N, other=1.0)"),
    "no residual": ("acc += tl.load(residual + at", "acc += 0 * tl.load(residual + at"),
    "bias not divided": ("tl.load(bias + c).to(tl.float32)[None, :] * scale",
                         "tl.load(bias + c).to(tl.float32)[None, :]"),
    "a step of the other side left out": ("tl.minimum((share + 1) * steps * TJ, S), TJ)",
                                          "tl.minimum((share + 1) * steps * TJ, S) - 1, TJ)"),
    "right's gradient made as left's": ("dright, (channels, line, 1, h)", "dright, (line, channels, h, 1)"),
    "a share of the weight's gradient": ("add_up(parts, dweight)", "dweight.copy_(parts[0])"),
}


def problem(dtype, samples, rows, size, h, channels, residual, packed, module=outer_product):
    """(ours, plain, tensors) of a case"""
    torch.manual_seed(0)
    both, norm = torch.randn(samples, rows, size, 2 * h), rows * torch.rand(samples) + 0.5
    tensors = [*([both] if packed else both.chunk(2, -1)), torch.randn(channels, h * h) / h,
               torch.randn(channels), torch.randn(samples, size, size, channels)]

    def unpacked(function):
        def run(*given):
            sides, rest = (given[0].chunk(2, -1), given[1:]) if packed else (given[:2], given[2:])
            return function(*sides, *rest[:2], norm.to(given[0].dtype), *rest[2:])
        return run
    tensors = [t.to(dtype).contiguous() for t in tensors[:None if residual else -1]]
    return unpacked(module.outer_product), unpacked(outer_product.reference), tensors


@pytest.mark.parametrize("case, dtype", in_dtypes(CASES))
def test_forward_and_gradients(case, dtype):
    assert not violations(*problem(dtype, *CASES[case]))


@pytest.mark.slow
@pytest.mark.parametrize("broken", MUTANTS)
def test_mutants_are_caught(broken, tmp_path):
    module = mutant(outer_product, *MUTANTS[broken], tmp_path)
    case = "many rows" if "rows" in broken else "two samples, odd"
    assert violations(*problem(torch.float32, *CASES[case], module))


def test_all_rows_in_one_tile(monkeypatch):
    """As some candidates of the tuner have it: rows are no loop then."""
    monkeypatch.setattr(tuner, "launch", lambda kernel, shape, candidates, run: run(dict(candidates[0],
                                                                                         ONE=True)))
    for dtype in (torch.float32, torch.bfloat16):
        assert not violations(*problem(dtype, *CASES["two samples, odd"]))


def test_a_width_of_64():
    ours, plain, tensors = problem(torch.float32, 1, 2, 1, 64, 16, False, False)
    assert (ours(*tensors) - plain(*tensors)).abs().max() < 1e-5 * plain(*tensors).abs().max()


def test_a_sum_beyond_the_range_of_float16_whose_mean_is_within():
    ours, plain, tensors = problem(torch.float16, 1, 32, 3, 16, 16, False, True)
    tensors[0].fill_(60.0)
    tensors[1].fill_(1 / 256)
    assert 32 * 60 ** 2 > torch.finfo(torch.float16).max and ours(*tensors).isfinite().all()


def test_compiles_in_one_piece():
    ours, plain, tensors = problem(torch.float32, *CASES["two samples, odd"])
    assert not violations(torch.compile(ours, fullgraph=True, backend="aot_eager"), plain, tensors)
