"""How busy the GPU was, and which range launched what."""
import pytest

from fusion_lab.rocm import timeline
from tests.rocm.fake_rocm.machine import csv

HIP = "Function,Thread_Id,Correlation_Id,Start_Timestamp"


def traces_of(directory):
    return timeline.read_traces(directory)


@pytest.mark.parametrize("kernels, percent", [
    ([(4, 200, 210), (4, 20, 30), (4, 100, 150), (4, 0, 100)], 100 * 160 / 210),  # gaps count against it
    ([(4, 0, 100), (4, 20, 30), (4, 50, 120), (4, 130, 160)], 100 * 150 / 160),  # what overlaps counts once
    ([(4, 100, 200), (4, 300, 400), (5, 1000, 1050), (5, 1075, 1100)], 100 * 275 / 400),  # of each GPU
    ([(4, 5, 5)], None), ([], None)])
def test_share_of_time_in_which_the_gpu_was_busy(kernels, percent, tmp_path):
    csv(tmp_path / "7_kernel_trace.csv", "Agent_Id,Start_Timestamp,End_Timestamp", *kernels)
    assert timeline.busy_percent(traces_of(tmp_path)) == (percent and pytest.approx(percent))


def test_kernels_belong_to_ranges_of_their_own_process(tmp_path):
    """Two processes use the same numbers; a mark has no length; a launch that was not traced is outside."""
    for pid, name in ((7, "up"), (8, "down")):
        csv(tmp_path / f"{pid}_marker_api_trace.csv", "Function,Thread_Id,Start_Timestamp,End_Timestamp",
            (name, 1, 0, 100), ("mark", 1, 50, 50))
        csv(tmp_path / f"{pid}_hip_api_trace.csv", HIP, ("launch", 1, 1, 60), ("launch", 2, 2, 60),
            ("launch", 1, 3, 100), ("hipGraphLaunch", 1, 4, 70))
        csv(tmp_path / f"{pid}_kernel_trace.csv", "Correlation_Id,Start_Timestamp,End_Timestamp",
            (1, 500, 510), (2, 600, 603), (3, 700, 704), (4, 710, 715), (9, 800, 801))
    csv(tmp_path / "9_kernel_trace.csv", "Start_Timestamp,End_Timestamp", (0, 1))
    assert timeline.time_by_range(traces_of(tmp_path)) == {
        "up": (1, 10.0), "down": (1, 10.0), timeline.REPLAYED: (2, 10.0), timeline.OUTSIDE: (6, 16.0)}


@pytest.mark.parametrize("spans, moments, names", [
    ([(0, 100, "a"), (10, 20, "b")], [5, 15, 25, 100], ["a", "b", "a", "outside all ranges"]),
    ([(0, 10, "a"), (10, 20, "b")], [0, 9, 10, 19], ["a", "a", "b", "b"]),
    ([(0, 10, "a"), (0, 5, "b")], [0, 7], ["b", "a"]), ([], [3], ["outside all ranges"])])
def test_innermost_range(spans, moments, names):
    assert list(timeline.ranges_at(spans, [(time, time) for time in moments]).values()) == names
