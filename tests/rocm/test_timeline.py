"""Time by range from databases: who launched what, and what was captured in a HIP graph."""
import pytest

from fusion_lab.rocm import timeline
from fusion_lab.rocm.kernel_summary import summarize
from tests.rocm.fake_rocm.common import Rocpd


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
