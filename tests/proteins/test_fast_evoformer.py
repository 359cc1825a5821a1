"""Twins of the Evoformer's layers: where they stand, and that plain code runs where no kernel does. What
kernels compute in a whole block is tested in tests/kernels/test_whole_block.py."""
import dataclasses

import pytest
import torch

import tiny_openfold_v2 as tof
from evoformer_kernels import limits
from fusion_lab.measuring import accuracy
from tiny_openfold.proteins import fast_evoformer
from tiny_openfold.proteins.fast_evoformer import Plan

SMALL = tof.TinyOpenFoldConfig(num_blocks=1, msa_dim=8, pair_dim=12, msa_heads=2, pair_heads=3,
                               outer_product_dim=4)
ALL_TRITON = tof.FusionConfig(**{f"enable_triton_{name}": True for name in (
    "attention", "outer_layout", "relu", "triangle")})


def block_of(fusion=ALL_TRITON):
    return tof.FusedEvoformerBlock(SMALL, fusion)


def inputs():
    """MSA and pair tensor of whole numbers, which add exactly."""
    return (torch.randint(-9, 9, (1, *shape)).float() for shape in ((5, 7, 8), (7, 7, 12)))


# --- Which twins ------------------------------------------------------------------------------------------

def test_sub_layers_are_twins_only_where_something_is_asked():
    """All blocks share their classes, or the compiler would compile each of them."""
    for fusion in (tof.FusionConfig(), tof.FusionConfig.baseline(), tof.FusionConfig.preset()):
        block = block_of(fusion)
        assert not block.fast and type(block.outer_product_mean) is tof.OuterProductMean
    blocks = [block_of() for _ in range(2)]
    assert blocks[0].fast
    for name in tof.SUBLAYERS:
        layer, plain = getattr(blocks[0], name), getattr(block, name)
        assert isinstance(layer, type(plain)) and isinstance(layer, fast_evoformer.SubLayerTwin)
        assert type(layer) is type(getattr(blocks[1], name))
        assert layer.__dict__.keys() - plain.__dict__.keys() == {"plan"}
    assert block.state_dict().keys() == blocks[0].state_dict().keys()


def test_a_plan_is_what_switches_ask_for():
    assert Plan.of(tof.FusionConfig()) == Plan()
    assert Plan.of(ALL_TRITON) == Plan(*4 * [True])
    for other in (dict(attention_backend="sdpa"), dict(enable_flash_attention=False)):
        assert Plan.of(dataclasses.replace(ALL_TRITON, **other)) == Plan(False, *3 * [True])
    assert Plan.of(tof.FusionConfig(enable_selective_checkpointing=True)) == Plan(recompute=True)
    assert Plan.of(tof.FusionConfig(enable_activation_checkpointing=True)) == Plan()


@pytest.mark.parametrize("switch, names", [
    ("attention", {"msa_row_attention", "msa_column_attention", "triangle_attn_starting",
                   "triangle_attn_ending"}),
    ("outer_layout", {"outer_product_mean"}), ("relu", {"msa_transition", "pair_transition"}),
    ("triangle", {"triangle_mult_outgoing", "triangle_mult_incoming"})])
def test_a_switch_lets_kernels_run_its_own_sub_layers(switch, names, monkeypatch):
    monkeypatch.setattr(limits, "fits", lambda *given, **named: True)
    monkeypatch.setattr(limits, "runs", lambda x: True)
    block = block_of(tof.FusionConfig(**{f"enable_triton_{switch}": True}))
    x = torch.empty(1, 64, 64, 8)
    assert {name for name in tof.SUBLAYERS if getattr(block, name).takes(x)} == names


@pytest.mark.parametrize("fusion", [ALL_TRITON, tof.FusionConfig(enable_selective_checkpointing=True)],
                         ids=["kernels", "recomputed"])
def test_without_a_kernel_a_block_and_sub_layers_called_alone_compute_the_same(fusion):
    """As on a CPU, where nothing has one, with dropout too. Alone they return their update; masks by place,
    by name or none."""
    (msa, pair), block, plain = inputs(), block_of(fusion), block_of(tof.FusionConfig())
    accuracy.shake(block)  # sub-layers begin with updates of 0
    plain.load_state_dict(block.state_dict())
    for block.dropout in (0.0, 0.5):
        plain.dropout, outputs = block.dropout, []
        for each in (block, plain):
            torch.manual_seed(0)
            outputs.append(each(msa, pair))
        assert all(map(torch.equal, *outputs))
    seq_mask, row_mask = torch.tensor([[1.0] * 6 + [0]]), torch.tensor([[1.0, 1, 1, 0, 0]])
    seq, row = dict(seq_mask=seq_mask), dict(row_mask=row_mask)
    for name, given, masks in (
            ("msa_row_attention", (msa, pair), seq), ("msa_column_attention", (msa,), row),
            ("msa_transition", (msa,), {}), ("outer_product_mean", (msa,), row),
            ("triangle_mult_outgoing", (pair,), seq), ("triangle_attn_ending", (pair,), seq)):
        layer, other = getattr(block, name), getattr(plain, name)
        assert torch.equal(layer(*given), other(*given))
        assert torch.equal(layer(*given, **masks), other(*given, *masks.values()))


# --- The outer product's order ------------------------------------------------------------------------------

@pytest.mark.parametrize("samples, rows, residues, ours, plain", [
    (1, 1, 4, False, True), (1, 1, 5, True, True), (2, 31, 128, True, True), (2, 32, 128, False, True),
    (2, 31, 127, False, False)])
def test_kernels_take_over_where_reassociating_draws_level(samples, rows, residues, ours, plain, monkeypatch):
    layer = block_of(tof.FusionConfig(enable_triton_outer_layout=True)).outer_product_mean
    sides = torch.empty(samples, rows, residues, 2)
    for runs, expected in ((True, ours), (False, plain)):
        monkeypatch.setattr(limits, "runs", lambda x, runs=runs: runs)
        assert layer.weight_first(sides) is expected


# --- Recomputation ----------------------------------------------------------------------------------------

def test_what_backward_begins_with_is_not_recomputed():
    config = dataclasses.replace(SMALL, num_blocks=2)
    model = tof.TinyOpenFoldV2(config, tof.FusionConfig(enable_selective_checkpointing=True))
    kept = [(number, name) for number, block in enumerate(model.blocks) for name in tof.SUBLAYERS
            if not getattr(block, name).plan.recompute]
    assert kept == [(1, "triangle_attn_ending"), (1, "pair_transition")]
