"""The model's ways into its kernels, in Triton's interpreter: a whole block, as if it lay on a GPU."""
import dataclasses

import pytest
import torch

import tiny_openfold_v2 as tof
from evoformer_kernels import limits
from fusion_lab.measuring import accuracy
from tests.kernels.rule import violations

pytestmark = [pytest.mark.interpreted, pytest.mark.slow, pytest.mark.usefixtures("on_gpu")]

CONFIG = tof.TinyOpenFoldConfig(msa_dim=16, pair_dim=32, msa_heads=2, pair_heads=2, outer_product_dim=4,
                                dropout=0.2)
KERNELS = {name: True for name in tof.FusionConfig.names() if name.startswith("enable_triton_")}
PACKINGS = dict(none=dict(enable_qkv_fusion_msa=False, enable_qkv_fusion_triangle=False),
                qkv={}, gate=dict(enable_projection_fusion=True))


def run(block):
    """A function of (msa, pair) with padded residues and a missing row, and of nothing else."""
    seq_mask, row_mask = torch.ones(1, 4), torch.ones(1, 3)
    seq_mask[:, 3:] = row_mask[:, 2:] = 0

    def call(msa, pair):
        torch.manual_seed(1)
        out = block.to(msa.dtype)(msa, pair, seq_mask, row_mask)
        valid = out[0] * (row_mask[:, :, None] * seq_mask[:, None])[..., None].to(msa.dtype), out[1] * (
            seq_mask[:, :, None] * seq_mask[:, None])[..., None].to(msa.dtype)
        return torch.cat([part.flatten() for part in valid])
    return call


def blocks(packing, h=4):
    """(all kernels, none), with equal weights; sides of the outer product have h channels."""
    torch.manual_seed(0)
    config = dataclasses.replace(CONFIG, outer_product_dim=h)
    found = [tof.FusedEvoformerBlock(config, fusion) for fusion in (
        tof.FusionConfig(**KERNELS, **PACKINGS[packing]), tof.FusionConfig.baseline())]
    accuracy.shake(found[1])
    found[0].load_state_dict(found[1].state_dict())
    return found


def tensors():
    torch.manual_seed(2)
    return [torch.randn(1, 3, 4, 16), torch.randn(1, 4, 4, 32)]


@pytest.mark.parametrize("packing, h, lacking", [
    ("qkv", 4, ()), ("none", 4, ()), ("gate", 4, ()), ("qkv", 16, ()), ("gate", 16, ()),
    ("qkv", 4, ("transition", "attention sub-layer")), ("gate", 4, ("attention sub-layer",))])
def test_a_block_is_what_it_is_without_kernels(packing, h, lacking, monkeypatch):
    """With dropout. The outer product from sides with a kernel (h 16) or without; transitions round library
    products or, of many channels, their layers; attention between projections of the library."""
    fits = limits.fits
    monkeypatch.setattr(limits, "fits", lambda part, *given, **named: (
        part not in lacking and fits(part, *given, **named)))
    ours, plain = blocks(packing, h)
    assert lacking or all(layer.takes(tensors()[1]) for layer in ours.children())
    assert not violations(run(ours), run(plain), tensors())
