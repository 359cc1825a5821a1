"""Ranges for an outer profiler round the capture of a step, whose replays run no Python."""
import contextlib
from types import SimpleNamespace

import pytest
import torch

from fusion_lab.measuring import probe, ranges


def trainer_on(kind, compiled=False, **asked):
    layer = torch.nn.Linear(2, 2)
    settings = SimpleNamespace(
        profiler=SimpleNamespace(enable_rocm_profiling=asked.get("profiled", True)),
        fusion=SimpleNamespace(enable_cuda_graphs=asked.get("graphs", True), enable_torch_compile=compiled))
    return SimpleNamespace(settings=settings, device=SimpleNamespace(type=kind), layer=layer,
                           model=SimpleNamespace(sublayers=lambda: [("layer", layer)]))


@pytest.fixture
def marks(monkeypatch):
    """What is told to roctx; range_push returns a number, as the real one does."""
    told = []
    monkeypatch.setattr("torch.cuda.nvtx.range_push", lambda name: told.append(name) or 7)
    monkeypatch.setattr("torch.cuda.nvtx.range_pop", lambda: told.append("end") or 7)
    return told


def test_sub_layers_are_named_while_a_step_is_captured(marks):
    trainer = trainer_on("cuda")
    inputs = torch.ones(1, 2, requires_grad=True)
    with ranges.while_captured(trainer):
        trainer.layer(inputs).sum().backward()
    assert marks == ["layer", "end", "layer.backward", "end"]
    trainer.layer(inputs)
    assert len(marks) == 4


@pytest.mark.parametrize("trainer", [
    trainer_on("cpu"), trainer_on("cuda", profiled=False), trainer_on("cuda", graphs=False),
    trainer_on("cuda", compiled=True)], ids=["cpu", "no profiler", "no graph", "compiled"])
def test_no_hooks_where_no_graph_is_watched(trainer, marks):
    with ranges.while_captured(trainer):
        trainer.layer(torch.ones(1, 2))
    assert marks == []


def test_the_warm_up_is_where_steps_are_captured(marks, monkeypatch):
    trainer = trainer_on("cuda")
    trainer.training, trainer.step_number, trainer.world = SimpleNamespace(warmup_steps=2), 0, None
    trainer.preserved = contextlib.nullcontext
    trainer.step = lambda batch: trainer.layer(batch).sum()
    monkeypatch.setattr(probe, "batch_of", lambda *_: torch.ones(1, 2))
    monkeypatch.setattr(probe, "to_device", lambda batch, _: batch)
    monkeypatch.setattr(probe, "probe", lambda trainer, batch, kernels: probe.Findings({}, 1))
    assert probe.warm_up(trainer, None).warmup_time >= 0
    assert marks == ["layer", "end"] * 2
