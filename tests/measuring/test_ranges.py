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


def test_backward_of_a_module_fed_with_data(recwarn):
    """It ends with the gradients of its parameters: there is none of its input."""
    layers, opened, seen = [torch.nn.Linear(4, 4), torch.nn.ReLU(), torch.nn.Linear(4, 4)], [], []
    model = torch.nn.Sequential(*layers)
    for number, parameter in enumerate(model.parameters()):
        parameter.register_hook(lambda _, number=number: seen.append((number, list(opened))))
    for x in (torch.ones(2, 4), torch.ones(2, 4, requires_grad=True)):
        for named in ([("whole", model)], [("first", model[0]), ("last", model[2])]):
            with ranges.ranges(named, opened.append, opened.pop, backward=True):
                for _ in range(2):
                    model(x).sum().backward()
            assert not opened
    whole, parts = [(n, ["whole.backward"]) for n in (3, 2, 1, 0)], [
        (n, ["last.backward" if n > 1 else "first.backward"]) for n in (3, 2, 1, 0)]
    assert sorted(seen) == sorted(4 * whole + 4 * parts) and not recwarn.list


def test_backward_of_a_module_without_parameters_of_its_own():
    """Fed with data, with another's weights: its backward ends at once, since nothing says when."""
    owner, opened = torch.nn.Linear(4, 4), []
    borrower = torch.nn.Sequential(torch.nn.Identity())
    borrower.forward = lambda x: torch.nn.functional.linear(x, owner.weight)
    with ranges.ranges([("borrower", borrower)], opened.append, opened.pop, backward=True):
        borrower(torch.ones(2, 4)).sum().backward()
    assert not opened and owner.weight.grad.any()
