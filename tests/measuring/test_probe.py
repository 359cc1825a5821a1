"""What a step costs beside time, against hand counts; what a warm-up leaves."""
import contextlib
from types import SimpleNamespace

import pytest
import torch

from fusion_lab.measuring import probe as probe_module
from fusion_lab.measuring.probe import Counts, peak_megabytes, probe, unmeasured_memory, warm_up
from tests.second_program import PROGRAM as SECOND

CPU, GPU = torch.device("cpu"), torch.device("cuda")


def second(**values):
    settings = SECOND.settings(**{**dict(width=8, depth=2, batch_size=3, device="cpu"), **values})
    return SECOND.trainer(SECOND, settings, CPU), SECOND.data(settings).batch(0)


def test_the_first_step_is_counted_as_those_after_it():
    """Of both layers, inputs (96 bytes) and what is hidden (384); of the loss, the difference."""
    trainer, batch = second()
    first = probe(trainer, batch)
    assert first == probe(trainer, batch) and first.saved == dict(up=2 * (96 + 384), rest=96)
    assert max(live for _, live in first.timeline) < first.peak  # weights and their moments, too
    fewer = {name: samples[:2] for name, samples in batch.items()}
    assert 3 * probe(trainer, fewer).flops == 2 * first.flops
    step = trainer.step
    trainer.step = lambda given, mark=int: (step(given, mark), trainer.forward(given))  # saved too late
    assert probe(trainer, batch).saved == first.saved


@pytest.mark.parametrize("names, kernels, launches, said", [
    (["a", "b"], None, 2, ""), (["a", "b"], 3, None, "recorded 2 of 3 kernels. ROCm 7.0 to 7.14"),
    ([], None, None, "recorded 0 of its kernels. Unset ROCPROFILER_REGISTER_LIBRARY")])
def test_kernels_that_were_not_recorded_are_no_launches(names, kernels, launches, said, monkeypatch):
    monkeypatch.setattr(probe_module, "gpu_kernels", lambda run: names)
    trainer, batch = second()
    trainer.step(batch)
    trainer.device, trainer.graph = GPU, SimpleNamespace(peak=123, kernels=kernels)
    counts = probe(trainer, batch)
    assert (counts.launches, counts.peak, counts.graph_kernels) == (launches, 123, kernels)
    assert said in (counts.uncounted or "") and bool(counts.uncounted) == bool(said)
    counts = probe(trainer, batch, count_launches=False)
    assert counts.launches is None and "outer profiler" in counts.uncounted


def test_peak_memory_in_megabytes(monkeypatch):
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: 3 * 2 ** 20)
    assert Counts(dict(a=2 ** 20, b=2 ** 19), 1).saved_mb == 1.5
    for peak, on_cpu, on_gpu in ((None, None, 3.0), (2 ** 19, 0.5, 3.0), (5 * 2 ** 20, 5.0, 5.0)):
        counts = Counts({}, 1, peak=peak)
        assert (peak_megabytes(CPU, counts), peak_megabytes(GPU, counts)) == (on_cpu, on_gpu)


@pytest.fixture
def peak(monkeypatch):
    """What a GPU's allocator held at times, in bytes."""
    peak = []
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda device: peak.clear())
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: max(peak, default=0))
    return peak


def test_memory_of_an_evaluation_is_not_that_of_a_step(peak):
    """What the steps needed until then is kept, and the allocator begins anew."""
    counts = Counts({}, 1)
    peak.append(70)
    with pytest.raises(KeyError), unmeasured_memory(GPU, counts):
        peak.append(99)
        raise KeyError
    assert counts.peak == 70 and not peak
    peak.append(60)
    with unmeasured_memory(GPU, counts):
        pass
    assert counts.peak == 70


def test_memory_of_a_warm_up_is_not_that_of_a_step(peak, monkeypatch):
    """Compilers and kernels' first calls need more than steps do."""
    monkeypatch.setattr(probe_module, "to_device", lambda batch, device: batch)
    monkeypatch.setattr(probe_module, "probe", lambda *_, **__: peak.append(99 * 2 ** 20) or Counts({}, 1))
    trainer, _ = second(warmup_steps=0)
    trainer.device, trainer.preserved = GPU, contextlib.nullcontext
    counts = warm_up(trainer, SECOND.data(trainer.settings))
    peak.append(2 ** 20)
    assert peak_megabytes(GPU, counts) == 1.0


def test_warm_up_times_its_steps_and_leaves_nothing_behind(monkeypatch):
    trainer, _ = second(warmup_steps=3)
    source, steps, step = SECOND.data(trainer.settings), [], trainer.step
    trainer.step = lambda *given: steps.append(1) or step(*given)
    before = [p.detach().clone() for p in trainer.model.parameters()]
    counts = warm_up(trainer, source)
    assert counts.warmup_time >= counts.first_step_time > 0 and len(steps) > 3 and counts.launches > 20
    assert all(map(torch.equal, before, trainer.model.parameters())) and trainer.step_number == 0
    counts = warm_up(trainer, source, SimpleNamespace(signal=2))
    assert (counts.warmup_time, counts.first_step_time) == (0, None)


def test_an_outer_profiler_does_not_share_the_gpu_with_one_that_counts(monkeypatch):
    asked = []
    monkeypatch.setattr(probe_module, "probe", lambda *_, count_launches: asked.append(count_launches)
                        or Counts({}, 1))
    for outer, trace in ((False, False), (True, False), (True, True)):  # the last: --enable-all-profiling
        trainer, _ = second(warmup_steps=0, enable_rocm_profiling=outer, enable_pytorch_profiler=trace)
        warm_up(trainer, SECOND.data(trainer.settings))
    assert asked == [True, False, True]
