"""The padded bias of attention in Triton's interpreter: the numbers that plain PyTorch makes."""
import pytest
import torch

from fusion_lab.kernels.attention import padded_bias
from fusion_lab.kernels.precision import HALF
from tests.kernels import references

pytestmark = [pytest.mark.interpreted, pytest.mark.full]

CASES = {  # B, H, L, LP, samples of keys or None, their dtype
    "padded, a mask": (2, 3, 37, 64, 2, torch.bool),
    "one mask for all": (3, 2, 64, 64, 1, torch.float32),
    "padded": (2, 1, 77, 128, None, None),
    "one residue": (1, 1, 1, 16, 1, torch.int64)}
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


def wrong(given, dtype):
    """Whether the operator makes another bias or transpose than plain PyTorch, or lays it out otherwise."""
    ways = padded_bias.OP, references.padded_bias
    pairs = [pair for transpose in (False, True)
             for pair in zip(*(way(*given, dtype, transpose) for way in ways), strict=True)]
    return not all(a.dtype == b.dtype and a.is_contiguous() and a.shape == b.shape and same(a, b)
                   for a, b in pairs)


def same(found, expected):
    """Number by number; but what masks and pads the interpreter cuts off where bfloat16 rounds."""
    low = expected <= padded_bias.MASKED / 2
    return torch.equal(found[~low], expected[~low]) and torch.allclose(
        found[low], expected[low], rtol=0 if found.is_cuda else 2 ** -7)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", (*HALF, torch.float32), ids=str)
@pytest.mark.parametrize("case", CASES)
def test_the_same_numbers_as_plain_pytorch(case, dtype, layout):
    given = problem(dtype, *CASES[case], layout)
    assert not wrong(given, torch.float32 if dtype == torch.float16 else dtype)


def test_offsets_beyond_32_bits():
    """Of 4 GB that the bias's strides span nothing but its own numbers is ever touched."""
    length, apart = 130, 1 << 24
    far = torch.empty(length * apart, dtype=torch.bfloat16)
    far = far.as_strided((1, 1, length, length), (1, 1, apart, 1))
    assert not wrong((far.copy_(torch.randn(far.shape)), None, 256), torch.bfloat16)
