"""The main file's attention in 16 bits, and what its loop does before it saves and when it closes."""
import contextlib
import dataclasses
import math
from types import SimpleNamespace

import pytest
import torch

import tiny_openfold_v2 as tof
from fusion_lab.measuring.clocks import PhaseTimer
from fusion_lab.training.distributed import ALONE
from fusion_lab.training.files import UserError


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


@pytest.mark.parametrize("name, done", [("save_every", "save 2"), ("eval_every", "take 2")])
def test_a_gpu_is_asked_for_its_losses_before_they_are_saved_or_evaluated(name, done, monkeypatch, tmp_path):
    """There they are looked at now and then, since that waits for it."""
    often = {**dict(num_steps=8, log_every=8, save_every=8, eval_every=8), name: 2}
    settings = tof.PROGRAM.settings(**often, save_checkpoint=str(tmp_path / "c.pt"))
    losses, events = iter([1.0, 1.0, math.nan, 1.0]), []
    trainer = SimpleNamespace(
        program=dataclasses.replace(tof.PROGRAM, evaluate=lambda *_: {}), training=settings.training,
        device=SimpleNamespace(type="cuda"), step_number=0, world=ALONE,
        step=lambda batch, mark: torch.tensor(next(losses)))
    monkeypatch.setattr(tof, "PhaseTimer", lambda device, *given: PhaseTimer(torch.device("cpu")))
    monkeypatch.setattr(tof, "batches", lambda *_: iter(range(8)))
    monkeypatch.setattr(tof, "save", lambda trainer, path: events.append(f"save {trainer.step_number}"))
    monkeypatch.setattr(tof, "unmeasured_memory", lambda *_: contextlib.nullcontext())
    monkeypatch.setattr(tof, "Evaluations", lambda *_: SimpleNamespace(
        stopped=False, ended=lambda: False,
        owed=lambda: name == "eval_every" and trainer.step_number == 2 + 2 * len(events),
        take=lambda step, stop: events.append(f"take {step}") or ""))
    profiling = SimpleNamespace(enter=None, leave=None, step=lambda: None, paused=contextlib.nullcontext)
    with pytest.raises(UserError, match="loss is nan at step 3"):
        tof.run_steps(trainer, None, profiling, None, SimpleNamespace(signal=None),
                      SimpleNamespace(step=lambda *_: None, flush=lambda: None))
    assert events == [done]


def test_a_run_closes_with_averaged_weights(tmp_path, monkeypatch):
    """What it says of its model at the end is of the one that was evaluated."""
    seen = {}

    def closing(trainer, source, evaluations):
        seen.update(closing=trainer.updated[0].clone(), average=trainer.average.weights[0].clone())
        seen["trainer"] = trainer
    monkeypatch.setattr(tof.Metrics, "draw", lambda metrics: None)
    program = dataclasses.replace(tof.PROGRAM, evaluate=None, closing=closing)
    flags = ("--num-blocks 1 --msa-dim 8 --pair-dim 8 --num-seqs 3 --seq-len 8 --batch-size 1 --num-steps 3 "
             "--warmup-steps 1 --ema-decay 0.9 --device cpu --learning-rate 0.1")
    assert tof.main([*flags.split(), "--profile-dir", str(tmp_path)], program) == 0
    assert torch.equal(seen["closing"], seen["average"])
    assert not torch.equal(seen["trainer"].updated[0], seen["average"])
