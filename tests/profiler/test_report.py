"""A profiler session's arithmetic, sentences and tables by hand."""
import json
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from fusion_lab.measuring import analysis, attribution
from fusion_lab.measuring.analysis import SublayerTime, launch_arithmetic
from fusion_lab.measuring.flops import REST
from fusion_lab.measuring.probe import Findings
from fusion_lab.measuring.trace import RECOMPUTE
from fusion_lab.profiler import report
from fusion_lab.training.distributed import ALONE
from fusion_lab.training.files import UserError
from tests.second_program import PROGRAM as SECOND

CPU, GPU = torch.device("cpu"), torch.device("cuda")
MB = 2 ** 20


def settings(**values):
    return SECOND.settings(**{**dict(width=8, depth=2, batch_size=3, device="cpu"), **values})


# Is it launch-bound?


def test_launching_on_a_gpu_in_figures_and_words():
    """Six steps of 8 to 13 ms, of which kernels run 4.5 ms: sorted, the shares lie from 35 to 56%."""
    launch = launch_arithmetic(1000, [0.009, 0.008, 0.010, 0.012, 0.011, 0.013], busy_s=0.0045)
    assert (launch.launches, launch.step_ms, launch.busy_ms) == (
        1000, pytest.approx(10.5), pytest.approx(4.5))
    assert launch.verdict == analysis.UNDECIDED != "launch-bound"  # p80 is 50.0%
    uncounted = launch_arithmetic(None, [0.010], busy_s=0.0044)  # under --enable-rocm-profiling
    assert uncounted.text.endswith("the GPU waits for the other 5.60 ms") and uncounted.launches is None
    launch = launch_arithmetic(1000, [0.009, 0.008, 0.010, 0.012, 0.011, 0.013], busy_s=0.0044)
    assert launch_arithmetic(1, [0.001, 0.003, 0.008], busy_s=0.002).step_ms == 3  # no mean of a drifting one
    assert launch.text == (
        "launch-bound: kernels run during 4.40 ms of a 10.50 ms step, 42% (p20 to p80 of the steps 37 to "
        "49%); the GPU waits for the other 6.10 ms; of 1000 kernels one comes every 10.5 µs and runs 4.4 µs "
        "on average")
    assert "waits for the other 0.00 ms" in launch_arithmetic(9, 0.010, busy_s=0.011).text


@pytest.mark.parametrize("busy, verdict", [
    (0.49, "launch-bound"), (0.5, "partly launch-bound"), (0.84, "partly launch-bound"),
    (0.85, "not launch-bound")])
def test_shares_that_decide_on_a_gpu(busy, verdict):
    assert launch_arithmetic(5, 1.0, busy_s=busy).verdict == verdict


# From a step to its parts


class Walk:
    """A trainer whose step takes 1 s before each sub-layer, 2 s within, forward and backward; a second more
    behind them in each phase, and 7 s in the optimizer. With `again`, a runs once more in backward."""
    program, device = SECOND, CPU

    def __init__(self, again=False):
        self.now, self.again = 0.0, again
        self.model = SimpleNamespace(sublayers=lambda: ["a", "b"])

    def preserved(self):
        return torch.no_grad()

    def within(self, name):
        self.now += 1.0
        self.enter(name)
        self.now += 2.0
        self.leave()

    def step(self, batch, mark):
        for suffix in ("", ".backward"):
            for name in ("a", "b"):
                self.within(name + suffix)
            if suffix and self.again:
                self.within("a")
            self.now += 1.0
            mark()
        self.now += 7.0
        mark()


@pytest.mark.parametrize("again", [False, True])
def test_amounts_of_a_step_by_place(again, monkeypatch):
    walk = Walk(again)

    def ranges(named_modules, enter, leave, backward):
        assert named_modules == ["a", "b"] and backward
        walk.enter, walk.leave = enter, leave
        return torch.no_grad()

    monkeypatch.setattr(attribution, "ranges", ranges)
    monkeypatch.setattr(attribution.time, "perf_counter", lambda: walk.now)
    found = attribution.amounts_in_a_step(walk, None, lambda: walk.now)
    places = {(name, direction): 2.0 for name in "ab" for direction in ("forward", "backward")}
    if again:
        places["a", RECOMPUTE] = 2.0
    assert found == {**places, (REST, "forward"): 3.0, (REST, "backward"): 3.0 + again,
                     (REST, "optimizer"): 7.0}
    assert attribution.seconds_by_sublayer(walk, None, 0.5, 3) == [{**found, (REST, "data"): 0.5}] * 3


def entry(calls=1, device_us=None, host_us=0.0, launches=None, operations_us=0.0, allocated_bytes=None):
    return dict(calls=calls, device_us=device_us, host_us=host_us, launches=launches,
                operations_us=operations_us, allocated_bytes=allocated_bytes)


def test_entries_on_a_cpu_are_timed_without_the_profiler():
    table = {("down", "backward"): entry(host_us=9.0, operations_us=4.0),
             (REST, "forward"): entry(), ("up", "forward"): entry(2, host_us=8.0, operations_us=3.0,
                                                                    allocated_bytes=3 * MB),
             ("up", "backward"): entry()}
    trace = SimpleNamespace(on_gpu=False, sublayer_table=lambda: table)
    seconds = {("up", "forward"): 1e-3, ("down", "backward"): 3e-3, ("absent", "forward"): 1.0}
    entries, total = attribution.sublayer_entries(
        SECOND, trace, dict(up=2 * MB), {("up", "forward"): 5}, seconds)
    assert total == pytest.approx(4000.0)
    assert [(e.name, e.direction) for e in entries] == [
        ("up", "forward"), ("up", "backward"), ("down", "backward"), (REST, "forward")]
    up, again, down, rest = entries
    assert up == SublayerTime(
        "up", "forward", 2, pytest.approx(1000.0), 3.0, 8.0, pytest.approx(0.25), 5, 3.0, 2.0)
    assert (down.total_us, down.share, down.launches, down.saved_activation_mb) == (
        pytest.approx(3000.0), pytest.approx(0.75), None, None)
    assert (again.saved_activation_mb, rest.saved_activation_mb, rest.total_us) == (None, 0.0, 0.0)


def test_entries_on_a_gpu_are_of_its_kernels():
    table = {("up", "forward"): entry(device_us=30.0, host_us=50.0, launches=4, operations_us=20.0,
                                      allocated_bytes=MB),
             (REST, "forward"): entry(device_us=10.0, launches=1)}
    trace = SimpleNamespace(on_gpu=True, sublayer_table=lambda: table)
    elsewhere = {("up", "forward"): 99.0}
    (up, rest), total = attribution.sublayer_entries(SECOND, trace, {}, elsewhere, elsewhere)
    assert up == SublayerTime("up", "forward", 1, 30.0, 30.0, 50.0, 0.75, 4, 1.0, 0.0)
    assert (rest.share, rest.launches, rest.allocated_mb, total) == (0.25, 1, None, 40.0)
    nothing = SimpleNamespace(on_gpu=True, sublayer_table=lambda: {("up", "forward"): entry(device_us=0.0)})
    assert attribution.sublayer_entries(SECOND, nothing, {}, {}, {})[0][0].share == 0


def test_kernels_by_kind():
    rows = [dict(name=name, kind=kind, calls=calls, self_us=us) for name, kind, calls, us in (
        ("a", "copy", 2, 30.0), ("b", "fill", 1, 50.0), ("c", "copy", 4, 20.0))]
    kernels, kinds = attribution.kernel_entries(SimpleNamespace(kernel_table=lambda: rows))
    assert [e["share"] for e in kernels] == [0.3, 0.5, 0.2]
    assert kinds == dict(copy=dict(calls=6, self_us=50.0, share=0.5),
                         fill=dict(calls=1, self_us=50.0, share=0.5))
    nothing = SimpleNamespace(kernel_table=lambda: [dict(rows[0], self_us=0.0)])
    assert attribution.kernel_entries(nothing)[0][0]["share"] == 0


def test_short_kernels_are_those_below_five_microseconds():
    assert attribution.short_kernels([1.0, 4.0, 5.0, 30.0]) == dict(
        limit_us=5.0, count_share=0.5, time_share=0.125)
    assert attribution.short_kernels([]) == dict(limit_us=5.0, count_share=1.0, time_share=1.0)


def test_times_of_steps_in_milliseconds():
    untraced = np.array([[0.001, 0.002, 0.003, 0.004]] * 5) * np.array([[1], [2], [3], [4], [10]])
    trace = SimpleNamespace(gpu_busy=lambda: 2500.0, step_us=lambda: 50_000.0)
    assert attribution.step_times(untraced, trace) == dict(
        untraced_ms=pytest.approx(30), p20_ms=pytest.approx(18), p80_ms=pytest.approx(52), traced_ms=50.0,
        gpu_busy_ms=2.5, phases_ms=dict(data=pytest.approx(3), forward=pytest.approx(6),
                                        backward=pytest.approx(9), optimizer=pytest.approx(12)))
    trace.gpu_busy = lambda: None
    assert attribution.step_times(untraced, trace)["gpu_busy_ms"] is None


def times(**shares):
    """SublayerTime of each name_direction with this share."""
    return [SublayerTime(*name.split("__"), 1, 1e3 * share, 0.0, 0.0, share, 1, None, None)
            for name, share in shares.items()]


def test_coverage_adds_up():
    entries = times(up__forward=0.5, down__backward=0.125, rest__forward=0.25)
    entries += [replace(entries[2], direction="outside steps", share=0.0625),
                replace(entries[2], direction="launch not recorded", share=0.0625)]
    assert attribution.coverage(entries) == dict(sublayers=0.625, rest=0.25, unattributed=0.125)


@pytest.mark.parametrize("steps, untraced", [(4, slice(3, None)), (3, slice(None)), (2, slice(None))])
def test_the_analysis_of_a_run_is_of_steps_after_the_profiler_s(steps, untraced, tmp_path, monkeypatch):
    """Two steps were traced, after one to warm the profiler up; what is there already is set aside."""
    asked, times = [], np.arange(4.0 * steps).reshape(steps, 4)

    def analysis_of(*arguments):
        asked.append(arguments)
        return SimpleNamespace(as_dict=lambda: dict(x=float("nan"))), None

    monkeypatch.setattr(attribution, "analysis_of", analysis_of)
    profiling = SimpleNamespace(traced_steps=2, trace=str(tmp_path / "t.json"))
    found = Findings({}, 1, peak=3 * MB)
    alone = SimpleNamespace(device=CPU, world=ALONE)
    path = attribution.write_analysis(alone, "source", found, times, profiling)
    (_, source, _, used, trace, number), = asked
    assert used.tolist() == times[untraced].tolist() and (source, trace, number) == (
        "source", profiling.trace, min(2, steps))
    assert found.peak_memory_mb == 3.0
    assert json.loads(open(path).read()) == dict(x=None)
    profiling.traced_steps = 9
    attribution.write_analysis(alone, "source", found, times, profiling)
    assert asked[1][5] == steps


@pytest.mark.parametrize("compiled", [False, True])
def test_the_analysis_of_a_trace_of_a_cpu(compiled, tmp_path, monkeypatch):
    """Two steps of 100 µs forward; what is known of them elsewhere comes from there."""
    events = [dict(ph="X", cat=category, name=name, tid=1, ts=t + start, dur=length, args={})
              for t in (0.0, 1000.0) for category, name, start, length in (
                  ("user_annotation", "forward", 0.0, 100.0), ("user_annotation", "up", 10.0, 40.0),
                  ("cpu_op", "aten::mm", 20.0, 12.0), ("cpu_op", "aten::add", 60.0, 4.0))]
    path, asked = tmp_path / "t.json", []
    path.write_text(json.dumps(dict(traceEvents=events)))

    def samples(trainer, batch, data_s, steps):
        asked.append((batch, data_s, steps))
        return [{("up", "forward"): up, (REST, "forward"): 1e-3} for up in (1e-3, 3e-3, 9e-3)]

    monkeypatch.setattr(attribution, "seconds_by_sublayer", samples)
    monkeypatch.setattr(attribution, "operations_in_a_step", lambda *_: {("up", "forward"): 1})
    monkeypatch.setattr(attribution, "system_info", str)
    given = settings(enable_torch_compile=compiled)
    trainer = SimpleNamespace(program=SECOND, settings=given, device=CPU, world=ALONE)
    found = Findings(dict(up=3 * MB, rest=MB), 7, launches=5, peak_memory_mb=2.0)
    untraced = np.array([[1.0, 0.0, 0.0, 0.0], [2.0, 0.0, 0.0, 0.0], [9.0, 0.0, 0.0, 0.0]])
    result, trace = attribution.analysis_of(trainer, SECOND.data(given), found, untraced, str(path), 2)
    (batch, data_s, steps), = asked
    assert torch.equal(batch["x"], SECOND.data(given).batch(0)["x"]) and (data_s, steps) == (2.0, 2)
    assert result.launch is None and result.launches_per_step == 5 and trace.steps == 2
    assert (result.unit, result.time_kind) == ("operation", "CPU time, without the profiler")
    assert (result.profile_steps, result.trace, result.flops_per_step) == (2, "t.json", 7)
    assert result.saved_activation_mb == dict(up=3.0, rest=1.0) and result.memory_peak_mb == 2.0
    up, rest = result.sublayers
    assert (up.total_us, up.share, up.launches) == (pytest.approx(3000.0), 0.75, None if compiled else 1)
    assert result.total_us == pytest.approx(4000.0) and result.system_info == "cpu"
    assert [sample["up", "forward"] for sample in result.samples] == [0.5, 0.75, 0.9]
    assert [(e["name"], e["share"]) for e in result.kernels] == [("aten::mm", 0.75), ("aten::add", 0.25)]
    assert result.coverage == dict(sublayers=0.75, rest=0.25, unattributed=0)
    assert result.flops_share == dict(up=0.5, down=0.5) and result.twins == []


# Sentences


def made_up(sublayers=(), unit="operation", samples=(), **values):
    """An Analysis of a step of 10 ms."""
    usual = dict(
        timestamp="then", profile_steps=3, system_info={}, trace="t.json", time_kind="time", unit=unit,
        step=dict(untraced_ms=10.0, traced_ms=25.5, phases_ms=dict(data=0.5, forward=1.0, backward=7.5,
                                                                    optimizer=1.0)),
        total_us=9500.0, sublayers=list(sublayers), launches_per_step=1, coverage={}, kinds={},
        kernels=[dict(name="k" * 81, kind="copy", share=0.75, calls=4, self_us=50.0, total_us=50.0,
                      launches=None, allocated_bytes=None)],
        short_kernels=dict(limit_us=5.0, count_share=0.95, time_share=0.85), saved_activation_mb={},
        flops_per_step=1, flops_share=dict(up=0.75, down=0.25), memory_peak_mb=None,
        launch=launch_arithmetic(1, 0.010, busy_s=0.009), samples=[
            {(name, "forward"): share for name, share in sample.items()} for sample in samples])
    return analysis.Analysis(program=SECOND, settings=settings(), **{**usual, **values})


def test_times_are_of_both_directions_without_the_rest():
    found = made_up(times(up__forward=0.25, up__backward=0.5, down__forward=0.125, rest__forward=0.125))
    assert found.times() == dict(up=0.75, down=0.125)
    amounts = {("up", "forward"): 1.0, (REST, "data"): 2.0, ("up", RECOMPUTE): 4.0}
    assert analysis.totals(amounts) == dict(up=5.0)


def test_four_steps_of_five_are_agreement():
    shares = dict(up__forward=0.75, down__forward=0.7)
    samples = [dict(up=0.76, down=0.25)] * 4 + [dict(up=0.71, down=0.75)]
    agreed = made_up(times(**shares), samples=samples)
    assert analysis.winners(agreed, lambda _, share: share) == [("up", 4)]
    samples[0] = samples[4]
    three = [dict(a=1.0)] * 5 + [dict(b=1.0)] * 4 + [dict(c=1.0)]
    assert analysis.winners(made_up(samples=three), lambda _, share: share) == [("a", 5), ("b", 4)]
    torn = made_up(times(**shares), samples=samples, flops_share=dict(up=0.75, down=1.0))
    assert analysis.winners(torn, lambda _, share: share) == [("up", 3), ("down", 2)]
    assert analysis.winners(made_up(times(**shares)), lambda _, share: -share) == [("down", 1)]
    assert analysis.heaviest(agreed, None) == [
        "`up` takes most time of the 2 sub-layers: 75% (p20 to p80 of the steps 75 to 76%) of the step, with "
        "75% of their FLOPs."]
    assert analysis.heaviest(torn, None) == [
        "`up` and `down` take most time of the 2 sub-layers, now one, now the other: 75% and 70% of the "
        "step, with 75% and 100% of their FLOPs."]
    assert analysis.heaviest(agreed, "noise") == analysis.heaviest(made_up(), None) == []
    undecided = made_up(times(a__forward=0.5), samples=[*three[:2], *three[8:]])
    assert analysis.heaviest(undecided, None) == [
        "Which sub-layer takes most time is undecided: in 4 steps it was `a` 2x, `b` 1x, `c` 1x."]


def test_equal_work_is_noise_above_twice_the_time():
    def noise(shares, *twins):
        return analysis.noise_of_twins(made_up(times(**shares), twins=list(twins)))
    shares = dict(a__forward=0.5, b__forward=0.25, c__forward=0.2, d__forward=0.0)
    assert noise(shares, ("a", "b"), ("c", "b"), ("d", "a"), ("x", "a")) is None
    text = noise(shares, ("a", "b"), ("c", "a"))
    assert text.startswith("`a` took 2.5 times as long as `c`, which does equal work")


def test_the_least_efficient_has_less_work_than_time():
    """Its gap is its weight; the heaviest is named already."""
    both = dict(up__forward=0.9, down__forward=0.85)
    found = made_up(times(**both), flops_share=dict(up=1.0, down=0.75))
    (weight, text), = analysis.least_efficient(found, None)
    assert weight == pytest.approx(0.1) and text == (
        "`down` is the least efficient: 85% of the time for 75% of the sub-layers' FLOPs: it moves data or "
        "waits.")
    for shares, noise in ((both, "noise"), (dict(up__forward=0.1, down__forward=0.35), None),
                          (dict(up__forward=0.7, down__forward=0.25), None)):
        assert list(analysis.least_efficient(made_up(times(**shares)), noise)) == []
    torn = made_up(times(**both), samples=[dict(up=0.9, down=0.85), dict(up=0.9, down=0.1)])
    assert list(analysis.least_efficient(torn, None)) == []


def test_what_else_may_matter_and_how_much():
    some = times(up__forward=0.5)
    saved = made_up(some, saved_activation_mb=dict(up=3.0, rest=1.0))
    assert list(analysis.most_saved(saved)) == [(0.375, (
        "`up` keeps 3.0 MB for backward, 75% of all saved activations (4.0 MB)."))]
    assert list(analysis.most_saved(replace(saved, sublayers=[]))) == []
    assert list(analysis.most_saved(made_up(some))) == []
    bound = made_up(launch=launch_arithmetic(9, 0.010, busy_s=0.004))
    (weight, text), = analysis.launching(bound)
    assert weight == pytest.approx(0.6) and text == f"The step is {bound.launch.text}."
    (weight, _), = analysis.launching(made_up(launch=launch_arithmetic(9, 0.010, busy_s=0.008)))
    assert weight == pytest.approx(0.2)
    assert list(analysis.launching(made_up())) == list(analysis.launching(made_up(launch=None))) == []


def test_kinds_beside_matrix_products():
    kinds = {"matrix product": dict(share=0.7, calls=9), "view": dict(share=0.9, calls=9),
             "other": dict(share=0.9, calls=9), "copy": dict(share=0.125, calls=3),
             "softmax": dict(share=0.75, calls=7)}
    assert list(analysis.heaviest_kind(made_up(kinds=kinds))) == [(0.75, (
        "Beside matrix products (70%), the kind that takes most is softmax: 75% of the operations' own time "
        "in 7 calls."))]
    del kinds["matrix product"]
    assert "products (0%)" in next(analysis.heaviest_kind(made_up(kinds=kinds)))[1]
    assert list(analysis.heaviest_kind(made_up(kinds=dict(view=kinds["view"])))) == []


def test_phases_short_kernels_and_the_longest():
    assert list(analysis.slowest_phase(made_up())) == [
        (1e-3, "The backward phase takes most of the step: 75%, 7.50 ms.")]
    graph = replace(made_up(unit="kernel"), settings=settings(enable_cuda_graphs=True))
    assert list(analysis.slowest_phase(graph)) == [] != list(analysis.slowest_phase(replace(graph, unit="x")))
    assert list(analysis.short_ones(made_up(unit="kernel"))) == [(0.85, (
        "95% of the kernels are shorter than 5.0 µs; together they take 85% of the time."))]
    assert list(analysis.short_ones(made_up())) == []
    assert list(analysis.longest(made_up())) == [(0.75, (
        f"The longest operation is `{'k' * 77}...`: 75% of all operations' own time in 4 calls of 12.5 µs."))]


def test_the_heaviest_findings_come_first():
    found = made_up(times(up__forward=0.5, down__forward=0.1), saved_activation_mb=dict(up=3.0, rest=1.0))
    first, second, third = found.findings()
    assert first.startswith("`up` takes most time") and second.startswith("The longest operation")
    assert third.startswith("`up` keeps 3.0 MB")
    noisy = replace(found, twins=[("up", "down")])
    assert noisy.findings()[0].startswith("`up` took 5.0 times as long as `down`")
    assert len(noisy.findings()) == 3
    written = found.as_dict()
    assert written["findings"] == found.findings() and written["sublayers"][0]["name"] == "up"
    assert written["mode"] == "pytorch_profiler" and written["config"] == dict(width=8, depth=2)
    assert not {"program", "settings", "samples", "twins", "ceilings", "roofline"} & written.keys()
    assert replace(found, ceilings=dict(a=1)).as_dict()["ceilings"] == dict(a=1)


# The report


def test_rows_of_sublayers_are_in_milliseconds_and_megabytes():
    samples = [dict(up=0.25), dict(up=0.375), dict(up=0.5)]
    e = SublayerTime("up", "forward", 2.0, 1250.0, 500.0, 2000.0, 0.125, 7.0, 1.5, 2.25)
    assert report.sublayer_rows(made_up([e], samples=samples))[1] == [
        "up", "forward", "2", "1.250", "12.5% (12.5, 45.0)", "0.500", "2.000", "7", "1.5", "2.2"]
    assert report.sublayer_rows(made_up([e], samples=samples[:2]))[1][4] == "12.5% (12.5, 35.0)"
    assert report.sublayer_rows(made_up([e], samples=samples[:1]))[1][4] == "12.5%"
    head = report.sublayer_rows(made_up([e], samples=samples))[0]
    assert len(head) == 10 and head[:3] == ["sub-layer", "direction", "calls"]


def test_rows_of_kernels_are_the_first_twenty():
    rows = [dict(name=f"k{i}", kind="copy", calls=2.0, self_us=1250.0, total_us=2500.0, share=0.125,
                 launches=3.0, allocated_bytes=MB * 1.5) for i in range(25)]
    found = report.kernel_rows(made_up(kernels=rows))
    assert len(found) == 21 and found[20][0] == "`k19`"
    assert found[1] == ["`k0`", "copy", "2", "1.250", "2.500", "12.5%", "3", "1.5"]
    long = report.kernel_rows(made_up(kernels=[dict(rows[0], name="x" * 91), dict(rows[0], name="a`|``b`")]))
    assert [row[0] for row in long[1:]] == [f"`{'x' * 87}...`", "``` a`|``b` ```"]


def test_what_was_run_in_words():
    info = dict(gpu_name=None, host_cpu="CPU", torch_version="2", git_commit="0123456789abcdef")
    assert report.run_lines(made_up(system_info=info)) == [
        "`CPU`, torch 2, then, commit 0123456789ab.",
        "second_program.py: B 3, W 8; depth 2; on: fused_relu.",
        "3 steps traced after warm-up: 25.50 ms each under the profiler, 10.00 ms without it (median). "
        "Shares are of time, 9.50 ms per step. Launches of a step: 1."]
    cover = dict(sublayers=0.625, rest=0.25, unattributed=0.125)
    lines = report.sublayer_lines(made_up(coverage=cover), lambda name: [name])
    assert "The 2 sub-layers, forward and backward, hold 62.5% of the time; 25.0% is outside them" in lines[2]
    assert lines[2].endswith("12.50% in none.") and report.COMPILED not in lines
    compiled = made_up(coverage=dict(cover, sublayers=0))
    assert report.COMPILED in report.sublayer_lines(compiled, lambda name: [])


def test_the_report_counts_its_findings_and_adds_up():
    info = dict(gpu_name="G", host_cpu="CPU", torch_version="2", git_commit=None)
    kernels = [dict(name="k", kind="copy", calls=2.0, self_us=us, total_us=3 * us, share=0.5, launches=None,
                    allocated_bytes=None) for us in (1500.0, 500.0)]
    found = made_up(kernels=kernels, system_info=info, saved_activation_mb=dict(up=1.25, rest=1.25),
                    coverage=dict(sublayers=0.0, rest=1.0, unattributed=0.0))
    lines = report.report_lines(found)
    assert lines[lines.index("## Findings") + 2].startswith("1. ")
    assert any("own times under the profiler, 2.00 ms per step" in line for line in lines)
    assert "Peak of a step: not measured. Saved for backward: 2.5 MB." in lines
    assert "![" not in "".join(lines) and "commit unknown." in lines[2]
    lines = report.report_lines(replace(found, memory_peak_mb=3.5), [report.SUBLAYERS])
    assert "Peak of a step: 3.5 MB. Saved for backward: 2.5 MB." in lines
    assert f"![time by sublayer]({report.SUBLAYERS})" in lines
    assert [line for line in lines if line.startswith("## ")] == [
        "## Findings", "## Launch-bound?", "## Time and memory by sub-layer", "## Top 20 operations",
        "## Memory"]
    assert lines[lines.index("## Launch-bound?") + 2] == found.launch.text + "."
    assert "## Launch-bound?" not in report.report_lines(replace(found, launch=None))


def test_sections_that_were_asked_for():
    info = dict(gpu_name="G", host_cpu="CPU", torch_version="2", git_commit=None)
    speeds = dict(copy_bytes_per_s=1e9, matmul_flops_per_s=dict(float32=1.0), dispatch_s=1.0, dtype="float32")
    row = dict(name="up", flops=1e9, minimal_bytes=None, flops_per_byte=None, compute_s=1.0, memory_s=None,
               launch_s=0.0, measured_s=2.0, bound="compute", share=0.5)
    found = made_up(system_info=info, coverage=dict(sublayers=0.0, rest=1.0, unattributed=0.0))
    plain = report.report_lines(found)
    whole = report.report_lines(replace(
        found, ceilings=speeds, roofline=[row],
        compared_with=report.compare_sessions(session(4.0), session(1.0), "earlier")))
    assert whole[:len(plain)] == plain
    assert [line for line in whole[len(plain):] if line.startswith(("##", "| up |"))] == [
        "## Roofline",
        "| up | 1.00 |  |  | 1000.000 |  | 0.000 | 2000.000 | compute | 50.0% |", "## Against earlier"]


def test_a_report_and_its_analysis_are_written(tmp_path, monkeypatch):
    info = dict(gpu_name="G", host_cpu="CPU", torch_version="2", git_commit=None)
    found = made_up(system_info=info, coverage=dict(sublayers=0.0, rest=1.0, unattributed=0.0))
    monkeypatch.setattr(report, "write_plots", lambda *_: ["time_by_sublayer.png"])
    assert report.write_report(str(tmp_path), found, None) == ["time_by_sublayer.png"]
    text = (tmp_path / report.REPORT).read_text()
    assert text == "\n".join(report.report_lines(found, ["time_by_sublayer.png"])) + "\n"
    assert json.loads((tmp_path / report.ANALYSIS).read_text()) == json.loads(json.dumps(found.as_dict()))


def test_sessions_are_matched_by_name_and_the_longest_comes_first():
    before = [dict(name="a", us=10.0), dict(name="gone", us=40.0), dict(name="zero", us=0.0)]
    after = [dict(name="zero", us=0.5), dict(name="a", us=25.0), dict(name="new", us=30.0)]
    rows = report.matched(before, after, lambda e: e["name"], "us")
    assert [tuple(row.values()) for row in rows] == [
        ("gone", 40.0, None, None), ("new", None, 30.0, None), ("a", 10.0, 25.0, 2.5),
        ("zero", 0.0, 0.5, None)]
    short = report.matched([dict(name="b", us=0.25)], [dict(name="c", us=0.5)], lambda e: e["name"], "us")
    assert [row["name"] for row in short] == ["c", "b"]
    assert report.comparison_rows(rows[:3], "t") == [
        ["t", "before ms", "after ms", "ratio"], ["`gone`", "0.040", "", "gone"],
        ["`new`", "", "0.030", "new"], ["`a`", "0.010", "0.025", "2.50"]]


def session(us, **values):
    """An analysis as JSON has it."""
    usual = dict(
        mode="pytorch_profiler", config=dict(width=8), fusion_config=dict(relu=True), training_params={},
        system_info=dict(gpu_name=None, host_cpu="C", torch_version="2"), time_kind="time",
        step=dict(untraced_ms=us), sublayers=[dict(name="up", direction="forward", total_us=us)],
        kernels=[dict(name=f"k{i}", self_us=us * (100 - i)) for i in range(45)])
    return {**usual, **values}


def test_two_sessions_in_words():
    found = report.compare_sessions(session(4.0), session(1.0), "earlier")
    assert (found["step_ms"], found["sublayers"][0]["name"], found["differences"]) == (
        [4.0, 1.0], "up.forward", [])
    lines = report.comparison_lines(found)
    assert lines[2] == ("Step without profiler: 4.00 -> 1.00 ms, ratio 0.25, of two sessions, one after the "
                        "other. Different: nothing in the settings.")
    assert sum(line.startswith("| `k") for line in lines) == 40 and "different clocks" not in str(lines)
    other = session(1.0, fusion_config=dict(relu=False), time_kind="GPU time",
                    system_info=dict(gpu_name="G", host_cpu="C", torch_version="3"))
    found = report.compare_sessions(session(4.0), other, "earlier")
    assert found["differences"] == ["relu True -> False", "gpu_name None -> G", "torch_version 2 -> 3"]
    assert any("different clocks: time and GPU time" in line for line in report.comparison_lines(found))
    rows = [dict(median_batch_time=0.005), dict(  # compiled, so beside a baseline of its own process
        measured=True, baseline_batch_time=0.004, median_batch_time=0.002, speedup=2.0, speedup_p20=1.75,
        speedup_p80=2.25)]
    assert report.comparison_lines(dict(found, interleaved=rows))[4] == (
        "Interleaved steps of both: 4.00 -> 2.00 ms, 2.00x (p20 1.75, p80 2.25).")
    assert "not measured: x" in report.interleaved_line(rows[0], dict(measured=False, reason="x"))


def test_only_sessions_are_read(tmp_path):
    (tmp_path / report.ANALYSIS).write_text(json.dumps(session(1.0)))
    assert report.read_analysis(str(tmp_path)) == session(1.0)
    few = [dict(name="k", self_us=0.0), dict(name="l", self_us=999e12)]  # 0, or 1e-15 to 1e15
    (tmp_path / report.ANALYSIS).write_text(json.dumps(session(1.0, kernels=few)))
    assert report.read_analysis(str(tmp_path))["kernels"] == few
    for broken in (dict(mode="ablation"), dict(sublayers=[1]), dict(sublayers=None), dict(config=[1]),
                   dict(system_info="A100"), dict(step={}), dict(kernels=[dict(name="k")]),
                   *(dict(step=dict(untraced_ms=ms)) for ms in (0.0, -1.0, True)),
                   *(dict(kernels=[*few, dict(name="m", self_us=us)])
                     for us in (-1.0, 1e-16, 1e15, 1e999, True, "1"))):
        (tmp_path / report.ANALYSIS).write_text(json.dumps(session(1.0, **broken)))
        with pytest.raises(UserError, match="not the analysis"):
            report.read_analysis(str(tmp_path))
    with pytest.raises(UserError, match="No such file"):
        report.read_analysis(tmp_path / "absent")
