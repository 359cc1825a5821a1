"""The roofline's and the predictions' arithmetic, sizes and tables by hand."""
import json
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import tiny_openfold_v2 as tof
from fusion_lab.measuring.bounds import ceilings, predictions, roofline
from fusion_lab.measuring.bounds.flops import flops_by_sublayer
from fusion_lab.measuring.bounds.sizes import other_axes, shapes_around, shrunk, sizes_text
from fusion_lab.measuring.probe import Findings
from fusion_lab.training.program import Cost
from tests.second_program import PROGRAM as SECOND

CPU, GPU = torch.device("cpu"), torch.device("cuda")
MB = 2 ** 20
SPEEDS = dict(matmul_flops_per_s=dict(float32=1e9, bfloat16=1e12), dtype="float32", copy_bytes_per_s=1e6,
              element_bytes=4, dispatch_s=1e-4)


def settings(**values):
    return SECOND.settings(**{**dict(width=8, depth=2, batch_size=3, device="cpu"), **values})


class Timer:
    """A PhaseTimer by which steps take `times`; what is asked of all of them is noted in `said`."""

    def __init__(self, times):
        self.times, self.said = np.array(times), []

    def __call__(self, device):
        self.said.append(device.type)
        return self

    def start(self):
        self.said.append("start")

    def mark(self):
        self.said.append("mark")

    def seconds(self):
        return self.times


# Ceilings


def test_ceilings_of_a_gpu_are_of_larger_matrices_and_of_every_precision(monkeypatch):
    asked, timer = [], Timer([[0.01], [0.25], [0.5], [0.5], [0.5], [0.5]])  # the first is the warm-up
    said, runs = timer.said, ["start", "work", "mark"] * 6
    monkeypatch.setattr(ceilings, "PhaseTimer", timer)
    monkeypatch.setattr(torch, "randn", lambda *sizes, device, dtype: (
        asked.append(sizes) or SimpleNamespace(T=None)))
    monkeypatch.setattr(torch, "mm", lambda *_: said.append("work"))
    assert ceilings.matmul_ceiling(GPU, torch.float16) == 2 * 8192 ** 3 / 0.25
    assert said == ["cuda", *runs] * 6 and asked == [(4096, 4096)] * 2 + [(8192, 8192)] * 2
    tensor = SimpleNamespace(zero_=lambda: tensor, numel=lambda: 1000, copy_=lambda _: said.append("work"))
    monkeypatch.setattr(torch, "empty", lambda size, device: asked.append(size) or tensor)
    monkeypatch.setattr(torch, "empty_like", lambda other: tensor)
    for device, size in ((GPU, 2 ** 28), (CPU, 2 ** 24)):
        assert ceilings.copy_ceiling(device) == 2 * 1000 * 4 / 0.25 and asked[-1] == size
        assert said[-19:] == [device.type, *runs]

    def matmul(device, dtype):
        return {torch.float32: 1.0, torch.bfloat16: 2.0, torch.float16: 3.0}[dtype] + \
            10 * torch.backends.cuda.matmul.allow_tf32

    for name, value in (("matmul_ceiling", matmul), ("copy_ceiling", lambda _: 7),
                        ("dispatch_cost", lambda _: 0.5), ("runs_in_tf32", lambda *_: True)):
        monkeypatch.setattr(ceilings, name, value)
    found = ceilings.measure_ceilings(GPU, settings().training)
    assert found == dict(copy_bytes_per_s=7.0, dispatch_s=0.5, dtype="tf32", element_bytes=4,
                         matmul_flops_per_s=dict(float32=1.0, bfloat16=2.0, tf32=11.0, float16=3.0))
    assert not torch.backends.cuda.matmul.allow_tf32
    on_cpu = ceilings.measure_ceilings(CPU, settings(use_amp=True, amp_dtype="float16").training)
    assert on_cpu["matmul_flops_per_s"] == dict(float32=1.0, bfloat16=2.0, float16=3.0)
    assert on_cpu["dtype"] == "float16" and on_cpu["element_bytes"] == 2
    found |= dict(copy_bytes_per_s=2.5e9, dispatch_s=3.25e-6)
    found["matmul_flops_per_s"] = dict(float32=1.5e12, tf32=4e13)
    assert ceilings.ceiling_line(found) == (
        "Ceilings, measured here: copy 2.5 GB/s; matrix product float32 1.5, tf32 40 TFLOP/s; launch "
        "3.25 µs. This run: tf32.")


def test_the_ceiling_is_that_of_the_fastest_layout(monkeypatch):
    """Of x W^T, g W and g^T x one is 20 times as fast, as in float16 on a CPU; slow ones run once."""
    runs, timer = [], Timer([])
    timer.seconds = lambda: np.full((timer.said[::-1].index("cpu") // 2, 1), 1.0 if runs[-1] else 0.05)

    def product(a, b):
        runs.append(0 if not b.is_contiguous() else 2 if not a.is_contiguous() else 1)

    monkeypatch.setattr(ceilings, "PhaseTimer", timer)
    monkeypatch.setattr(torch, "mm", product)
    assert ceilings.matmul_ceiling(CPU, torch.float16) == 2 * 1024 ** 3 / 0.05
    assert runs == [*[0] * 6, 1, 2] * 3


def test_dispatch_is_timed_after_the_gpu_is_done(monkeypatch):
    said, ticks = [], iter([0, 10, 10, 14, 20, 25, 30, 35, 40, 46, 50, 58])
    monkeypatch.setattr(torch, "zeros", lambda *_, device: SimpleNamespace(add_=said.append))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: said.append("done"))
    monkeypatch.setattr(ceilings.time, "perf_counter", lambda: next(ticks))
    assert ceilings.dispatch_cost(GPU) == 4 / 200
    assert said == ["done", *[1.0] * 200] * 6


# Roofline


THREE = replace(SECOND, sublayers=("a", "b", "c"), blocks=lambda settings: 3, costs=lambda settings: dict(
    a=Cost(1e6, 2e3, 4e3), b=Cost(1e6, 2e3, 4e3), c=Cost(2e6, 1e3, None)))


@pytest.fixture
def three(monkeypatch):
    """The count of such a step: three blocks, backward twice as many, and what stands beside them."""
    monkeypatch.setattr(roofline, "flops_by_sublayer",
                        lambda *_: dict(a=9e6, b=9e6, c=18e6, rest=3e5))


def test_bounds_of_a_sublayer():
    cost = Cost(1e6, 2e3, 4e3)
    assert roofline.total_bytes(cost, 3) == 18e3 and roofline.floor_seconds(9e6, 18e3, SPEEDS) == (
        pytest.approx(0.009), pytest.approx(0.018))
    assert roofline.floor_seconds(3e6, None, dict(SPEEDS, dtype="bfloat16")) == (pytest.approx(3e-6), None)
    assert roofline.total_bytes(Cost(1.0, None, 5.0), 1) is roofline.total_bytes(None, 1) is None
    flops = dict(a=1.0, b=1.0, c=2.0, rest=4.0)
    assert roofline.flops_share(THREE, flops) == dict(a=0.25, b=0.25, c=0.5)
    assert roofline.equal_work(THREE, settings()) == [("a", "b")]
    assert roofline.equal_work(SECOND, settings()) == []  # as many FLOPs is not the same work
    assert roofline.flops_share(THREE, dict.fromkeys("abc", 0)) == dict(a=0, b=0, c=0)


def test_flops_of_every_sub_layer_by_hand():
    """Products of 3 x 8 with 8 x 32, four blocks, backward twice as many, and nothing beside them."""
    assert flops_by_sublayer(SECOND, settings(depth=4)) == dict(up=12 * 1536, down=12 * 1536, rest=0)


def test_the_table_as_cells(three):
    rows = roofline.roofline_table(THREE, settings(), SPEEDS, dict(
        a=dict(seconds=0.036, launches=10), c=dict(seconds=None, launches=None)))
    assert [row["name"] for row in rows] == ["a", "b", "c"]
    assert rows[0]["launches"] == 10 and rows[2]["note"] == "bytes not worked out"
    assert rows[1]["measured_s"] is rows[1]["share"] is rows[1]["launches"] is None
    assert rows[1]["launch_s"] == 0 and rows[2]["flops_per_byte"] is rows[2]["memory_s"] is None
    cells = roofline.roofline_rows(rows)
    assert cells[1] == ["a", "0.01", "0.0", "500.0", "9.000", "18.000", "1.000", "36.000", "memory", "50.0%"]
    assert cells[3] == ["c", "0.02", "", "", "18.000", "", "0.000", "", "compute (bytes not worked out)", ""]
    assert roofline.roofline_rows([dict(rows[0], share=1.114)])[1][-1] == "111.4%, a fault of the bound"
    row = dict(rows[0], flops=2.5e9, minimal_bytes=1.5 * MB)
    assert roofline.roofline_rows([row])[1][1:3] == ["2.50", "1.5"]


def test_on_a_gpu_launching_bounds_where_it_takes_longer_than_the_kernels(three):
    times = dict(compute=2.0, memory=1.0, launch=3.0)
    assert roofline.bound(times, 3.0, on_gpu=True) == "compute"
    assert roofline.bound(times, 2.9, on_gpu=True) == roofline.bound(times, None, on_gpu=True) == "launch"
    measured = dict(a=dict(seconds=0.0001, launches=10))
    assert roofline.roofline_table(THREE, settings(), SPEEDS, measured, on_gpu=True)[0]["bound"] == "launch"


def test_a_step_takes_at_least_its_parts_and_its_optimizer(three):
    """a and b 18 ms by their bytes, c 18 ms by its FLOPs, the rest 0.3 ms, AdamW 28 B a parameter."""
    assert roofline.step_floor(THREE, settings(), SPEEDS, 1000) == (
        pytest.approx(0.018 + 0.018 + 0.018 + 0.0003 + 0.028), 0)


def test_a_prediction_is_the_longer_of_device_and_host(monkeypatch):
    monkeypatch.setattr(roofline, "simulate_memory", lambda *_: (5 * MB, 2 * MB))
    monkeypatch.setattr(roofline, "step_floor", lambda p, s, c, parameters, launches: (parameters, launches))
    parameters = 8 + 2 * (2 * 8 * 32 + 32 + 8)
    for launches, longer in ((9, parameters), (2000, 2000)):
        assert roofline.predict(SECOND, settings(), CPU, SPEEDS, launches) == dict(
            batch_size=3, width=8, device_s=parameters, launch_s=launches, step_s=longer, peak_memory_mb=5.0,
            saved_activation_mb=2.0)


def test_memory_of_a_step_that_is_not_run():
    """Weights and their moments, three times 1112 numbers, a batch of 51, and what is alive at once."""
    plain = replace(settings(), fusion=SECOND.fusion_config.preset(False))
    peak, saved = roofline.simulate_memory(SECOND, plain, CPU)
    trainer = SECOND.trainer(SECOND, plain, CPU)
    batch = SECOND.open_source(plain).batch(0)
    counted = roofline.saved_activations(trainer.model, [], lambda: trainer.forward(batch)["loss"])
    assert saved == sum(counted.values())
    with roofline.OpCounter() as counter:
        trainer.forward(batch)["loss"].backward()
    assert peak == counter.peak + 4 * (3 * 1112 + 51)


# Predictions


def test_exponents_of_all_points_and_of_the_last_two():
    """Slopes of 2 and 3 of log2; least squares through three equally spaced points take the outer two."""
    points = [dict(s=size, peak_memory_mb=peak, saved_activation_mb=saved) for size, peak, saved in (
        (32, 32.0, None), (8, 1.0, 2.0), (16, 4.0, None))]
    assert predictions.exponents(points, "s") == dict(
        peak_memory_mb=pytest.approx(2.5), last_peak_memory_mb=pytest.approx(3.0), saved_activation_mb=None,
        last_saved_activation_mb=None)
    assert predictions.exponents([], "s")["peak_memory_mb"] is None
    assert predictions.exponents(points[:1] + points[2:], "s")["peak_memory_mb"] == pytest.approx(3.0)


class Alone:
    """measure_alone() that finds as many MB as the axis' size, squared where attention is plain."""

    def __init__(self, monkeypatch):
        self.names, self.released = [], []
        monkeypatch.setattr(predictions, "measure_alone", self.measure)
        monkeypatch.setattr(predictions, "release", lambda variants=(): self.released.extend(variants))

    def measure(self, program, variant, device, batch):
        self.names.append((variant.name, variant.settings.training.warmup_steps))
        size = variant.settings.get("width" if program is SECOND else "seq_len")
        if size == 6:
            variant.reason = "too large"
            return
        plain = program is not SECOND and not variant.settings.fusion.enable_flash_attention
        peak = float(size ** 2 if plain else size)
        variant.found = Findings(dict(up=size * MB), 1, launches=70, peak_memory_mb=peak)


def test_memory_against_length(monkeypatch):
    alone = Alone(monkeypatch)
    found = predictions.memory_scaling(SECOND, settings(warmup_steps=5), CPU, "width", [2, 4, 6])
    assert [variant.name for variant in alone.released] == [name for name, _ in alone.names]
    assert alone.names == [("as given W=2", 0), ("as given W=4", 0), ("as given W=6", 0)]
    assert found["points"][1:] == [
        dict(attention="as given", width=4, peak_memory_mb=4.0, saved_activation_mb=4.0, reason=None),
        dict(attention="as given", width=6, peak_memory_mb=None, saved_activation_mb=None,
             reason="too large")]
    assert found["exponents"]["as given"]["peak_memory_mb"] == pytest.approx(1.0)
    assert predictions.scaling_rows(found, "width", "W") == [
        ["switches", "W", "peak MB", "saved MB", ""], ["as given", "2", "2.0", "2.0", ""],
        ["as given", "4", "4.0", "4.0", ""], ["as given", "6", "", "", "too large"],
        ["as given", "exponent", "1.00", "1.00",
         "of W, fitted; between the two largest: peak 1.00, saved 1.00"]]
    one = predictions.memory_scaling(SECOND, settings(), CPU, "width", [2])
    assert len(predictions.scaling_rows(one, "width", "W")) == 2  # no exponent of one size
    tiny = tof.PROGRAM.settings(**tof.PROGRAM.tiny, msa_dim=16, pair_dim=16)
    found = predictions.memory_scaling(tof.PROGRAM, tiny, CPU, "seq_len", [8, 16])
    assert [p["attention"] for p in found["points"]] == ["plain", "fused"] * 2
    assert found["exponents"]["plain"]["peak_memory_mb"] == pytest.approx(2.0)
    assert found["exponents"]["fused"]["peak_memory_mb"] == pytest.approx(1.0)
    rows = predictions.scaling_rows(dict(found, fused_runs="sdpa"), "seq_len", "S")
    assert rows[0][0] == "attention" and rows[-1] == ["fused", "runs", "sdpa"]


def test_predictions_are_checked_against_what_was_measured(monkeypatch):
    Alone(monkeypatch)
    asked = []

    def predict(program, settings, device, ceilings, launches):
        asked.append((settings.get("width"), launches))
        return dict(step_s=0.004, peak_memory_mb=5.0)

    monkeypatch.setattr(predictions, "predict", predict)
    monkeypatch.setattr(predictions, "time_steps", lambda *_: 0.010)
    shapes = [dict(batch_size=3, width=4), dict(batch_size=3, width=6)]
    good, bad = predictions.check_predictions(SECOND, settings(), CPU, SPEEDS, shapes)
    assert asked == [(4, 70)] and bad == dict(batch_size=3, width=6, reason="too large")
    assert (good["measured_s"], good["time_ratio"], good["measured_peak_memory_mb"]) == (0.010, 2.5, 4.0)
    assert good["peak_error_percent"] == pytest.approx(25.0) and good["reason"] is None
    assert predictions.prediction_rows([good, bad], SECOND.axes)[1:] == [
        ["3", "4", "4.000", "10.000", "2.50", "5.0", "4.0", "+25.0%"], ["3", "6", "too large"]]
    other = dict(good, time_ratio=1.25, peak_error_percent=-30.0)
    assert predictions.errors_line([good, bad, other, dict(good, peak_error_percent=None)]) == (
        "Over 3 shapes: measured time is 1.25 to 2.50 times the bound; peak memory is off by at most 30.0%")
    assert "0.80 to 2.50 times the bound (below 1: a fault of the bound)" in predictions.errors_line(
        [good, dict(good, time_ratio=0.8)])
    assert predictions.errors_line([dict(good, peak_error_percent=None)]).endswith("2.50 times the bound")


def test_a_prediction_asks_a_small_trial_for_its_launches(monkeypatch, capsys):
    alone, asked = Alone(monkeypatch), []

    def predict(program, settings, device, ceilings, launches):
        asked.append([settings.get(name) for name in ("width", "batch_size", "warmup_steps")] + [launches])
        return dict(device_s=0.001, launch_s=0.002, step_s=0.0025, peak_memory_mb=3.0,
                    saved_activation_mb=1.5)

    monkeypatch.setattr(predictions, "predict", predict)
    monkeypatch.setattr(predictions, "measure_ceilings", lambda *_: SPEEDS)
    monkeypatch.setattr(predictions, "system_info", lambda _: "here")
    result = predictions.predict_mode(SECOND, settings(), sizes=(5, 64))
    assert asked == [[64, 5, 0, 70]] and alone.names == [("as given", 0)]
    assert result["system_info"] == "here" and result["prediction"]["step_s"] == 0.0025 and json.dumps(result)
    assert capsys.readouterr().out.splitlines()[1:] == [
        "B 5, W 64    at least",
        "a step       2.500 ms  the longer of: device at its ceilings 1.000 ms, host to launch it 2.000 ms",
        "peak memory  3.0 MB    1.5 MB saved for backward; of an eager step"]
    monkeypatch.setattr(predictions, "time_steps", lambda *_: 0.010)
    result = predictions.predict_mode(SECOND, settings(), check=True)
    assert "prediction" not in result and len(result["checks"]) == 5
    assert capsys.readouterr().out.splitlines()[-1].startswith("Over 5 shapes: measured time is 4.00 to 4.00")


def test_the_median_of_ten_steps_after_three(monkeypatch):
    timer = Timer([[1.0, 1.0], [2.0, 2.0], [5.0, 6.0]])
    monkeypatch.setattr(predictions, "PhaseTimer", timer)
    trainer = SimpleNamespace(step=lambda batch: timer.said.append(batch) or torch.zeros(()))
    assert predictions.time_steps(SimpleNamespace(trainer=lambda *_: trainer), None, CPU, "batch") == 4.0
    assert sorted(timer.said) == sorted(["cpu", *["batch"] * 13, *["start", "mark"] * 10])


# Sizes


def test_sizes_in_words():
    given = tof.PROGRAM.settings(batch_size=4, seq_len=64, num_seqs=16)
    assert sizes_text(tof.PROGRAM, given) == "B 4, S 64, N 16" and other_axes(SECOND) == ["width"]
    assert sizes_text(tof.PROGRAM, given, other_axes(tof.PROGRAM)) == "S 64, N 16"


def test_shrunk_sizes_keep_their_proportion():
    def sizes(largest, **values):
        small = shrunk(tof.PROGRAM, tof.PROGRAM.settings(batch_size=3, **values), largest)
        return small.get("batch_size"), small.get("seq_len"), small.get("num_seqs")
    assert sizes(16, seq_len=64, num_seqs=16) == (3, 16, 4)
    assert sizes(16, seq_len=16, num_seqs=9) == (3, 16, 9)
    assert sizes(16, seq_len=64, num_seqs=512) == (3, 2, 16)
    assert sizes(2, seq_len=3, num_seqs=3) == (3, 2, 2) and sizes(2, seq_len=90, num_seqs=30) == (3, 2, 1)


def test_shapes_lie_on_every_side_of_the_given_ones():
    def shapes(program, **values):
        return [tuple(shape.values()) for shape in shapes_around(program, program.settings(**values))]
    assert shapes(tof.PROGRAM, batch_size=4, seq_len=64, num_seqs=16) == [
        (4, 64, 16), (2, 64, 16), (4, 32, 16), (4, 64, 8), (2, 128, 16), (2, 64, 32), (5, 64, 16),
        (4, 32, 32)]
    assert shapes(SECOND, batch_size=1, width=1) == [(1, 1), (1, 2), (2, 1)]
    assert {min(shape) for shape in shapes(tof.PROGRAM, seq_len=1, num_seqs=1, batch_size=1)} == {1}
