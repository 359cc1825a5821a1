"""Kernels that move numbers or add up whole ones, in Triton's interpreter: exactly what PyTorch makes, NaN
included."""
import pytest
import torch

from evoformer_kernels import tuner
from evoformer_kernels.attention import bias_gradient as bias_gradients
from evoformer_kernels.attention import padded_bias as padded_biases
from evoformer_kernels.precision import HALF
from evoformer_kernels.reductions import sums
from tests.kernels import references
from tests.kernels.problems import made

pytestmark = [pytest.mark.interpreted, pytest.mark.full]

LAYOUTS = {  # of a bias (B, H, L, L)
    "as it is": lambda bias: bias,
    "transposed": lambda bias: bias.mT.contiguous().mT,
    "heads last": lambda bias: bias.permute(0, 2, 3, 1).contiguous().permute(0, 3, 1, 2),
    "shared by heads": lambda bias: bias[:, :1].expand_as(bias),
    "a part": lambda bias: torch.stack([bias, -bias], 4).repeat(1, 1, 2, 1, 1)[:, :, :bias.shape[2], :, 0]}


def padded_bias(dtype, B, H, L, LP, samples=None, kind=None):
    """A bias in every layout, with and without its transpose."""
    bias, key_mask = torch.randn(B, H, L, L).to(dtype), None
    if samples is not None:
        key_mask = (torch.rand(samples, L) > 0.4).to(kind)
    out = torch.float32 if dtype == torch.float16 else dtype

    def run(function):
        return [t for layout in LAYOUTS.values() for transpose in (False, True)
                for t in function(layout(bias), key_mask, LP, out, transpose) if t is not None]
    return run(padded_biases.launch), run(references.padded_bias)


def bias_gradient(dtype, n, B, H, LP, length):
    """Of n partial sums, NaN beyond length; with and without its transpose."""
    partial_sums = torch.randint(-2, 3, (n, B, H, LP, LP)).to(dtype)
    partial_sums[..., length:, :] = partial_sums[..., length:] = torch.nan
    return [[function(partial_sums, length, torch.bfloat16, transpose) for transpose in (False, True)]
            for function in (bias_gradients.launch, references.bias_gradient)]


def added_up(dtype, *sizes):
    """Partial sums of several problems, together and one by one."""
    problems = [torch.randint(-2, 3, size).float() for size in sizes]
    one_by_one = [each.sum(0).to(dtype) for each in problems]
    return ([sums.GATHERED_OP(problems, dtype), *(sums.OP(each, dtype) for each in problems)],
            [torch.cat([each.flatten() for each in one_by_one]), *one_by_one])


FAMILIES = {  # what makes (results, expected ones), {name: what it is given behind the dtype}
    "padded bias": (padded_bias, {  # B, H, L, LP, samples of the key mask, its dtype
        "a mask": (2, 3, 37, 64, 2, torch.bool), "one mask for all": (3, 2, 64, 64, 1, torch.float32),
        "no mask": (2, 1, 77, 128), "one residue": (1, 1, 1, 16, 1, torch.int64)}),
    "gradient of a bias": (bias_gradient, {  # n, B, H, LP, length
        "one": (1, 2, 3, 16, 13), "one of several tiles": (1, 1, 1, 128, 101),
        "two of whole tiles": (2, 1, 2, 128, 128), "few of long rows": (8, 1, 2, 128, 77),
        "rows of three tiles of 16": (5, 2, 1, 48, 35), "whole iterations": (64, 1, 2, 32, 32),
        "one more": (65, 2, 1, 32, 27), "many": (300, 1, 1, 16, 1)}),
    "sums": (added_up, {  # sizes of partial sums
        "one": ((77, 33),), "one number, one row, no row": ((1, 1), (1, 40), (0, 5), (300, 2)),
        "several tiles": ((600, 3, 40), (257, 64), (2, 31), (300, 1)),
        "many columns": ((7, 9001), (21, 8200)),
        "more than one launch takes": tuple((65 + n, 16 + n) for n in range(9))}),
}


def wrong(family, dtype, case):
    """Which results of a case are not what PyTorch makes, or lie otherwise."""
    torch.manual_seed(0)
    faults = []
    for number, (ours, plain) in enumerate(zip(*FAMILIES[family][0](dtype, *case), strict=True)):
        if not (ours.dtype == plain.dtype and ours.is_contiguous() and torch.equal(ours, plain)):
            faults.append(number)
    return faults


@pytest.mark.parametrize("dtype", (*HALF, torch.float32), ids=str)
@pytest.mark.parametrize("family, case", [
    pytest.param(family, case, marks=[pytest.mark.sample] * (case in ("a mask", "one more", "several tiles")))
    for family, (_, cases) in FAMILIES.items() for case in cases])
def test_the_numbers_of_plain_pytorch(family, case, dtype, monkeypatch):
    monkeypatch.setattr(sums, "MOST", 4)  # so that a few problems need several launches
    assert wrong(family, dtype, FAMILIES[family][1][case]) == []


def test_a_padded_bias_has_offsets_beyond_32_bits():
    """Of 4 GB that the bias's strides span nothing but its own numbers is ever touched."""
    length, apart = 130, 1 << 24
    far = torch.empty(length * apart, dtype=torch.bfloat16)
    far = far.as_strided((1, 1, length, length), (1, 1, apart, 1))
    far.copy_(torch.randn(far.shape))
    for ours, plain in zip(*(function(far, None, 256, torch.bfloat16, True) for function in (
            padded_biases.launch, references.padded_bias)), strict=True):
        assert torch.equal(ours[..., :length, :length], plain[..., :length, :length])


@pytest.mark.parametrize("dtype", (*HALF, torch.float32), ids=str)
def test_sums_of_a_gradient_are_rounded_once(dtype):
    """What 300 roundings would add up to is far beyond one."""
    partial_sums = torch.randn(300, 1, 1, 16, 16).to(dtype)
    exact, ours = partial_sums.double().sum(0), bias_gradients.launch(partial_sums, 16, dtype, False)
    allowed = torch.finfo(dtype).eps / 2 * exact.abs() + 300 * torch.finfo(torch.float32).eps * 4
    assert ((ours.double() - exact).abs() <= allowed).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("rows, ours", [(2 * sums.SHARE, 1), (sums.SHARE + 1, 0)])
def test_sums_over_rows_are_the_same_compiled(rows, ours, dtype):
    """There in parts, whose sum is our operator's, where there are whole shares."""
    x, graphs = torch.randint(-2, 3, (rows, 24)).to(dtype), []
    torch._dynamo.reset()
    compiled = torch.compile(sums.over_rows, backend=lambda graph, _: graphs.append(graph.graph) or graph)
    assert torch.equal(sums.over_rows(x), x.float().sum(0).to(dtype))
    assert torch.equal(sums.over_rows(x), compiled(x))
    assert len(graphs[0].find_nodes(op="call_function", target=sums.OP.op)) == ours


@pytest.mark.parametrize("number", [0, 6])  # 6: weights stay in shared memory
def test_what_is_not_a_number_stays_so(number, monkeypatch):
    monkeypatch.setattr(tuner, "chosen", lambda kernel, shape, candidates: candidates[number])
    ours, plain, (x, *weights) = made("transition", torch.bfloat16, "whole tiles")
    x[0, 1, 2, 3] = float("nan")
    assert torch.equal(ours(x, *weights).isnan(), plain(x, *weights).isnan())
