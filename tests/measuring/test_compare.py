"""compare(): fair turns, figures by hand, and the table's words."""
import contextlib
import dataclasses
import itertools
import json
import math
import signal
from types import SimpleNamespace

import pytest
import torch

from fusion_lab.measuring import bench, clocks, compare
from fusion_lab.measuring.bench import NEVER, alternate
from fusion_lab.measuring.compare import Comparison, Row
from fusion_lab.measuring.comparison_table import below, cells, headline, in_words, to_copy
from fusion_lab.measuring.variants import make_variants
from tests.second_program import PROGRAM as SECOND
from tests.second_program import Trainer
from tests.support import gone, wait_for

CPU = torch.device("cpu")
SETTINGS = SECOND.settings(width=8, depth=1, batch_size=2, device="cpu")


# What is measured


class Counting(Trainer):
    """By its own clock a step takes 1 s, with the fused ReLU 1.25 s; it notes whose turn it is."""
    turns, now = [], 0.0

    def step(self, batch, mark=lambda: None):
        if self.settings.fusion.enable_cuda_graphs:
            raise RuntimeError("no such kernel here\nsecond line")
        Counting.turns.append(self.settings.fusion.enable_fused_relu)
        Counting.now += 1.25 if self.settings.fusion.enable_fused_relu else 1.0
        return super().step(batch, mark)

    @staticmethod
    def perf_counter():
        return Counting.now


@pytest.fixture
def counting(monkeypatch):
    monkeypatch.setattr(clocks, "time", Counting)
    Counting.turns, Counting.now = [], 0.0
    return dataclasses.replace(SECOND, trainer=Counting)


def test_steps_alternate_from_equal_weights_and_a_slowdown_is_one(counting):
    shown, notes = [], []
    comparison = compare.compare(counting, SETTINGS, "fused", 7,
                                 lambda known: shown.append(len(known.rows)), notes.append)
    baseline, fused = comparison.rows
    assert Counting.turns[-14:] == [False, True, True, False] * 3 + [False, True]
    assert (fused.measured, comparison.ended, shown) == (True, "7 rounds", [2])
    assert fused.speedup == pytest.approx(0.8) and fused.batch_time_reduction_percent == pytest.approx(-25)
    assert fused.step_times == pytest.approx([1.25] * 7) and fused.baseline_step_times == [1.0] * 7
    assert (fused.speedup_low, fused.speedup_high) == pytest.approx((0.8, 0.8))
    assert baseline.first_loss == pytest.approx(fused.first_loss, rel=1e-5)
    assert fused.final_loss == pytest.approx(baseline.final_loss, abs=1e-4)
    assert baseline.first_loss != baseline.final_loss
    fresh = counting.trainer(counting, baseline_settings(), CPU)
    first = fresh.step(counting.data(SETTINGS).batch(0)).item()
    assert baseline.first_loss == pytest.approx(first, rel=1e-6)  # warm-up and counting left no trace
    assert baseline.samples_per_second == 2 / baseline.median_batch_time
    assert baseline.launches_per_step > fused.launches_per_step > 5
    assert fused.launch_reduction_percent == 100 * (1 - fused.launches_per_step / baseline.launches_per_step)
    assert len(notes) == 3 and comparison.as_dict()["training_params"]["num_steps"] == 7  # that ran, not 50
    assert json.loads(json.dumps(comparison.as_dict()))["variants"][1] == dict(
        dataclasses.asdict(fused), measured=True)


@pytest.mark.parametrize("seconds, asked, ended, left", [  # of a round
    (3, None, "20 rounds", "2 rounds done, about 54 s"),
    (7, None, "9 rounds in 63 s", "1 round done, about 53 s"),
    (100, None, "6 rounds in 600 s", "1 round done, about 8 min"),
    (100, 9, "9 rounds", "1 round done, about 13 min")])
def test_rounds_end_as_asked_or_after_twenty_or_a_minute(seconds, asked, ended, left, monkeypatch):
    told = []
    monkeypatch.setattr(bench, "time", SimpleNamespace(monotonic=itertools.count(0, seconds).__next__))
    one = SimpleNamespace(reason=None, take_turn=lambda number, batch: None)
    assert alternate([one], [None], asked, NEVER, told.append) == ended
    assert told[0] == f"{left} left" and len(told) > 4


def measured(program, variants, broken=None):
    """(rows of these after two rounds, candidates); broken: a step of the last one's."""
    batch = program.data(SETTINGS).batch(0)
    candidates = [compare.candidate_of(program, variant, CPU) for variant in variants]
    bench.prepare_all(candidates, batch, CPU)
    if broken:
        candidates[-1].trainer.step = broken
    assert alternate(candidates, [batch], 2, NEVER) == "2 rounds"
    return [compare.row_of(variant, candidate, candidates[0])
            for variant, candidate in zip(variants, candidates, strict=True)], candidates


def test_a_peak_is_without_what_others_hold_and_with_what_a_run_alone_would():
    """On a GPU: of 150 MB others hold 100, but for this batch (1) and a library's workspace (8)."""
    allocator = dict(memory_allocated=100, max_memory_allocated=150, synchronize=0, reset_peak_memory_stats=0)
    one = bench.Candidate("x", lambda: SimpleNamespace(step=lambda batch: torch.tensor(1.0)))
    with pytest.MonkeyPatch.context() as patch:
        for name, size in allocator.items():
            patch.setattr(torch.cuda, name, lambda device, size=size: size * 2 ** 20)
        one.prepare(dict(x=torch.zeros(2 ** 18)), torch.device("cuda"), 8 * 2 ** 20)
    assert one.peak == 150 - (100 - 1 - 8) and one.first_loss == 1.0


def baseline_settings():
    return make_variants(SETTINGS, "baseline", False)[0].settings


def test_what_fails_is_a_row_with_its_reason_and_what_is_idle_is_not_tried(counting):
    variants = make_variants(SETTINGS, "only-cuda-graphs cuda-graphs+fused-relu fused", False)
    idle = ["here it is the same as baseline; CUDA graphs need a GPU", None, "here it is the same as "
            "cuda-graphs+fused-relu"]
    assert [v.reason for v in variants] == [None, *idle]
    variants[1].reason = variants[3].reason = None
    variants[2].reason = "it is idle"
    rows, _ = measured(counting, variants)
    assert [(row.measured, row.reason) for row in rows] == [
        (True, None), (False, "RuntimeError: no such kernel here"), (False, "it is idle"), (True, None)]
    variants[0].reason, variants[0].settings = None, variants[1].settings
    with pytest.raises(RuntimeError, match="no such kernel"):  # without the baseline there is nothing to say
        measured(counting, variants[:1])


def test_a_signal_ends_the_rounds_and_keeps_those_in_which_all_had_their_turn(counting):
    """It comes in the sixth round, in which the fused variant steps first."""
    class Stop(contextlib.nullcontext):
        asked = 0

        def __enter__(self):
            return self

        @property
        def signal(self):
            self.asked += 1
            return 2 if self.asked > 11 else None

    comparison = compare.compare(counting, SETTINGS, "fused compiled", 50, stop=Stop())
    assert comparison.ended.startswith("interrupted after") and [row.measured for row in comparison.rows] == [
        True, True, False]
    baseline, fused, compiled = comparison.rows
    assert len(baseline.step_times) == len(fused.step_times) == 5
    assert fused.final_loss == pytest.approx(baseline.final_loss, rel=1e-4)
    assert compiled.reason == compare.INTERRUPTED


def program_of(directory, *lines):
    """SECOND, whose processes run these lines of Python instead."""
    script = directory / "program.py"
    script.write_text("\n".join(["import json, os, sys, time", *lines]))
    return dataclasses.replace(SECOND, file=str(script))


def test_a_variant_whose_process_was_cut_short_is_not_measured(monkeypatch):
    """Whatever its comparison had found by then."""
    variant = make_variants(SETTINGS, "compiled", False)[1]
    content = dict(variants=[dict(name="compiled", measured=True, fusion_config={}, step_times=[1.0])])
    monkeypatch.setattr(compare, "compare_apart", lambda *_: (content, "exit code 143"))
    row = compare.measure_apart(SECOND, SETTINGS, variant, 4, NEVER)
    assert not row.measured and row.reason == "exit code 143"


@pytest.mark.parametrize("code, text, reason", [
    (0, "p: error: x", None), (2, "[   2 s] counting\np: error: no such row\n", "no such row"),
    (1, "torch.OutOfMemoryError: no memory\nadvice\n", "torch.OutOfMemoryError: no memory"),
    (1, "[  10 s] 20 rounds\n", "exit code 1"), (-11, "[   2 s] counting\n", "killed by SIGSEGV"),
    (-9, "", "killed by SIGKILL, as the kernel does when the host is out of memory")])
def test_why_a_process_failed(code, text, reason):
    """What goes on is no reason."""
    assert compare.why(code, text, "p") == reason


@pytest.mark.parametrize("asked, seconds, then, reason", [
    (None, 3, "time.sleep(60)", "not done after 3 s"),
    (signal.SIGINT, 60, "time.sleep(60)", compare.CUT_SHORT),
    (None, 60, "child and os._exit(7); time.sleep(60)", "exit code 7")])
def test_a_child_that_ends_leaves_no_process_and_says_why(asked, seconds, then, reason, tmp_path):
    """By its time limit, a signal or itself; it has a child of its own, as compilers do."""
    pid = tmp_path / "pid"
    program = program_of(tmp_path, "child = os.fork()",
                         "if child: print(child, file=open(sys.argv[2], 'w'), flush=True)", then)

    class Request:
        signal = property(lambda self: asked if pid.exists() and pid.read_text() else None)
    content, said = compare.compare_apart(program, [], str(pid), Request(), seconds)
    assert said == reason and not content
    wait_for(lambda: gone(pid.read_text().strip()))


def test_what_fails_in_a_round_gives_its_memory_back_and_the_others_go_on(counting):
    def broken(*_):
        raise RuntimeError("CUDA out of memory")
    rows, candidates = measured(counting, make_variants(SETTINGS, "fused", False), broken)
    assert [row.measured for row in rows] == [True, False] and "out of memory" in rows[1].reason
    assert candidates[1].trainer is None


# On paper


def a_row(name, seconds, before=1.0, **values):
    values = {**dict(
        fusion_config={}, step_times=9 * [seconds], median_batch_time=seconds, p20_batch_time=0.9 * seconds,
        p80_batch_time=1.2 * seconds, baseline_batch_time=before, samples_per_second=4 / seconds,
        speedup=before / seconds, speedup_low=0.95 * before / seconds, speedup_high=1.04 * before / seconds,
        batch_time_reduction_percent=100 * (1 - seconds / before), peak_memory_mb=60.0,
        saved_activation_mb=50.0, launches_per_step=300, baseline_step_times=9 * [before]), **values}
    return Row(name=name, **values)


ROWS = [a_row("baseline", 1.0, peak_memory_mb=80.0, saved_activation_mb=50.0,
              launches_per_step=400, speedup_low=None, speedup_high=None),
        a_row("fused", 0.8), a_row("only-a", 0.9), a_row("only-b", 1.02), a_row("only-c", 1.25),
        a_row("compiled", 0.5, 1.25, peak_memory_mb=None, launches_per_step=None, not_used=["x needs y"]),
        Row("ultra", {}, reason="out of | memory")]
for row in ROWS:
    row.add_savings(ROWS[0])


def test_a_row_on_paper():
    assert cells(ROWS[1]) == ["fused", "800.00 (720.00, 960.00)", "5.0", "1.25x (1.19, 1.30)", "60.0 (-25%)",
                              "50.0", "300 (-25%)"]
    assert cells(ROWS[0])[3:] == ["1", "80.0", "50.0", "400"]
    assert cells(a_row("few", 1.0, step_times=[1.0], speedup_low=None))[3] == "1.00x (1 round)"
    assert cells(a_row("x", 1.1, speedup=1.05))[3].startswith("1.05x") and "pace" in cells(
        a_row("x", 1.1, speedup=1.05))[3]  # the medians say the opposite, and the row says why
    assert cells(ROWS[5])[4:] == ["n/a", "50.0", "n/a"]
    assert cells(ROWS[6])[1].startswith("not measured: out of")


def test_what_the_table_says_in_words():
    assert in_words(ROWS) == ["The fastest setting here is compiled: 2.50x (95% interval 2.38 to 2.60).",
                              "Slower than the baseline: only-c (0.80x)."]
    assert "No setting here is faster" in " ".join(in_words([ROWS[0], ROWS[3]]))
    few = dict(speedup_low=None, speedup_high=None)
    assert "too few rounds" in " ".join(in_words([ROWS[0], a_row("only-a", 0.1, **few)]))
    assert in_words(ROWS[:1]) == ["Nothing but the baseline was measured."]


def test_headlines_name_their_row_and_divide_by_its_own_baseline():
    lines = headline(ROWS, "gpu_kernels")
    assert [line.partition(" by fused")[0] for line in lines] == [
        "Training speed: 1.25x speed-up", "Memory reduction: 25.0%", "Batch time improvement: 20.0%",
        "Kernel reduction: 25.0% measured"]  # which users look for
    assert "(4.0 -> 5.0 samples/sec)" in lines[0] and "(1000.00 -> 800.00 ms)" in lines[2]
    lines = headline([ROWS[0], *ROWS[2:]], "gpu_kernels")
    assert lines[0] == "Training speed: 2.50x speed-up by compiled (3.2 -> 8.0 samples/sec)"
    assert lines[1] == "Memory reduction: not measured for compiled"
    slow = headline([ROWS[0], ROWS[4]], "cpu_ops")
    assert "0.80x speed-up by only-c (a slowdown)" in slow[0] and "-25.0% by only-c (a slowdown)" in slow[2]
    assert headline(ROWS[:1], "cpu_ops") == []


def test_a_headline_that_is_not_sure_shows_no_medians_which_may_differ_the_other_way():
    noisy = dict(median_batch_time=0.0888, baseline_batch_time=0.0824, speedup=1.12,
                 batch_time_reduction_percent=10.7)
    for low, high, rates, times in ((0.9, 1.3, "95% interval 0.90 to 1.30, within noise", "within noise"),
                                    (None, None, "too few rounds to say", "too few rounds to say")):
        row = a_row("fused", 0.0888, **noisy, speedup_low=low, speedup_high=high)
        lines = headline([ROWS[0], row], "cpu_ops")
        assert lines[0] == f"Training speed: 1.12x speed-up by fused ({rates})"
        assert lines[2] == f"Batch time improvement: 10.7% by fused ({times})"
        slower = dataclasses.replace(row, speedup=0.96)
        assert all("(a slowdown, " in headline([ROWS[0], slower], "cpu_ops")[line] for line in (0, 2))


def test_below_the_table():
    rows = [*ROWS[:-1], dataclasses.replace(ROWS[4], uncounted="3 of 5 kernels")]
    lines = below(Comparison(dict(nominal=None, launch_kind="cpu_ops"), [], rows, "9 rounds"))
    assert lines[0] == "Steps in turn: 9 rounds" and "1250.00 ms" in lines[1]
    assert lines[2:4] == ["Launches of only-c: 3 of 5 kernels", "Not used here: x needs y"]
    assert lines[-1].startswith("Kernel reduction: ")
    # a signal in the second round
    rows = [ROWS[0], a_row("a", 0.8, step_times=[0.8], baseline_step_times=[1.0])]
    assert "process" not in " ".join(below(Comparison(dict(nominal=None, launch_kind=""), [], rows)))


def row(name, speedup, low, loss=4.0, **switches):
    fusion = dataclasses.asdict(dataclasses.replace(SETTINGS.fusion, **switches))
    return compare.Row(name, fusion, step_times=[1.0], speedup=speedup, speedup_low=low,
                       speedup_high=low and 9.0, first_loss=loss)


@pytest.mark.parametrize("low, loss, lines, flags", [
    (1.2, 4.001, 1, "--enable-fused-residual"), (1.2, 4.1, 2, None), (0.9, 4.0, 1, None),
    (None, 4.0, 1, None), (1.2, math.nan, 2, None)])
def test_the_command_to_copy_is_of_what_is_faster_beyond_doubt_and_has_the_baselines_loss(low, loss, lines,
                                                                                          flags):
    off = dict(enable_fused_relu=False)
    rows = [row("baseline", 1.0, None, **off), row("fast", 2.0, low, loss, enable_fused_residual=True),
            compare.Row("absent", {}, reason="no GPU")]
    said = to_copy(SECOND, SETTINGS, rows)
    assert len(said) == lines and ("did not pass" in said[0]) == (lines == 2)
    assert said[-1].endswith(f"--num-steps={SETTINGS.training.num_steps}")
    assert (flags or "--disable-fused-relu") in said[-1] and ("(fast)" in said[-1]) == bool(flags)
