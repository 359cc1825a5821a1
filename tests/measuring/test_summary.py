"""The figures of a training run by a clock made by hand: its summary, its step lines, its comparison."""
import json
import os
import signal
import sys
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import tiny_openfold_v2 as tof
from fusion_lab.measuring import clocks, summary
from fusion_lab.measuring.clocks import PhaseTimer
from fusion_lab.training.errors import UserError
from tests.second_program import PROGRAM as SECOND
from tests.support import last_json

CPU = torch.device("cpu")
PHASES = np.array([[0.1, 0.2, 0.3, 0.4]])  # of a second: data, forward, backward, optimizer
FACTORS = (3.0, 1.0, 2.0, 8.0, 5.0, 4.0)  # of the six steps; sorted 1 2 3 4 5 8


class Slow(PhaseTimer):
    """Every step takes as long as FACTORS says, in PHASES."""

    def seconds(self, last=0):
        found = super().seconds()
        assert found.shape[1] == 4
        return PHASES * np.array(FACTORS[:len(found)][-last:])[:, None]


def test_a_run_by_hand(monkeypatch, tmp_path, capsys):
    """Times of the last two or four steps in a step line, of all steps in the summary."""
    monkeypatch.setattr(clocks, "PhaseTimer", Slow)
    monkeypatch.setattr(summary, "matmul_ceiling", lambda *_: 4e6)
    settings = SECOND.settings(width=8, batch_size=6, device="cpu", num_steps=6, log_every=4, warmup_steps=1,
                               profile_dir=str(tmp_path))
    assert tof.train(SECOND, settings) == 0
    out = capsys.readouterr().out
    first, last = [line for line in out.splitlines() if line.startswith("Step ")]
    assert first.startswith("Step   4/6 | ") and last.startswith("Step   6/6 | ")
    assert "| Speed:    2.4 samples/sec |" in first and first.endswith("| Time: 2500.0ms")  # of 3 1 2 8
    assert "| Speed:    1.3 samples/sec |" in last and last.endswith("| Time: 4500.0ms")  # of 2 8 5 4
    result = last_json(out)
    figures, losses = result["performance_summary"], [
        json.loads(line)["loss"] for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    mean = sum(FACTORS) / 6
    flops = 3 * 2 * 2 * (2 * 6 * 8 * 32)
    expected = dict(
        total_samples=36, avg_training_speed=6 / mean, avg_batch_time=mean, avg_data_time=0.1 * mean,
        avg_forward_time=0.2 * mean, avg_backward_time=0.3 * mean, avg_optimizer_time=0.4 * mean,
        median_batch_time=3.5, p20_batch_time=2.0, p80_batch_time=5.0, first_loss=losses[0],
        final_loss=losses[5], avg_loss=sum(losses) / 6, flops_per_step=flops,
        achieved_tflops=flops / 3.5 / 1e12, matmul_ceiling_tflops=4e-6, mfu=flops / 3.5 / 4e6)
    assert {key: figures[key] for key in expected} == pytest.approx(expected)
    assert figures["launch_kind"] == "cpu_ops" and figures["launches_per_step"] > 20
    assert result["training_params"]["amp_dtype"] is None and result["version"] == "mlp"


def test_a_long_run_keeps_the_times_of_its_last_thousand_steps():
    times = np.zeros((1001, 4))
    times[:, 1] = np.arange(1001)
    figures = summary.of_steps(SimpleNamespace(graph=None), [1.0] * 1001, times, 2)
    assert figures["step_times"] == [*range(1, 1001)]
    assert (figures["median_batch_time"], figures["avg_training_speed"]) == (500, pytest.approx(2 / 500))


def test_nobody_waits_for_a_ceiling_or_a_picture_after_ctrl_c(monkeypatch, tmp_path, capsys):
    class Interrupted(SECOND.trainer):
        def step(self, *arguments):
            if self.step_number == 2:
                signal.raise_signal(signal.SIGINT)
            return super().step(*arguments)
    monkeypatch.setattr(summary, "matmul_ceiling", lambda *_: pytest.fail("measured"))
    settings = SECOND.settings(width=8, device="cpu", warmup_steps=0, profile_dir=str(tmp_path))
    assert tof.train(replace(SECOND, trainer=Interrupted), settings) == 130
    figures = last_json(capsys.readouterr().out)["performance_summary"]
    assert figures["mfu"] is None and figures["achieved_tflops"] > 0
    assert sorted(os.listdir(tmp_path)) == ["metrics.jsonl", "performance_summary_mlp.json"]


def test_people_on_a_terminal_get_milliseconds_and_programs_json(monkeypatch, capsys):
    figures = {**dict.fromkeys(summary.HEADLINES), **dict(
        first_loss=3.0, final_loss=1.5, median_batch_time=0.0125, p20_batch_time=0.0115, p80_batch_time=0.02,
        avg_training_speed=320.25)}
    result = dict(version="v", performance_summary=figures)
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    summary.print_summary(SimpleNamespace(settings=SECOND.settings()), result, "there/s.json")
    out = capsys.readouterr().out
    assert "12.50 ms (p20 11.50, p80 20.00)" in out and "not measured" in out and "there/s.json" in out
    monkeypatch.setattr(sys.stdout, "isatty", lambda: False)
    summary.print_summary(SimpleNamespace(settings=SECOND.settings()), result, "s.json")
    line, = capsys.readouterr().out.splitlines()
    assert json.loads(line)["performance_summary"]["median_batch_time"] == 0.0125


def earlier(memory=None, **values):
    """As read_summary() has it."""
    return {**dict(speed=4.0, memory=memory, rates=[], version="v1", timestamp="then", config={},
                   training_params={}, fusion_config={}, system_info={}), **values}


def now(peak=30.0, **values):
    return {**dict(performance_summary=dict(avg_training_speed=10.0, peak_memory_mb=peak),
                   config=dict(width=8), training_params=dict(batch_size=4, use_amp=False),
                   system_info=dict(gpu_name=None)), **values}


@pytest.mark.parametrize("least, low, code", [
    (None, None, 0), (1.3, 1.31, 0), (1.3, 1.3, 1), (1.3, 1.2, 1), (1.3, None, 1), (0.5, None, 1)])
def test_a_speed_up_passes_by_its_interval(least, low, code, capsys):
    result = dict(compared_with_v1=dict(speedup=1.6, speedup_low=low)) if low else {}
    assert summary.too_slow(result, least) == code
    assert ("FAILED" in capsys.readouterr().out) == bool(code)


def test_against_an_earlier_run(capsys):
    before = earlier(40.0, config=dict(width=8), system_info=dict(gpu_name=None))
    comparison = summary.print_against(before, now())
    assert comparison == dict(speedup=2.5, speedup_low=None, speedup_high=None, differences=[],
                         memory_reduction_percent=pytest.approx(25.0))
    out = capsys.readouterr().out
    assert "Training speed: 4.0 -> 10.0 samples/sec, 2.50x (spread unknown" in out
    assert "Peak memory: 40.0 -> 30.0 MB, +25.0% saved" in out
    assert summary.print_against(earlier(40.0), now(None))["memory_reduction_percent"] is None


def test_what_differs_between_runs_that_are_comparable_is_named(capsys):
    before = earlier(config=dict(depth=9), training_params=dict(batch_size=2, use_amp=True),
                     system_info=dict(torch_version="2.10"), fusion_config=dict(enable_x=True))
    comparison = summary.print_against(before, now(system_info=dict(gpu_name=None, torch_version="2.13"),
                                              fusion_config=dict(enable_x=False)))
    assert comparison["speedup"] == 2.5 and comparison["differences"] == [
        "batch_size 2 -> 4", "use_amp True -> False", "torch_version 2.10 -> 2.13",
        "gpu_name unknown -> None", "enable_x True -> False"]
    out = capsys.readouterr().out
    assert "not measured in both runs" in out and "differ in more than fusion: batch_size 2 -> 4" in out
    assert "Fusions: enable_x True -> False" in out


def of_steps(*milliseconds):
    """A performance_summary whose batches are of four samples."""
    mean = sum(milliseconds) / len(milliseconds) / 1e3
    return dict(avg_training_speed=4 / mean, avg_batch_time=mean, peak_memory_mb=1.0,
                step_times=[ms / 1e3 for ms in milliseconds])


def test_a_ratio_of_two_files_has_its_spread(tmp_path, capsys):
    before = dict(performance_summary=of_steps(40, 38, 40, 40, 40, 42, 99))
    (tmp_path / "s.json").write_text(json.dumps(before))
    comparison = summary.print_against(summary.read_summary(tmp_path / "s.json"),
                                  now(performance_summary=of_steps(*[20] * 7)))
    said = "100.0 -> 200.0 samples/sec, 2.00x (95% interval 1.90 to 4.9"
    assert said in capsys.readouterr().out and comparison["speedup_low"] == pytest.approx(1.9)


@pytest.mark.parametrize("ceilings, mfu", [((4e12, 8e12), None), ((1e12, 4e12), 0.5), ((1e12, 1e12), None)])
def test_no_step_is_faster_than_its_ceiling(ceilings, mfu, monkeypatch):
    """A busy machine makes a ceiling too low: it is measured again, and else it is none."""
    measured = iter(ceilings)
    monkeypatch.setattr(summary, "matmul_ceiling", lambda *_: next(measured))
    ceiling = summary.ceiling_above(2e12, CPU, torch.float32)
    assert ceiling == (ceilings[0] if ceilings[0] > 2e12 else 2e12 / mfu if mfu else None)


@pytest.mark.parametrize("before, after, said", [
    (dict(system_info=dict(gpu_name="A")), dict(system_info=dict(gpu_name="B")), "gpu_name A -> B"),
    (dict(config=dict(width=4), system_info=dict(gpu_name=None)), {}, "width 4 -> 8"),
    (dict(system_info=dict(gpu_name=None, cpu_threads=2)),
     dict(system_info=dict(gpu_name=None, cpu_threads=1)), "cpu_threads 2 -> 1")])
def test_no_speed_up_between_machines_or_sizes(before, after, said, capsys):
    comparison = summary.print_against(earlier(**before), now(**after))
    assert comparison["speedup"] is None and comparison["differences"] == [said]
    assert f"samples/sec, not comparable: {said}\n" in capsys.readouterr().out


def test_only_summaries_are_read(tmp_path):
    path = tmp_path / "s.json"
    path.write_text('{"performance_summary": {"avg_training_speed": 4.5, "peak_memory_mb": null}}')
    assert summary.read_summary(path) == dict(
        speed=4.5, memory=None, version="a run", timestamp="unknown date", config={}, rates=[],
        training_params={}, fusion_config={}, system_info={})
    whole = dict(version="v1", timestamp="then", config=dict(width=8), training_params=dict(batch_size=2),
                 system_info=dict(gpu_name=None))
    path.write_text(json.dumps(dict(whole, performance_summary=dict(avg_training_speed=4, peak_memory_mb=0))))
    assert summary.read_summary(path) == dict(whole, fusion_config={}, speed=4.0, memory=None, rates=[])
    for figures in ({}, dict(avg_training_speed=0), dict(avg_training_speed="x"), [1],
                    dict(avg_training_speed=4, avg_batch_time=1, step_times=[0])):
        path.write_text(json.dumps(dict(whole, performance_summary=figures)))
        with pytest.raises(UserError, match="not a performance summary"):
            summary.read_summary(path)
