"""Clocks and counters against hand counts, traces, tables."""
import itertools
import json
import os

import pytest
import torch

from fusion_lab.measuring import clocks, roctx
from fusion_lab.measuring.clocks import PhaseTimer, RangeSums
from fusion_lab.measuring.counters import OpCounter, saved_activations
from fusion_lab.measuring.probe import Counts
from fusion_lab.measuring.ranges import ranges
from fusion_lab.measuring.recorders import OuterProfiler, Profiling
from fusion_lab.measuring.tables import cell, markdown
from fusion_lab.training.options import ProfilerConfig

CPU, GPU = torch.device("cpu"), torch.device("cuda")


# Clocks


def test_phases_are_the_times_between_marks(monkeypatch):
    ticks, said = iter([10.0, 11.0, 13.0, 20.0, 24.0, 32.0]), []
    monkeypatch.setattr(clocks.time, "perf_counter", lambda: next(ticks))
    timer = PhaseTimer(CPU, ("a", "b"), said.append, lambda: said.append("left"))
    for _ in range(2):
        timer.start()
        timer.mark()
        timer.mark()
    assert timer.seconds().tolist() == [[1.0, 2.0], [4.0, 8.0]]
    assert said == ["a", "left", "b", "left"] * 2
    timer = PhaseTimer(CPU)
    monkeypatch.setattr(clocks.time, "perf_counter", itertools.count().__next__)
    timer.start()
    timer.mark()
    assert timer.seconds().tolist() == [[1]]


def test_a_long_run_keeps_no_event(monkeypatch):
    """Whoever reads the clock at every step, or never, gets the same times."""
    kept = []
    for read in (True, False):
        monkeypatch.setattr(clocks.time, "perf_counter", itertools.count().__next__)
        monkeypatch.setattr(clocks, "MOST_PENDING", 10)
        timer = PhaseTimer(CPU)
        for _ in range(25):
            timer.start()
            timer.mark()
            timer.mark()
            assert len(timer.seconds(3)) <= 3 if read else len(timer.steps) <= 10
        timer.start()  # broken off
        kept.append(timer.seconds().tolist())
    assert kept[0] == kept[1] == [[1.0, 1.0]] * 25


# Counters


def test_range_sums_of_three_levels_and_of_siblings():
    ticks = iter([0, 1, 2, 5, 6, 8, 12, 20])
    sums = RangeSums(lambda: next(ticks))
    for name in ("outer", "middle", "inner"):
        sums.enter(name)
    sums.leave()
    sums.leave()
    sums.enter("sibling")
    sums.leave()
    sums.leave()
    assert sums.sums == {"inner": 3, "middle": 2, "sibling": 4, "outer": 11}


def test_hooks_close_a_range_that_an_exception_leaves():
    layer, names = torch.nn.Linear(2, 2), []
    with pytest.raises(RuntimeError), ranges([("layer", layer)], names.append, names.pop):
        layer(torch.zeros(3, 3))
    assert names == []


def test_live_bytes_and_their_peak():
    """The clone is 400 bytes, the sum 4; bare allocations are bytes but no operation, views are neither."""
    x = torch.ones(100)
    with OpCounter() as counter:
        y = x.clone()
        y.view(10, 10).add_(1.0)  # in place: an operation, no bytes
        total = y.sum()
        del y
        room, nothing = torch.empty(50), torch.empty(0)
    assert counter.launches == 3 and (counter.live, counter.peak) == (204, 404)
    assert counter.timeline == [(1, 400), (1, 400), (2, 400), (3, 404), (3, 204), (3, 204)]
    assert total.item() == 200 and len(room) == 50 and len(nothing) == 0
    del total
    assert counter.live == 200
    with OpCounter() as counter:
        for _ in range(50):  # memory that is given back and taken again counts again
            y = x.clone()
            assert counter.live == 400
            del y


def test_a_storage_is_saved_once_and_the_model_s_own_never():
    layer = torch.nn.Linear(4, 4, bias=False)
    layer.register_buffer("scale", torch.full((4,), 2.0))
    x = torch.randn(3, 4, requires_grad=True)

    def loss():
        y = layer(x)  # keeps x, and its weight, which does not count
        return ((y * layer.scale) * y[:2].sum() * y).sum()

    # Outside: y * scale keeps y for its other factors once; the products keep themselves and the sum.
    assert saved_activations(layer, [("layer", layer)], loss) == {"layer": 48, "rest": 48 + 48 + 4 + 48}


def test_a_saved_slice_keeps_all_of_its_storage():
    x = torch.randn(100, requires_grad=True)

    def loss():
        part = (2.0 * x)[:2]
        return (part * part).sum()
    assert saved_activations(torch.nn.Identity(), [], loss) == {"rest": 400}


# Traces


def outer_profiling(monkeypatch, said, **values):
    """Profiling of a run on a GPU under an outer profiler; what is done on the GPU is appended to said."""
    monkeypatch.setattr(torch.cuda.nvtx, "range_push", said.append)
    monkeypatch.setattr(torch.cuda.nvtx, "range_pop", lambda: said.append("pop"))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: said.append("wait"))
    config = ProfilerConfig(enable_rocm_profiling=True, profile_dir="/nonexistent", **values)
    layer = torch.nn.Linear(2, 2)
    return layer, Profiling(config, GPU, [("layer", layer)], Counts({}, 1), 4)


def test_an_outer_profiler_hears_of_steps_ranges_and_pauses(monkeypatch):
    said = []
    monkeypatch.setattr(torch.version, "hip", None)
    for name in ("start", "stop"):
        monkeypatch.setattr(torch.cuda.profiler, name, lambda name=name: said.append(name))
    layer, profiling = outer_profiling(monkeypatch, said)
    with profiling:
        layer(torch.zeros(1, 2, requires_grad=True)).sum().backward()
        with pytest.raises(KeyError), profiling.paused():
            raise KeyError
        profiling.step()
    assert said == ["start", "layer", "pop", "layer.backward", "pop", "stop", "start", "wait", "stop"]
    layer(torch.zeros(1, 2))
    assert len(said) == 9 and profiling.trace is None


def test_on_rocm_the_outer_profiler_is_reached_by_roctx(monkeypatch, capsys):
    said = []
    monkeypatch.setattr(torch.version, "hip", "6.4")
    for name in ("resume", "pause"):
        monkeypatch.setattr(roctx, name, lambda name=name: said.append(name))
    with outer_profiling(monkeypatch, said)[1]:
        pass
    assert said == ["resume", "wait", "pause"]

    def missing():
        raise OSError("no library")
    monkeypatch.setattr(roctx, "resume", missing)
    OuterProfiler().listen(on=True)
    assert "no profiler start and stop (no library)" in capsys.readouterr().out
    with Profiling(ProfilerConfig(enable_rocm_profiling=True), CPU, [], Counts({}, 1), 4) as profiling:
        with profiling.paused():
            pass
    assert said == ["resume", "wait", "pause"] and "no GPU here" in capsys.readouterr().out


@pytest.mark.parametrize("steps, without, traced, untraced", [
    (21, 15, 5, 15), (10, 5, 4, 5), (4, 2, 1, 2), (3, 1, 1, 1), (2, 0, 1, 2), (1, 0, 1, 1)])
def test_the_last_steps_are_traced_and_those_before_are_not(steps, without, traced, untraced):
    """Between them is the one in which the profiler starts."""
    profiling = Profiling(ProfilerConfig(enable_pytorch_profiler=True), CPU, [], Counts({}, 1), steps)
    assert (profiling.steps_before_trace, profiling.tracer.traced) == (without, traced)
    assert profiling.untraced(list(range(steps))) == list(range(untraced))


def test_a_cpu_s_steps_are_timed_by_range(tmp_path, capsys):
    """A clock that ticks once a question: enter and leave of a phase and of the layer within it. What an
    evaluation runs is not counted."""
    layer, config = torch.nn.Linear(2, 2), ProfilerConfig(enable_pytorch_profiler=True,
                                                          profile_dir=str(tmp_path))
    with Profiling(config, CPU, [("layer", layer)], Counts({}, 1), 4) as profiling:
        profiling.times.sums.clock = itertools.count().__next__
        for phase in ("forward", "backward", "data", "forward"):
            profiling.enter(phase)
            layer(torch.zeros(1, 2))
            with profiling.paused():
                layer(torch.zeros(1, 2))
            profiling.leave()
            profiling.step()
    assert profiling.samples == [dict(layer=1, forward=2), {"layer.recompute": 1, "backward": 2}]
    assert not layer._forward_hooks and os.listdir(tmp_path) == [os.path.basename(profiling.trace)]
    assert "--profile-steps 5" in capsys.readouterr().out  # of which there was room for one


def test_a_memory_profile_is_sorted_and_in_megabytes(tmp_path, capsys):
    config = ProfilerConfig(profile_dir=str(tmp_path), enable_memory_profiling=True)
    found = Counts(dict(a=2 ** 20, b=3 * 2 ** 20), 1, timeline=[(1, 8)])
    with Profiling(config, CPU, [], found, 4):
        pass
    lines = capsys.readouterr().out.splitlines()
    assert lines[1:] == [f"   {'b':24s}       3.0   75.0%", f"   {'a':24s}       1.0   25.0%"]
    assert json.loads((tmp_path / "memory_profile.json").read_text()) == dict(
        saved_activation_bytes=found.saved, timeline_columns=["operation", "live_bytes"], timeline=[[1, 8]])


# Tables


def test_tables():
    rows = [["name", "a"], ["long name", "1"], ["short", "a row that overhangs"]]
    assert markdown(rows)[1:3] == ["|-----------|----------------------|",
                                   "| long name | 1                    |"]
    assert markdown([["n", "a", "b"], ["x", "why | not"]]) == [
        "| n | a | b |", "|---|---|---|", r"| x | why \| not |   |"]
    assert markdown([["n", "a"], ["x"]], [3]) == ["| n   | a |", "|-----|---|", "| x   |   |"]
    assert (cell(None), cell(0.5), cell(1.25, ".1f", 100, "%")) == ("", "0.50", "125.0%")
    assert (cell(-0.04, ".1f", unit="%"), cell(-0.06, ".1f")) == ("0.0%", "-0.1")
