"""The padded bias of attention in Triton's interpreter: the numbers that plain PyTorch makes; mutants."""
from unittest import mock

import pytest
import torch

from fusion_lab.kernels import common
from fusion_lab.kernels.attention import padded_bias
from tests.kernels.rule import mutant

pytestmark = [pytest.mark.interpreted, pytest.mark.full]

CASES = {  # B, H, L, LP, samples of keys or None, their dtype
    "padded, a mask": (2, 3, 37, 64, 2, torch.bool),
    "one mask for all": (3, 2, 64, 64, 1, torch.float32),
    "padded": (2, 1, 77, 128, None, None),
    "smaller than a tile": (2, 2, 5, 16, 2, torch.int64),
    "one residue": (1, 1, 1, 16, 1, torch.bool),
}
MUTANTS = {  # what is replaced by what, and the case that must notice
    "mask ignored": ("values, KERNEL_MASKED", "values, values", "padded, a mask"),
    "queries masked": ("present[None, :], values", "present[:, None], values", "padded, a mask"),
    "keys of the first sample": ("bh // H * keys_stride", "0 * bh * keys_stride", "padded, a mask"),
    "a sample's keys shared": ("L * (len(keys) > 1)", "0", "padded, a mask"),
    "not padded": ("tl.where(inside, values, KERNEL_PADDING)", "values", "padded"),
    "queries not padded": ("tl.where(inside, values", "tl.where((j < L)[None, :], values", "padded"),
    "bias of the first head": ("bh % H * bias_stride_head", "0 * bh * bias_stride_head", "padded, a mask"),
    "bias of the first sample": ("bh // H * bias_stride_sample", "0 * bh * bias_stride_sample", "padded"),
    "the transpose not transposed": ("(j[:, None] * LP + i[None, :]), tl.trans(values)",
                                 "(i[:, None] * LP + j[None, :]), values", "padded"),
    "always the first keys": ("tl.program_id(2) * T", "0 * tl.program_id(2)", "padded"),
}
LAYOUTS = {  # of a bias (B, H, L, L)
    "as it is": lambda bias: bias,
    "transposed": lambda bias: bias.mT.contiguous().mT,
    "heads last": lambda bias: bias.permute(0, 2, 3, 1).contiguous().permute(0, 3, 1, 2),
    "shared by heads": lambda bias: bias[:, :1].expand_as(bias),
    "a part": lambda bias: torch.stack([bias, -bias], 4).repeat(1, 1, 2, 1, 1)[:, :, :bias.shape[2], :, 0]}


def problem(dtype, B, H, L, LP, samples, kind, layout="as it is"):
    torch.manual_seed(0)
    bias = LAYOUTS[layout](torch.randn(B, H, L, L).to(dtype))
    return bias, None if samples is None else (torch.rand(samples, L) > 0.4).to(kind), LP


def wrong(op, given, dtype, transpose):
    """Whether op makes another bias than plain PyTorch, or lays it out otherwise."""
    pairs = zip(op(*given, dtype, transpose), padded_bias.reference(*given, dtype, transpose), strict=True)
    return not all(a.dtype == b.dtype and a.is_contiguous() and a.shape == b.shape and same(a, b)
                   for a, b in pairs)


def same(found, expected):
    """Number by number; but what masks and pads the interpreter cuts off where bfloat16 rounds."""
    low = expected <= padded_bias.MASKED / 2
    return torch.equal(found[~low], expected[~low]) and torch.allclose(
        found[low], expected[low], rtol=0 if found.is_cuda else 2 ** -7)


@pytest.mark.sample
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", common.DTYPES, ids=str)
@pytest.mark.parametrize("case", CASES)
def test_the_same_numbers_as_plain_pytorch(case, dtype, layout):
    given = problem(dtype, *CASES[case], layout)
    wide = torch.float32 if dtype == torch.float16 else dtype
    assert not any(wrong(padded_bias.OP, given, wide, transpose) for transpose in (False, True))


def test_offsets_beyond_32_bits():
    """Of 4 GB that the bias's strides span nothing but its own numbers is ever touched."""
    length, apart = 130, 1 << 24
    far = torch.empty(length * apart, dtype=torch.bfloat16)
    far = far.as_strided((1, 1, length, length), (1, 1, apart, 1))
    given = far.copy_(torch.randn(far.shape)), None, 256
    assert not wrong(padded_bias.OP, given, torch.bfloat16, True)


def test_many_heads_fit_one_launch():
    """A GPU takes 65535 programs along the second and the third axis of a grid, 2^31 along the first."""
    with mock.patch.object(padded_bias, "attention_padded_bias_kernel") as kernel:
        padded_bias.launch(torch.zeros(2, 1 << 15, 1, 1), None, 16, torch.float32, False)
    (grid,), _ = kernel.__getitem__.call_args
    assert grid == (1 << 16, 1, 1)


@pytest.mark.slow
@pytest.mark.parametrize("name", MUTANTS)
def test_mutants_are_caught(name, tmp_path):
    old, new, case = MUTANTS[name]
    module = mutant(padded_bias, old, new, tmp_path)
    assert wrong(module.OP, problem(torch.float32, *CASES[case]), torch.float32, True)


@pytest.mark.slow
def test_queries_and_keys_exchanged_is_caught(tmp_path):
    module = mutant(padded_bias, "bias + j[:, None] * bias_stride_key + i[None, :] * bias_stride_query\n"
                    "        values = tl.trans(",
                    "bias + i[:, None] * bias_stride_key + j[None, :] * bias_stride_query\n"
                    "        values = (", tmp_path)
    assert wrong(module.OP, problem(torch.float32, *CASES["padded"], "transposed"), torch.float32, True)


def test_fake_tensors_have_the_same_size():
    bias, keys, LP = problem(torch.float16, *CASES["padded, a mask"])
    for transpose in (False, True):
        real = padded_bias.OP(bias, keys, LP, torch.float32, transpose)
        fake = padded_bias.OP(bias.to("meta"), keys.to("meta"), LP, torch.float32, transpose)
        for one, other in zip(real, fake, strict=True):
            assert (one.shape, one.stride(), one.dtype) == (other.shape, other.stride(), other.dtype)
