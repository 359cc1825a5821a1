"""How busy the GPU was, which range launched what, and what a graph's replays lost."""
import json

import pytest

from fusion_lab.rocm import timeline
from fusion_lab.rocm.kernel_summary import render, summarize
from tests.rocm.fake_rocm.machine import csv

KERNELS = "Agent_Id,Kernel_Name,Correlation_Id,Start_Timestamp,End_Timestamp"
CALLS = "Function,Thread_Id,Correlation_Id,Start_Timestamp"


@pytest.mark.parametrize("kernels, percent", [
    ([(4, 200, 210), (4, 20, 30), (4, 100, 150), (4, 0, 100)], 100 * 160 / 210),  # gaps count against it
    ([(4, 0, 100), (4, 20, 30), (4, 50, 120), (4, 130, 160)], 100 * 150 / 160),  # what overlaps counts once
    ([(4, 100, 200), (4, 300, 400), (5, 1000, 1050), (5, 1075, 1100)], 100 * 275 / 400),  # of each GPU
    ([(4, 5, 5)], None), ([], None)])
def test_share_of_time_in_which_the_gpu_was_busy(kernels, percent, tmp_path):
    csv(tmp_path / "7_kernel_trace.csv", KERNELS, *((gpu, "k", 1, a, b) for gpu, a, b in kernels))
    found = timeline.busy_percent(timeline.read_traces(tmp_path))
    assert found == (percent and pytest.approx(percent))


def test_kernels_belong_to_the_innermost_ranges_of_their_own_process(tmp_path):
    """Two processes use the same numbers; a mark has no length; of ranges that begin together the shorter is
    inside; a launch that was not traced is outside, and so is one at the end of a range."""
    for pid, name in ((7, "up"), (8, "down")):
        csv(tmp_path / f"{pid}_marker_api_trace.csv", "Function,Thread_Id,Start_Timestamp,End_Timestamp",
            ("in", 1, 0, 20), (name, 1, 0, 100), ("mark", 1, 50, 50))
        csv(tmp_path / f"{pid}_hip_api_trace.csv", CALLS, ("launch", 1, 1, 60), ("launch", 2, 2, 60),
            ("launch", 1, 3, 100), ("hipGraphLaunch", 1, 4, 70), ("launch", 1, 5, 0), ("launch", 1, 6, 20))
        csv(tmp_path / f"{pid}_kernel_trace.csv", KERNELS, *((4, "k", number, 0, time) for number, time in (
            (1, 10), (2, 3), (3, 4), (4, 5), (5, 7), (6, 8), (9, 1))))
    assert timeline.time_by_range(timeline.read_traces(tmp_path)) == {
        "up": (3, 23.0), "down": (3, 23.0), "in": (2, 14.0), timeline.OUTSIDE: (6, 16.0)}


@pytest.mark.parametrize("traced, kernels, nodes, recorded, expected, lost", [
    (True, (3, 1, 2), 3, 6, 9, True), (True, (3, 3, 3), 3, 9, 9, False),
    (True, (3, 3, 3), None, 9, None, True), (False, (3, 1, 2), 3, 8, 9, True),
    (False, (3, 3, 3), 3, 11, 9, False), (False, (3, 1, 2), None, 0, 0, False)])
def test_kernels_that_replays_of_a_graph_lost(traced, kernels, nodes, recorded, expected, lost, tmp_path):
    """Three replays in three steps, two kernels outside; `nodes` is the program's count of a graph's kernels.
    Without HIP calls in the trace the whole run must have as many at least."""
    (tmp_path / "manifest.json").write_text('{"steps": 3, "steps_counted": "3 steps"}')
    csv(tmp_path / "program" / "performance_summary_v2.json",
        json.dumps(dict(performance_summary=dict(graph_kernels=nodes))))
    if traced:
        csv(tmp_path / "7_hip_api_trace.csv", CALLS, *(("hipGraphLaunch", 1, i, i) for i in range(3)))
    csv(tmp_path / "7_kernel_trace.csv", KERNELS, *((4, "k", i, 0, 9) for i, n in enumerate(kernels)
                                                    for _ in range(n)), (4, "k", 8, 0, 9), (4, "k", 9, 0, 9))
    summary = summarize(tmp_path)
    assert summary["graphs"] == (dict(recorded=recorded, expected=expected) if traced or nodes else None)
    assert (summary["launches_per_step"] is None) == lost
    assert ("DEBUG_HIP_GRAPH_SEGMENT_SCHEDULING=0" in render(summary)) == lost
    (tmp_path / "manifest.json").unlink()  # and without steps, where HIP calls were traced
    summary = summarize(tmp_path)
    assert summary["launches_per_step"] is None
    assert ("DEBUG_HIP_GRAPH_SEGMENT_SCHEDULING=0" in render(summary)) == (traced and lost)


def test_a_process_with_launches_and_no_kernels_is_named(tmp_path):
    """A child that got ROCPROFILER_REGISTER_LIBRARY from its parent, whose own kernels were recorded."""
    csv(tmp_path / "7_hip_api_trace.csv", CALLS, ("hipLaunchKernel", 1, 1, 1), ("hipMalloc", 1, 2, 2))
    csv(tmp_path / "7_kernel_trace.csv", KERNELS, (4, "k", 1, 0, 9))
    csv(tmp_path / "8_hip_api_trace.csv", CALLS, ("hipLaunchKernel", 1, 1, 1), ("hipMalloc", 1, 2, 2))
    assert summarize(tmp_path)["launches_without_kernels"] == 1
    assert "Unset ROCPROFILER_REGISTER_LIBRARY" in render(summarize(tmp_path))
