"""From traces made by hand to what a session says of them, by hand."""
import json
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from fusion_lab.measuring import analysis
from fusion_lab.measuring.probe import Counts
from tests.second_program import PROGRAM as SECOND

MB = 2 ** 20


def event(category, name, thread, start, length, **arguments):
    return dict(ph="X", cat=category, name=name, tid=thread, ts=start, dur=length, args=arguments)


def cpu_trace():
    """Two steps of 100 µs forward."""
    return [event(*values) for t in (0.0, 1000.0) for values in (
        ("user_annotation", "forward", 1, t, 100.0), ("user_annotation", "up", 1, t + 10, 40.0),
        ("cpu_op", "aten::mm", 1, t + 20, 12.0), ("cpu_op", "aten::add", 1, t + 60, 4.0))]


def gpu_trace():
    """Two steps; autograd's thread is 2. Every kernel runs long after its launch, out of its range's time."""
    events = []
    for step in range(2):
        t = 1000.0 * step
        events += [
            event("user_annotation", "forward", 1, t, 100.0), event("user_annotation", "up", 1, t + 10, 40.0),
            event("cpu_op", "aten::addmm", 1, t + 12, 20.0),
            event("cuda_runtime", "cudaLaunchKernel", 1, t + 14, 5.0, correlation=10 * step + 1),
            event("cuda_driver", "cuLaunchKernelEx", 1, t + 60, 5.0, correlation=10 * step + 2),
            event("user_annotation", "backward", 1, t + 100, 100.0),
            event("user_annotation", "up.backward", 2, t + 110, 50.0),
            event("cuda_runtime", "hipLaunchKernel", 2, t + 120, 5.0, correlation=10 * step + 3),
            event("kernel", "sm90_gemm", 7, t + 500, 30.0, correlation=10 * step + 1),
            event("kernel", "vectorized_elementwise_kernel", 7, t + 530, 10.0, correlation=10 * step + 2),
            event("kernel", "sm90_gemm", 7, t + 535, 60.0, correlation=10 * step + 3),
            event("gpu_memcpy", "Memcpy HtoD", 8, t + 700, 4.0, correlation=99),
            dict(ph="i", name="[memory]", tid=1, ts=t + 13, args={"Bytes": 256, "Device Type": 1})]
    return events


def analysed(events, directory, samples=(), untraced=3, seconds=0.25e-3, **counts):
    """analysis_of() a run of five steps, of which some were timed before the profiler began."""
    (directory / "t.json").write_text(json.dumps(dict(traceEvents=events)))
    settings = SECOND.settings(width=8, batch_size=3, device="cpu")
    trainer = SimpleNamespace(program=SECOND, settings=settings, device=torch.device("cpu"),
                              model=SimpleNamespace(statistics=lambda: dict(kernels_by_rule=15, other=1)))
    profiling = SimpleNamespace(trace=str(directory / "t.json"), steps_before_trace=untraced,
                                samples=list(samples), untraced=lambda steps: steps[:untraced or None])
    known = Counts(**{**dict(saved=dict(up=3 * MB, rest=MB), flops=7, launches=3), **counts})
    times = np.array([[seconds] * 4] * 3 + [[1.0] * 4] * 2)
    return analysis.analysis_of(trainer, known, times, 2.0, profiling)


def test_a_cpu_is_timed_without_the_profiler(tmp_path):
    """Medians of the steps before the trace."""
    samples = [{"up": up, "forward": 1e-3} for up in (1e-3, 3e-3, 9e-3)]
    result = analysed(cpu_trace(), tmp_path, samples,
                     launches_by_range={("up", "forward"): 1, ("rest", "forward"): 2})
    up, rest = result["sublayers"]
    assert (up["name"], up["direction"], up["calls"], up["launches"]) == ("up", "forward", 1, 1)
    assert (up["total_us"], up["share"]) == (pytest.approx(3000.0), pytest.approx(0.75))
    assert (up["saved_activation_mb"], up["allocated_mb"]) == (3.0, None)
    assert (rest["name"], rest["total_us"], rest["launches"]) == ("rest", pytest.approx(1000.0), 2)
    assert result["kernel_counts"] == dict(
        kernels_per_step=3, kernels_are="cpu_ops", kernels_per_step_by_sublayer=dict(up=1, rest=2),
        nominal=dict(kernels_by_rule=15))
    assert result["step"] == dict(
        untraced_ms=pytest.approx(1), p20_ms=pytest.approx(1), p80_ms=pytest.approx(1), traced_ms=0.1,
        gpu_busy_ms=None, step_times=pytest.approx([1e-3] * 3),
        phases_ms=dict.fromkeys(("data", "forward", "backward", "optimizer"), pytest.approx(0.25)))
    assert (result["unit"], result["launch"], result["launches_per_step"]) == ("operation", None, 3)
    assert result["time_kind"] == "CPU time, without the profiler" and result["memory_peak_mb"] == 2.0
    assert result["flops_share"] == dict(up=0.5, down=0.5) and result["profile_steps"] == 2
    heaviest, saved = result["findings"]
    assert all(part in heaviest for part in ("`up`", "75% of the measured", "50% of", "a factor of 4.00"))
    assert "`up`" in saved and "3.0 of 4.0 MB, 75%" in saved


def test_a_run_that_the_profiler_saw_whole_says_so(tmp_path):
    result = analysed(cpu_trace(), tmp_path, [{"up": 1e-3}] * 5, untraced=0)
    assert result["time_kind"] == "CPU time, under the profiler" and len(result["step"]["step_times"]) == 5


def test_a_gpu_is_timed_by_its_kernels(tmp_path):
    result = analysed(gpu_trace(), tmp_path)
    table = {(e["name"], e["direction"]): e for e in result["sublayers"]}
    assert {place: e["total_us"] for place, e in table.items()} == {
        ("up", "backward"): 60.0, ("up", "forward"): 30.0, ("rest", "forward"): 10.0,
        ("rest", "launch not recorded"): 4.0, ("rest", "backward"): 0.0}
    assert table["up", "forward"]["share"] == pytest.approx(30 / 104)
    assert [table["up", d]["launches"] for d in ("forward", "backward")] == [1, 1]
    assert result["kernel_counts"]["kernels_per_step_by_sublayer"] == dict(up=2, rest=1)
    assert result["unit"] == "kernel" and result["coverage"] == pytest.approx(
        dict(sublayers=90 / 104, rest=10 / 104, unattributed=4 / 104))
    assert [(e["name"], e["kind"], e["calls"], e["launches"], e["self_us"]) for e in result["kernels"]] == [
        ("sm90_gemm", "matrix product", 2, 2, 90.0),
        ("vectorized_elementwise_kernel", "elementwise", 1, 1, 10.0), ("Memcpy HtoD", "copy", 1, 0, 4.0)]
    assert [e["share"] for e in result["kernels"]] == pytest.approx([90 / 104, 10 / 104, 4 / 104])
    launch = result["launch"]
    assert (launch["verdict"], launch["busy_ms"]) == ("launch-bound", pytest.approx(0.099))
    assert "of the GPU time" in result["findings"][0] and "launch-bound: kernels run during 10%" in \
        result["findings"][2]


@pytest.mark.parametrize("busy, verdict", [
    (0.49, "launch-bound"), (0.5, "partly launch-bound"), (0.84, "partly launch-bound"),
    (0.85, "not launch-bound")])
def test_shares_that_decide_on_a_gpu(busy, verdict):
    step = dict(untraced_ms=10.0, gpu_busy_ms=10 * busy)
    result = analysis.launch_arithmetic(1000, step)
    assert result["verdict"] == verdict and "every 10.0 µs" in result["text"]
    assert analysis.launch_arithmetic(None, step)["launches"] is None  # under --enable-rocm-profiling
    assert analysis.launch_arithmetic(1000, step, lost=True)["verdict"].startswith("undecided")
    for busy, decided in ((11.0, True), (11.1, False), (6667.0, False)):
        text = analysis.launch_arithmetic(1000, dict(step, gpu_busy_ms=busy))["text"]
        assert text.startswith("not launch-bound: kernels run during 100%" if decided else "undecided")


def test_blocks_that_are_one_piece_have_no_heaviest_sublayer(tmp_path):
    events = [e for e in cpu_trace() if e["name"] != "up"]
    result = analysed(events, tmp_path, [{"forward": 1e-3}] * 5, saved={})
    assert result["coverage"]["sublayers"] == 0 and len(result["findings"]) == 1
    assert "--disable-torch-compile" in result["findings"][0]


def test_a_profiler_that_saw_no_kernel_finds_nothing_heavy(tmp_path):
    events = [e for e in gpu_trace() if e.get("cat") not in ("kernel", "gpu_memcpy")]
    result = analysed(events, tmp_path)
    assert "6 launches and no kernel" in result["unrecorded"][0] and result["launch"] is None
    assert len(result["findings"]) == 1 and "3.0 of 4.0 MB" in result["findings"][0]
