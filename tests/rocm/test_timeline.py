"""Time by range from databases: who launched what, and what was captured in a HIP graph."""
import pytest

from fusion_lab.rocm import kernel_summary, timeline
from fusion_lab.rocm.kernel_summary import summarize
from tests.rocm.fake_rocm import common
from tests.rocm.fake_rocm.common import Rocpd
from tests.rocm.fake_rocm.machine import csv


def ranges_of(directory):
    return timeline.time_by_range(timeline.read_traces(directory))


def test_ranges_of_a_database_are_those_of_the_calls(tmp_path):
    """Kernel 1 was launched by call 11 in `up`, 2 by call 12 on another thread in no range, 3 by nobody."""
    database = Rocpd(tmp_path / "7_results.db")
    symbol = database.add("rocpd_info_kernel_symbol", display_name="k")
    database.marker('say "up"', 1, 0, 100)
    database.region("MARKER_CORE_RANGE_API", "roctxMarkA", 1, 5, 5)
    database.region("HIP_RUNTIME_API_EXT", "hipLaunchKernel", 1, 50, 52, 11)
    database.region("HIP_RUNTIME_API", "hipLaunchKernel", 2, 50, 52, 12)
    database.region("HSA_CORE_API", "hsa_signal_store", 1, 60, 61, 13)
    for number, start, end in ((11, 500, 510), (12, 600, 603), (13, 700, 704)):
        database.kernel(symbol, start, end, number)
    database.close()
    assert ranges_of(tmp_path) == {'say "up"': (1, 10.0), timeline.OUTSIDE: (2, 7.0)}
    row, rest = summarize(tmp_path)["by_range"]
    assert (row["range"], row["time_ms"], rest["launches"]) == ('say "up"', 10e-6, 2)


def captured(path, copies=1, graphs=True):
    """A step of two kernels and a copy, captured as a graph in the ranges a, b and a; replayed twice."""
    database = Rocpd(path, graphs)
    symbol = database.add("rocpd_info_kernel_symbol", display_name="k")
    for name, start, end in (("a", 0, 20), ("b", 20, 30), ("a", 30, 50)):
        database.marker(name, 1, start, end)
    calls = [("hipStreamBeginCapture", 1), ("hipLaunchKernel", 5), ("hipGetDevice", 6),
             ("hipExtModuleLaunchKernel", 25), ("hipMemcpyAsync", 35), ("hipStreamEndCapture", 45)]
    for number, (function, start) in enumerate(calls, 1):
        database.region("HIP_RUNTIME_API_EXT", function, 1, start, start + 1, number)
    database.marker("forward", 1, 90, 200)
    for number, start in ((20, 100), (21, 150)):
        database.region("HIP_RUNTIME_API_EXT", "hipGraphLaunch", 1, start, start + 1, number)
        for node, length in ((0, 10), (1, 3)):
            node = dict(graph_exec_id=1, graph_node_id=node) if graphs else {}
            database.kernel(symbol, start, start + length, number, **node)
        for _ in range(copies):
            database.add("rocpd_memory_copy", start=start, end=start + 1, dst_agent_id=4, graph_exec_id=1,
                         graph_node_id=2, event_id=database.event("MEMORY_COPY", number))
    database.kernel(symbol, 190, 191, 22)
    database.close()


def test_kernels_of_a_graph_belong_to_the_ranges_of_its_capture(tmp_path):
    captured(tmp_path / "7_results.db")
    assert ranges_of(tmp_path) == {"a": (2, 20.0), "b": (2, 6.0), timeline.OUTSIDE: (1, 1.0)}
    top, = summarize(tmp_path)["top_kernels"]
    assert (top["name"], top["calls"]) == ("k", 5)  # by name, each one that ran


@pytest.mark.parametrize("how", [dict(copies=0), dict(graphs=False, copies=0)], ids=["fewer nodes", "9.9"])
def test_a_graph_that_does_not_fit_its_capture_is_one_range(how, tmp_path):
    """Nodes that are not the calls of the capture are not guessed at; nor does the replay's range count."""
    captured(tmp_path / "7_results.db", **how)
    assert ranges_of(tmp_path) == {timeline.REPLAYED: (4, 26.0), timeline.OUTSIDE: (1, 1.0)}


def test_busy_time_within_and_between_kernels(tmp_path):
    """Sorted by start: 0-100 holds 20-30; 100-150 follows at once; 200-210 after a gap. 160 of 210 ns."""
    csv(tmp_path / "7_kernel_trace.csv", "Kernel_Name,Start_Timestamp,End_Timestamp", ("a", 200, 210),
        ("b", 20, 30), ("a", 100, 150), ("a", 0, 100))
    assert timeline.busy_percent(timeline.read_traces(tmp_path)) == pytest.approx(100 * 160 / 210)
    csv(tmp_path / "7_kernel_trace.csv", "Kernel_Name,Start_Timestamp,End_Timestamp", ("a", 0, 100),
        ("b", 20, 30), ("a", 50, 120), ("b", 130, 160))  # on two queues: 0-120 and 130-160
    assert timeline.busy_percent(timeline.read_traces(tmp_path)) == pytest.approx(100 * 150 / 160)
    assert timeline.busy_percent(timeline.read_traces(tmp_path / "none")) is None
    csv(tmp_path / "7_kernel_trace.csv", "Kernel_Name,Start_Timestamp,End_Timestamp", ("a", 5, 5))
    assert timeline.busy_percent(timeline.read_traces(tmp_path)) is None


def test_kernels_belong_to_ranges_of_their_own_process(tmp_path):
    """Two processes use the same numbers; a mark has no length; a launch that was not traced is outside."""
    for pid, name in ((7, "up"), (8, "down")):
        csv(tmp_path / f"{pid}_marker_api_trace.csv", "Function,Thread_Id,Start_Timestamp,End_Timestamp",
            (name, 1, 0, 100), ("mark", 1, 50, 50))
        csv(tmp_path / f"{pid}_hip_api_trace.csv", "Function,Thread_Id,Correlation_Id,Start_Timestamp",
            ("launch", 1, 1, 60), ("launch", 2, 2, 60), ("launch", 1, 3, 100))
        csv(tmp_path / f"{pid}_kernel_trace.csv", "Correlation_Id,Start_Timestamp,End_Timestamp",
            (1, 500, 510), (2, 600, 603), (3, 700, 704), (9, 800, 801))
    (tmp_path / "9_marker_api_trace.csv").write_text("of a process without calls")
    csv(tmp_path / "9_kernel_trace.csv", "Start_Timestamp,End_Timestamp", (0, 1))
    assert timeline.time_by_range(timeline.read_traces(tmp_path)) == {
        "up": (1, 10.0), "down": (1, 10.0), timeline.OUTSIDE: (6, 16.0)}


@pytest.mark.parametrize("spans, moments, names", [
    ([(0, 100, "a"), (10, 20, "b")], [5, 15, 25, 100], ["a", "b", "a", "outside all ranges"]),
    ([(0, 10, "a"), (10, 20, "b")], [0, 9, 10, 19], ["a", "a", "b", "b"]),
    ([(0, 10, "a"), (0, 5, "b")], [0, 7], ["b", "a"]),
    ([], [3], ["outside all ranges"]),
])
def test_innermost_range(spans, moments, names):
    assert list(timeline.ranges_at(spans, [(time, time) for time in moments]).values()) == names


def test_share_of_time_in_which_the_gpu_was_busy(tmp_path):
    """Overlapping kernels of one GPU count once, gaps count against it, each GPU has its own clock."""
    (tmp_path / "7_kernel_trace.csv").write_text(
        "Agent_Id,Kernel_Name,Start_Timestamp,End_Timestamp\n"
        "4,a,100,200\n4,b,150,180\n4,c,300,400\n5,a,1000,1050\n5,a,1075,1100\n")
    summary = summarize(tmp_path)
    assert summary["gpu_busy_percent"] == pytest.approx(100 * (200 + 75) / (300 + 100))
    assert "GPU busy                 68.8 %" in kernel_summary.render(summary)
    common.write_counters(tmp_path / "7_counter_collection.csv", ["SQ_WAVES"])  # which keeps kernels apart
    assert summarize(tmp_path)["gpu_busy_percent"] is None
