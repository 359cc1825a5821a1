"""Traces made by hand, of a CPU and of a GPU, to sums by sub-layer, by kernel and over time."""
import pytest

from fusion_lab.measuring.ranges import RECOMPUTE, REST, place_of
from fusion_lab.measuring.trace import OUTSIDE, Ranges, TraceAnalysis, with_own_times

SUBLAYERS = ("mix", "up")


class Events(list):
    """Events of a trace; what add() returns may be changed."""

    def add(self, category, name, thread, start, length, **arguments):
        self.append(dict(ph="X", cat=category, name=name, tid=thread, ts=start, dur=length, args=arguments))
        return self[-1]

    def memory(self, thread, start, size, device=0):
        self.append(dict(ph="i", name="[memory]", tid=thread, ts=start,
                         args={"Bytes": size, "Device Type": device}))


def cpu_trace():
    """Two steps on thread 1, 1000 µs apart, 100 forward and 80 backward; an optimizer step of 20 and 6 of
    data in the first. Autograd's thread is 2. One operation comes after both. The events stand in no order.
    """
    events = Events()
    for t in (1000.0, 0.0):
        events.add("user_annotation", "backward", 1, t + 100, 80.0)
        events.add("user_annotation", "forward", 1, t, 100.0)
        events.add("user_annotation", "up", 1, t + 15, 10.0)  # within mix
        events.add("user_annotation", "mix", 1, t + 10, 40.0)
        events.add("user_annotation", "mix.backward", 2, t + 110, 30.0)
        events.add("user_annotation", "not a sub-layer", 1, t + 60, 5.0)
        events.add("cpu_op", "aten::mm", 1, t + 16, 6.0)  # within aten::linear, in up
        events.add("cpu_op", "aten::linear", 1, t + 15, 8.0)
        events.add("cpu_op", "aten::mm", 1, t + 30, 5.0)  # in mix
        events.add("cpu_op", "aten::mm", 2, t + 112, 7.0)  # in mix.backward
        events.add("cpu_op", "aten::add_", 1, t + 70, 3.0)  # forward, in no sub-layer
        events.memory(1, t + 17, 512)  # within aten::mm
        events.memory(1, t + 22, 256)  # at the end of that one and within aten::linear
        events.memory(1, t + 23, 128)  # at the end of aten::linear
        events.memory(1, t + 30, 64)  # at the beginning of the second aten::mm
        events.memory(1, t + 40, -192)  # given back
        events.memory(1, t + 16, 1024, device=1)  # of a GPU, where nothing of this runs
        events.memory(1, t + 71, 0)
        events.add("cpu_op", "aten::detach", 1, t + 90, 0.0)  # no time, and allocates nevertheless
        events.memory(1, t + 90, 32)
    events.add("user_annotation", "optimizer", 1, 180.0, 20.0)
    events.add("user_annotation", "data", 1, -10.0, 6.0)
    events.memory(1, 17.0, 1)  # at the same time as another one
    events.memory(3, 50.0, 2)  # on a thread without operations
    events.add("cpu_op", "aten::item", 1, 1500.0, 5.0)
    events.append(dict(ph="X", cat="cpu_op", name="without an end", tid=1, ts=3.0))
    events.append(dict(ph="B", cat="cpu_op", name="half", tid=1, ts=3.0, dur=9.0))
    return events


def test_sums_of_a_cpu_trace():
    trace = TraceAnalysis(cpu_trace(), SUBLAYERS)
    assert trace.steps == 2 and not trace.on_gpu and trace.gpu_busy() is None
    table = trace.sublayer_table()
    assert {key: (entry["calls"], entry["allocated_mb"] * 2 ** 20) for key, entry in table.items()} == {
        ("mix", "forward"): (1, 64.0), ("up", "forward"): (1, 896.5), ("mix", "backward"): (1, 0.0),
        (REST, "forward"): (1, 33.0), (REST, "backward"): (1, 0.0), (REST, "optimizer"): (0.5, 0.0),
        (REST, "data"): (0.5, 0.0)}
    assert all(entry["device_us"] is entry["launches"] is None for entry in table.values())
    assert list(table) == sorted(table) and trace.step_us() == 193.0


def test_operations_of_a_cpu_trace():
    trace = TraceAnalysis(cpu_trace(), SUBLAYERS)
    table = {entry["name"]: entry for entry in trace.kernel_table()}
    assert list(table) == ["aten::mm", "aten::add_", "aten::item", "aten::linear", "aten::detach"]
    product, linear = table["aten::mm"], table["aten::linear"]
    assert product == dict(name="aten::mm", kind=None, calls=3.0, self_us=18.0, launches=None, share=36 / 51)
    assert linear["self_us"] == 2.0 and table["aten::item"]["calls"] == 0.5
    for event in (events := cpu_trace()):
        if event["name"] == "[memory]":
            event["name"] = "else"
    without = TraceAnalysis(events, SUBLAYERS)
    assert {entry["allocated_mb"] for entry in without.sublayer_table().values()} == {None}
    assert without.memory_timeline() == [] and without.phase_begins()[0] == (1100.0, "backward")


def test_memory_over_time_begins_with_the_first_event():
    trace = TraceAnalysis(cpu_trace(), SUBLAYERS)
    assert trace.memory_timeline() == [
        (0.0, 512), (0.0, 513), (5.0, 769), (6.0, 897), (13.0, 961), (23.0, 769), (33.0, 771), (54.0, 771),
        (73.0, 803)] + [(1000.0 + t, 803 + size) for t, size in (
            (0.0, 512), (5.0, 768), (6.0, 896), (13.0, 960), (23.0, 768), (54.0, 768), (73.0, 800))]
    assert trace.phase_begins() == [(1083.0, "backward"), (983.0, "forward"), (83.0, "backward"),
                                    (-17.0, "forward"), (163.0, "optimizer"), (-27.0, "data")]


def gpu_trace():
    """One step; kernels run long after they were launched."""
    events = Events()
    events.add("user_annotation", "forward", 1, 0.0, 100.0)
    events.add("user_annotation", "backward", 1, 100.0, 50.0)
    events.add("user_annotation", "up", 1, 20.0, 30.0)
    events.add("user_annotation", "mix", 2, 110.0, 20.0)  # forward once more, during backward
    events.add("cpu_op", "aten::mm", 1, 22.0, 10.0)
    events.add("cuda_runtime", "cudaLaunchKernel", 1, 25.0, 2.0, correlation=1)
    events.add("cuda_runtime", "cudaLaunchKernel", 1, 31.0, 2.0, correlation=2)
    events.add("hip_runtime", "hipMemcpyAsync", 2, 115.0, 2.0, correlation=3)
    events.add("cuda_driver", "cuLaunchKernel", 1, 140.0, 2.0, correlation=4)
    events.add("cuda_runtime", "cudaDeviceSynchronize", 1, 160.0, 2.0)
    events.add("gpu_memcpy", "Memcpy DtoD", 7, 1230.0, 8.0, correlation=3)
    events.add("kernel", "nvjet_tst", 7, 1000.0, 100.0, correlation=1)
    events.add("kernel", "nvjet_tst", 8, 1050.0, 20.0, correlation=2)  # within the first one's time
    events.add("gpu_memset", "Memset", 7, 1240.0, 3.0, correlation=4)
    events.add("kernel", "lost", 7, 1300.0, 1.0, correlation=77)
    events.memory(1, 26.0, 300, device=1)
    events.memory(1, 27.0, 30, device=0)  # of the CPU, which is not where the work is
    events.memory(1, 28.0, -300, device=1)
    events.memory(1, 2000.0, 0, device=1)
    return events


def test_sums_of_a_gpu_trace():
    trace = TraceAnalysis(gpu_trace(), SUBLAYERS)
    figures = {key: (entry["device_us"], entry["launches"]) for key, entry in trace.sublayer_table().items()}
    assert figures == {(REST, "forward"): (0.0, 0), ("up", "forward"): (120.0, 2),
                       ("mix", RECOMPUTE): (8.0, 0), (REST, "backward"): (3.0, 0),
                       (REST, "launch not recorded"): (1.0, 1), (REST, OUTSIDE): (0.0, 0)}
    assert trace.sublayer_table()["up", "forward"]["allocated_mb"] == 300 / 2 ** 20
    assert trace.gpu_busy() == 100 + 8 + 3 + 1
    assert trace.step_us() == 150.0
    assert trace.memory_timeline() == [(0.0, 300), (2.0, 0), (1974.0, 0)]


def test_kernels_that_the_profiler_did_not_record():
    """Two steps of one replay each; a graph of two kernels, of which the second replay lost one."""
    events = Events()
    for step, kernels in enumerate((2, 1)):
        events.add("user_annotation", "forward", 1, 100.0 * step, 100.0)
        events.add("hip_runtime", "hipGraphLaunch", 1, 100.0 * step + 20, 5.0, correlation=step)
        for place in range(kernels):
            events.add("kernel", "k", 7, 100.0 * step + 50 + place, 1.0, correlation=step)
    events.add("kernel", "of an earlier step", 7, 5.0, 1.0, correlation=77)
    differ, = TraceAnalysis(events, SUBLAYERS).unrecorded()
    assert "1 to 2 kernels" in differ
    lost, _ = TraceAnalysis(events, SUBLAYERS).unrecorded(2)
    assert lost.startswith("3 of 4 kernels") and "DEBUG_HIP_GRAPH_SEGMENT_SCHEDULING=0" in lost
    assert TraceAnalysis(gpu_trace(), SUBLAYERS).unrecorded() == []
    blind = [event for event in events if event["cat"] != "kernel"]
    assert "2 launches and no kernel" in TraceAnalysis(blind, SUBLAYERS).unrecorded()[0]
    assert TraceAnalysis([], SUBLAYERS).unrecorded() == [] and TraceAnalysis([], SUBLAYERS).steps == 1


@pytest.mark.parametrize("kernel, start, duration, time, impossible", [
    (1, 1000.0, 1.6e6, 50.0, 1), (2, 1050.0, 1.6e6, 30.0, 1), (2, 1050.0, -5.0, 0.0, 1),
    (2, 1050.0, float("nan"), 0.0, 1), (1, 1000.0, 65.0, 65.0, 0),  # one may wait for the end of another
    (3, 1080.0, 30.0, 30.0, 0), (3, 1080.0, 40.5, 40.5, 0)])  # of a graph, side by side; within the jitter
def test_impossible_times_of_kernels_reach_no_sum(kernel, start, duration, time, impossible):
    """Kernels of 20 µs in a stream at 1000, 1050, 1080, 1085 and 1100, of launches 1, 2, 3, 3 and 4; that at
    1080 is recorded twice. Another stream works meanwhile."""
    events = Events()
    for number, at in ((1, 1000.0), (2, 1050.0), *2 * [(3, 1080.0)], (3, 1085.0), (4, 1100.0), (5, 1001.0)):
        events.add("cuda_runtime", "cudaLaunchKernel", 1, 10.0 * number, 2.0, correlation=number)
        changed = (number, at) == (kernel, start)
        events.add("kernel", f"k{at:.0f}", 8 if number == 5 else 7, at, duration if changed else 20.0,
                   correlation=number)
    trace = TraceAnalysis(events, SUBLAYERS)
    table = {row["name"]: (row["launches"], row["self_us"]) for row in trace.kernel_table()}
    others = {f"k{at}": (1, 20.0) for at in (1000, 1001, 1050, 1080, 1085, 1100)}
    assert table == others | {f"k{start:.0f}": (1, time)}
    assert trace.gpu_busy() <= 120.0
    assert len(trace.unrecorded()) == bool(impossible) == trace.impossible


def test_names_of_sublayers_may_have_dots():
    assert place_of("mlp.up") == ("mlp.up", "forward") and place_of("data") == (REST, "data")
    assert place_of("mlp.up.backward") == ("mlp.up", "backward")
    assert place_of(f"mlp.up.{RECOMPUTE}") == ("mlp.up", RECOMPUTE)


def test_ranges_that_begin_and_end_together():
    """The longer one is the outer one, in whatever order they come; one that ends gives way to the next."""
    spans = [dict(tid=1, ts=0.0, dur=4.0, name="inner"), dict(tid=1, ts=0.0, dur=10.0, name="outer"),
             dict(tid=1, ts=10.0, dur=5.0, name="next"), dict(tid=2, ts=3.0, dur=1.0, name="elsewhere")]
    for order in (spans, spans[::-1]):
        found = Ranges(order)
        assert [found.find(1, t) for t in (0, 3.9, 4, 9.9, 10, 14.9, 15)] == [
            "inner", "inner", "outer", "outer", "next", "next", None]
        assert found.find(2, 3) == "elsewhere"
        assert {e["name"]: own for e, own in with_own_times(order)} == dict(
            inner=4.0, outer=6.0, next=5.0, elsewhere=1.0)
