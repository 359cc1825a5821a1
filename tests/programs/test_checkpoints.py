"""Checkpoints of the model's own trainer: under other switches they bring everything back."""
import copy
import os

import pytest
import torch

import tiny_openfold_v2 as tof
from fusion_lab.training.checkpoints import read_checkpoint, restore, snapshot
from fusion_lab.training.files import UserError
from tiny_openfold.proteins.batches import SyntheticProteins

SMALL = dict(num_blocks=1, msa_dim=8, pair_dim=8, msa_heads=2, pair_heads=2, outer_product_dim=4, num_seqs=4,
             seq_len=8, batch_size=2)
HALF = dict(use_amp=True, amp_dtype="float16")
MASTERS = dict(HALF, enable_master_weights=True)


def trainer_of(**values):
    return tof.Trainer(tof.PROGRAM, tof.PROGRAM.settings(**{**SMALL, **values}), torch.device("cpu"))


def trained(steps=3, overflows=0, **values):
    """A trainer after some steps. The last ones overflow in float16, so that its scaler skips them."""
    trainer = trainer_of(dropout=0.2, **values)
    batch = SyntheticProteins(trainer.settings).batch(0)
    for step in range(steps):
        if step == steps - overflows:
            trainer.model.distogram_head.weight.register_hook(lambda gradient: gradient * float("inf"))
        trainer.step(batch)
        trainer.step_number += 1
    trainer.trained_on |= {"b", "a"}
    return trainer


def saved_to(path, trainer):
    torch.save(snapshot(trainer), path)
    return path


def same(a, b):
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    return torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b


@pytest.mark.parametrize("source, target", [
    ({}, dict(enable_projection_fusion=True)), (HALF, HALF), (HALF, MASTERS), (MASTERS, HALF),
    (MASTERS, MASTERS)])
def test_everything_comes_back(source, target, tmp_path):
    expected = copy.deepcopy(snapshot(first := trained(4, overflows=len(source) and 1, **source)))
    path = saved_to(tmp_path / "c.pt", first)
    second = trainer_of(dropout=0.2, seed=7, **target)
    torch.manual_seed(8)
    restore(second, path)
    assert second.step_number == 4 and second.trained_on == {"a", "b"}
    found = snapshot(second)
    for key in ("config", "step", "updates", "model", "moments", "scaler", "rng", "trained_on"):
        assert same(found[key], expected[key]), key
    weights = second.model.state_dict()  # the model's own, which is what computes
    assert all(torch.equal(weights[name], value.to(weights[name].dtype))
               for name, value in expected["model"].items())
    assert all(state["step"] == expected["updates"] for state in second.optimizer.state.values())
    batch = SyntheticProteins(first.settings).batch(9)
    second.step(batch)
    assert second.scaler.get_scale() == (expected["scaler"] or {"scale": 1})["scale"]
    assert same(snapshot(second)["updates"], expected["updates"] + 1)


class Evil:
    """Unpickled, it makes a directory."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


def test_loading_a_checkpoint_runs_no_code_of_it(tmp_path):
    whole = snapshot(trainer_of())
    torch.save({**whole, "trained_on": [Evil(tmp_path / "it ran")]}, tmp_path / "evil.pt")
    with pytest.raises(UserError, match="damaged"):
        read_checkpoint(tmp_path / "evil.pt", tof.PROGRAM, tof.PROGRAM.settings(**SMALL).model)
    assert not (tmp_path / "it ran").exists()
