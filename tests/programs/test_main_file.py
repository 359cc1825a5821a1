"""The main file's attention in 16 bits, and what its run does when it closes."""
import dataclasses
import math

import pytest
import torch

import tiny_openfold_v2 as tof
from tiny_openfold.proteins.batches import SyntheticProteins


def test_plain_attention_adds_its_weights_up_in_float32():
    """A key stands out from 500 others: to bfloat16, whose products are exact here, its weight is 1 / 256."""
    q, k = torch.zeros(1, 1, 1, 1, 4), torch.zeros(1, 1, 1, 501, 4)
    v = torch.cat([torch.ones(1, 1, 1, 1, 4), torch.zeros(1, 1, 1, 500, 4)], dim=3)
    bias = torch.zeros(1, 1, 1, 501)
    bias[..., 0] = math.log(256) + 0.02  # rounds to itself or its neighbours alike in both
    given = [x.bfloat16() for x in (q, k, v)]
    asked = []
    softmax = torch.Tensor.softmax

    def noted(x, dim, dtype=None):
        asked.append(dtype)
        return softmax(x, dim, dtype=dtype)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.Tensor, "softmax", noted)
        found = tof.attend(*given, bias.bfloat16(), backend="math")
        tof.attend(*(x.double() for x in (q, k, v)), bias.double(), backend="math")
    weight = math.exp(bias.bfloat16()[0, 0, 0, 0].item())
    assert found.dtype == torch.bfloat16 and asked == [torch.float32, torch.float64]
    assert found[0, 0, 0, 0, 0].item() == pytest.approx(weight / (weight + 500), rel=2 ** -8)


def test_a_run_closes_with_averaged_weights(tmp_path, monkeypatch):
    """What it says of its model at the end is of the one that was evaluated."""
    seen = {}

    class Closing(SyntheticProteins):
        def finish(self, trainer, evaluations):
            seen.update(trainer=trainer, closing=trainer.weights.tensors[0].clone(),
                        average=trainer.average.tensors[0].clone())
    monkeypatch.setattr(tof.Metrics, "draw", lambda metrics: None)
    program = dataclasses.replace(tof.PROGRAM, data=Closing)
    flags = ("--num-blocks 1 --msa-dim 8 --pair-dim 8 --num-seqs 3 --seq-len 8 --batch-size 1 --num-steps 3 "
             "--warmup-steps 1 --ema-decay 0.9 --device cpu --learning-rate 0.1")
    assert tof.main([*flags.split(), "--profile-dir", str(tmp_path / "p")], program) == 0
    assert torch.equal(seen["closing"], seen["average"])
    assert not torch.equal(seen["trainer"].weights.tensors[0], seen["average"])
