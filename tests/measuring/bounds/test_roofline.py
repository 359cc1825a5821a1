"""Ceilings, counts and predictions against formulas: what a session's bounds are made of."""
from dataclasses import dataclass, replace

import pytest
import torch

import tiny_openfold_v2 as tof
from fusion_lab.measuring.bounds import roofline
from fusion_lab.measuring.bounds.flops import flops_by_sublayer
from fusion_lab.measuring.bounds.sizes import shapes_around, shrunk
from fusion_lab.measuring.probe import probe
from proteins.costs import costs
from tests.profiler.test_session import CPU, PROGRAM, given, two_steps_later

RECOMPUTING = {"enable_activation_checkpointing", "enable_selective_checkpointing"}


FEW_ROWS = dict(num_blocks=1, num_seqs=3, seq_len=13, batch_size=1, msa_dim=8, outer_product_dim=6)


def of_formulas(settings):
    """{sub-layer or "rest": FLOPs of a step of one block}; backward takes twice those of forward."""
    found = {name: 3 * cost.flops for name, cost in costs(settings).items()}
    return {"rest": found.pop("heads"), **found}


def test_flops_under_every_switch_are_those_of_the_formulas():
    """Few rows of many residues are re-associated, which costs less; recomputation costs a forward more."""
    off, found = tof.FusionConfig.preset(False), {}
    for name in (None, *off.names()):
        settings = replace(given(**FEW_ROWS), fusion=replace(off, **{name: True} if name else {}))
        expected, found[name] = of_formulas(settings), flops_by_sublayer(PROGRAM, settings)
        if name in RECOMPUTING:
            assert sum(expected.values()) <= sum(found[name].values()) <= 4 / 3 * sum(expected.values())
        else:
            assert found[name] == expected, name
    assert found["enable_opm_fusion"]["outer_product_mean"] < found[None]["outer_product_mean"]
    every = replace(settings, fusion=tof.FusionConfig.preset(True))
    assert flops_by_sublayer(PROGRAM, every) == found["enable_opm_fusion"]
    more_rows = replace(given(**dict(FEW_ROWS, num_seqs=5, num_blocks=2)), fusion=tof.FusionConfig())
    plain = replace(more_rows, fusion=off)
    assert flops_by_sublayer(PROGRAM, more_rows) == flops_by_sublayer(PROGRAM, plain)


@pytest.mark.parametrize("switches", [{}, dict(use_amp=True), dict(use_amp=True, enable_master_weights=True)])
@pytest.mark.parametrize("fused", [False, True])
def test_simulated_memory_agrees_with_the_measured_one(switches, fused):
    settings = given(fused, **switches)
    trainer, batch = two_steps_later(settings)
    found, state = probe(trainer, batch), torch.get_rng_state()
    peak, saved = roofline.simulate_memory(PROGRAM, settings, CPU)
    assert peak == pytest.approx(found.peak, rel=0.02)
    assert saved == pytest.approx(sum(found.saved.values()), rel=0.01)
    assert torch.equal(torch.get_rng_state(), state)


def test_the_simulation_allocates_nothing():
    """Proteins of 2048 residues in two very wide blocks: more than a terabyte."""
    settings = given(seq_len=2048, num_blocks=2, pair_dim=512)
    peak, saved = roofline.simulate_memory(PROGRAM, settings, CPU)
    assert peak > saved > 2 ** 40


@dataclass(frozen=True)
class OfFours(tof.TinyOpenFoldConfig):
    """A model that takes multiples of four residues only."""

    def __post_init__(self):
        super().__post_init__()
        if self.seq_len % 4:
            self.refuse("seq_len", "must be a multiple of 4")


def test_sizes_next_to_nothing_are_those_that_the_program_takes():
    picky = replace(PROGRAM, model_config=OfFours)
    settings = picky.settings(seq_len=64, num_seqs=16)
    assert shrunk(picky, settings, largest=2).model.seq_len == 4
    assert all(shape["seq_len"] % 4 == 0 for shape in shapes_around(picky, picky.settings(seq_len=4)))
    batch_only = replace(PROGRAM, axes=dict(batch_size="B"))
    assert shrunk(batch_only, settings, largest=2) == settings
