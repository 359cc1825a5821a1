"""--compare-fusion: its figures and tables by hand, from times that somebody else measured."""
import contextlib
import json
import os
import signal
from dataclasses import asdict, replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from fusion_lab.measuring.comparison import compare as comparison
from fusion_lab.measuring.comparison import pace as pacing
from fusion_lab.measuring.comparison import rung, rungs
from fusion_lab.measuring.comparison import table as comparison_table
from fusion_lab.measuring.comparison.pace import Pace
from fusion_lab.measuring.comparison.rows import reduction, rows_of
from fusion_lab.measuring.comparison.rungs import Rungs
from fusion_lab.measuring.comparison.table import (
    LiveTable,
    cells,
    detail_table,
    headline,
    print_details,
    table,
)
from fusion_lab.measuring.comparison.variants import (
    ALL,
    BASELINE,
    TOO_LATE,
    UNMEASURED,
    Variant,
    distinct,
    with_fusion,
)
from fusion_lab.measuring.comparison.worth import UNKNOWN, add_worth, operations_by_sublayer, touched
from fusion_lab.measuring.probe import Findings
from fusion_lab.measuring.tables import aligned
from fusion_lab.training.files import Interrupted
from tests.second_program import PROGRAM as SECOND

PLAIN = SECOND.fusion_config.preset(False)
SETTINGS = with_fusion(SECOND.settings(batch_size=3), PLAIN)
BEFORE, AFTER = [8.0, 4.0, 6.0, 7.0, 5.0, 9.0], [4.0, 4.0, 2.0, 7.0, 10.0, 3.0]  # s of each round
MB = 2 ** 20


def variant(name, steps, fusion=PLAIN, losses=(5.0, 4.0, 3.0, 2.0, 1.5, 1.0), **found):
    """Steps of so many seconds, a quarter of them forward, half backward, a quarter in the optimizer."""
    phases = np.array(steps)[:, None] * [0.25, 0.5, 0.25]
    findings = dict(saved=dict(up=2 * MB, rest=6 * MB), flops=4 * 10 ** 12, launches=100, peak_memory_mb=40.0,
                    first_step_time=2.5)
    return Variant(name, with_fusion(SETTINGS, fusion), found=Findings(**{**findings, **found}),
                   timer=SimpleNamespace(seconds=lambda: phases), losses=list(losses))


def two_rows(**values):
    faster = variant("all", AFTER, losses=(5.0, 4.0, 3.0, 2.0, 1.5, 1.25), launches=50, peak_memory_mb=30.0,
                     saved=dict(up=MB, rest=3 * MB), **values)
    return rows_of([variant("baseline", BEFORE), faster], 2e12)


def test_figures_of_a_row_by_hand():
    """Sorted, the steps are 4 5 6 7 8 9 and 2 3 4 4 7 10; the paired speed-ups 0.5 1 1 2 3 3."""
    before, after = two_rows()
    assert after == dict(
        name="all", measured=True, reason=None, fusion_config=asdict(PLAIN), median_batch_time=4.0,
        p20_batch_time=3.0, p80_batch_time=7.0, median_forward_time=1.0, median_backward_time=2.0,
        median_optimizer_time=1.0, first_step_time=2.5, samples_per_second=0.75, peak_memory_mb=30.0,
        saved_activation_mb=4.0, saved_activation_mb_by_sublayer=dict(up=1.0, rest=3.0), launches_per_step=50,
        flops_per_step=4 * 10 ** 12, achieved_tflops=1.0, first_loss=5.0, final_loss=1.25,
        baseline_batch_time=6.5, speedup=1.625, speedup_p20=1.0, speedup_p80=3.0, rounds=6,
        speedup_low=0.5, speedup_high=3.0,
        batch_time_reduction_percent=pytest.approx(100 * 2.5 / 6.5), final_loss_difference=0.25, mfu=0.5,
        peak_memory_reduction_percent=25.0, saved_activation_reduction_percent=50.0,
        launch_reduction_percent=50.0, flop_reduction_percent=0.0, **UNKNOWN)
    assert [before[f"{name}_batch_time"] for name in ("p20", "median", "p80")] == [5.0, 6.5, 8.0]
    assert (before["speedup"], before["speedup_p20"], before["speedup_p80"]) == (1.0, 1.0, 1.0)
    assert before["samples_per_second"] == pytest.approx(3 / 6.5) and before["final_loss_difference"] == 0


def test_rounds_that_a_signal_cut_short_are_compared_as_far_as_they_go():
    """Four of six: the speed-ups are 2 1 3 1, and the loss is compared with the baseline's fourth."""
    _, after = rows_of([variant("baseline", BEFORE), variant("all", AFTER[:4], losses=(5, 4, 3, 2.5))], 1e12)
    assert after["speedup_p20"] == 1.0 and after["speedup_p80"] == pytest.approx(2.4)
    assert after["final_loss_difference"] == 0.5 and after["speedup"] == 6.5 / 4
    assert (after["rounds"], after["speedup_low"], after["speedup_high"]) == (4, None, None)
    clear = rows_of([variant("baseline", [4.0] * 5 + [9.0]), variant("all", [2.0] * 5 + [1.0])], 1e12)[1]
    assert (clear["speedup"], clear["speedup_low"], clear["speedup_high"]) == (2.0, 2.0, 9.0)
    odd = rows_of([variant("baseline", [1, 2, 3.0, 4, 5]), variant("all", [1, 2, 99.0, 4, 5])], 1e12)[1]
    assert odd["speedup"] == odd["speedup_p20"] == 0.75  # of the paired ones that is 0.81
    lower = rows_of([variant("baseline", BEFORE), variant("all", AFTER, losses=[0.75] * 6)], 1e12)[1]
    assert lower["final_loss_difference"] == 0.25
    longer, = rows_of([variant("all", AFTER)], 1e12)
    assert longer["speedup"] == 1.0
    shorter = variant("baseline", BEFORE[:2], losses=(3, 3))
    _, more = rows_of([shorter, variant("all", [1.0] * 6, losses=(3, 2))], 1e12)
    assert (more["speedup_p20"], more["speedup_p80"]) == (pytest.approx(4.8), pytest.approx(7.2))


def test_a_graph_has_no_phases_and_a_variant_that_failed_a_reason():
    graph = replace(PLAIN, enable_cuda_graphs=True)
    failed = Variant("broken", SETTINGS, reason="no such kernel")
    variants = [variant("baseline", BEFORE), variant("+ graph", AFTER, graph), failed]
    baseline, row, broken = rows_of(variants, 1e12)
    assert [row[f"median_{phase}_time"] for phase in ("forward", "backward", "optimizer")] == [None] * 3
    assert broken == dict(name="broken", measured=False, reason="no such kernel", fusion_config=asdict(PLAIN))
    assert cells(broken, None) == ["broken", "not measured: no such kernel"]
    assert [line[0] for line in detail_table([baseline, row, broken])] == ["variant", "baseline", "+ graph"]
    assert detail_table([baseline, row])[1:] == [
        ["baseline", "1625.00", "3250.00", "1625.00", "0.615", "61.5%", "2.50", "", "", ""],
        ["+ graph", "in one graph", "in one graph", "in one graph", "1.000", "100.0%", "2.50", "", "", ""]]


def test_what_a_fusion_is_worth_by_hand():
    """It touches half of a baseline of 6.5 s and saves 2.5: at most twice as fast, 77% of what there was."""
    plain = {"up": ["relu"], "down": ["mm"], "rest": ["add"]}
    variants = [variant("baseline", BEFORE), *(variant(name, AFTER) for name in ("all", "graph", "compiled"))]
    for v, operations in zip(variants, (plain, {**plain, "down": ["addmm"]}, plain, None), strict=True):
        v.operations = operations
    rows = rows_of(variants, 1e12)
    add_worth(rows[:3], variants[:3], dict(up=0.3, down=0.5, rest=0.2))
    for key in UNKNOWN:
        assert rows[0][key] is rows[2][key] is rows[3][key] is None
    assert rows[1]["touched_sublayers"] == ["down"] and rows[1]["touched_share"] == 0.5
    assert rows[1]["amdahl_ceiling"] == 2.0
    assert rows[1]["amdahl_reached"] == pytest.approx((1 - 4 / 6.5) / 0.5)
    assert detail_table(rows)[2][-3:] == ["50%", "2.00x", "77%"]
    add_worth(rows[:2], variants[:2], dict(up=0.0, down=1.0, rest=0.0))
    assert rows[1]["amdahl_ceiling"] is None and detail_table(rows)[2][-2] == ""
    add_worth(rows[:2], variants[:2], dict(up=1.0))
    assert rows[1]["amdahl_ceiling"] == 1.0 and rows[1]["amdahl_reached"] is None


def test_the_sublayers_that_a_switch_touches_are_seen_not_declared():
    settings = SETTINGS.having(width=8)
    found = {}
    for name, fusion in dict(plain=PLAIN, fused=SECOND.fusion_config(), again=PLAIN).items():
        trainer = SECOND.trainer(SECOND, with_fusion(settings, fusion), torch.device("cpu"))
        found[name] = operations_by_sublayer(trainer, SECOND.data(settings).batch(0))
    assert touched(found["again"], found["plain"]) == []
    assert touched(found["fused"], found["plain"]) == ["up"]  # where its ReLU is fused


def test_what_is_saved_is_a_percentage_of_what_there_was():
    assert (reduction(8.0, 2.0), reduction(2.0, 3.0), reduction(4, 0)) == (75.0, -50.0, 100.0)
    assert reduction(None, 2.0) is reduction(0, 2.0) is reduction(2.0, None) is None


# On paper


NOMINAL = dict(kernel_reduction_percent=80.0, total_kernel_reduction=12)


def test_a_row_of_the_table():
    before, after = two_rows()
    assert cells(after, before) == ["all", "4000.00 (3000.00, 7000.00)", "0.8", "1.62x (0.50, 3.00)",
                            "30.0 (+25.0%)", "4.0 (+50.0%)", "50 (+50.0%)"]
    assert cells(before, before)[3] == "1.00x"
    few = dict(after, rounds=2, speedup_low=None, speedup_high=None)
    assert cells(few, before)[3] == "1.62x (2 rounds)" and comparison_table.within_noise(few)
    unknown = dict(after, peak_memory_mb=None, launches_per_step=None)
    assert cells(unknown, before)[4:] == ["n/a", "4.0 (+50.0%)", "n/a"]
    compiled = dict(after, baseline_batch_time=5.0)  # of its own process
    assert cells(compiled, before)[3] == "1.62x (0.50, 3.00) of 5000.00 ms"
    lines = table([before, after])
    assert lines[0] == ["variant", "step ms (p20, p80)", "samples/s", "speed-up (95%)", "peak MB (saved)",
                        "saved act. MB (saved)", "launches (fewer)"]
    assert lines[1:] == [cells(before, before), cells(after, before)] and len(lines[0]) == len(lines[1])


def test_the_headline_is_of_all_default_fusions():
    before, after = two_rows()
    other = dict(after, name="+ graph", speedup=9.0)
    clear = dict(after, speedup_low=1.01)
    assert headline([before, clear, other], NOMINAL, "cpu_ops") == [
        "Training speed: 1.62x speed-up (0.5 -> 0.8 samples/sec)",
        "Memory reduction: 25.0% (peak 40.0 -> 30.0 MB)",
        "Batch time improvement: 38.5% (6500.00 -> 4000.00 ms)",
        "Kernel reduction: 50.0% measured (100 -> 50 cpu_ops per step); nominal 80.0% (12 fewer kernels)"]
    unknown = dict(after, peak_memory_reduction_percent=None, launch_reduction_percent=None)
    assert headline([before, unknown], None, "cpu_ops")[1::2] == ["Memory reduction: not measured",
                                                                 "Kernel reduction: not measured"]
    noise = headline([before, dict(after, speedup_low=1.0)], None, "")
    assert "1.62x speed-up (within noise) (0.5" in noise[0] and "38.5% (within noise) (6500" in noise[2]
    lost = dict(clear, name="x", speedup=0.999)
    slow = headline([before, other, lost], None, "")  # the last one, then
    assert "1.00x speed-up (a slowdown) (" in slow[0] and "% (a slowdown) (" in slow[2]
    both = headline([before, dict(lost, speedup_low=0.9)], None, "")
    assert "1.00x speed-up (a slowdown, within noise) (" in both[0]
    assert "slowdown" not in headline([before, dict(clear, speedup=1.0)], None, "")[0]
    failed = dict(name="x", measured=False, reason="why")
    assert headline([before, failed], None, "") == ["No headline: nothing but the baseline was measured"]
    assert "9.00x" in headline([before, dict(failed, name="all"), other, failed], None, "")[0]


def test_details_name_what_is_within_noise(capsys):
    before, after = two_rows()
    rows = [before, *(dict(after, name=name, speedup_low=low, speedup_high=high) for name, low, high in (
        ("unclear", 0.9, 1.1), ("faster", 1.01, 1.2), ("slower", 0.8, 0.99), ("from one", 1.0, 1.3),
        ("to one", 0.7, 1.0)))]
    rows.append(dict(name="broken", measured=False, reason="x"))
    print_details(dict(variants=rows, nominal=None, launch_kind="gpu_kernels"))
    out = capsys.readouterr().out
    assert "too few rounds for one): unclear, from one, to one\n" in out
    few = dict(variants=[before, rows[2]], nominal=None, launch_kind="gpu_kernels")
    print_details(few)
    assert capsys.readouterr().out.splitlines() == [
        "", *aligned(detail_table(few["variants"])), "",
        *headline(few["variants"], None, "gpu_kernels")]
    for share in (1.0, 1.01):
        print_details(dict(few, variants=[before, dict(rows[2], mfu=share)]))
        assert ("MFU above 100%: a fault of the bound" in capsys.readouterr().out) == (share > 1)


@pytest.fixture
def live(monkeypatch):
    """A LiveTable of two variants at 100 s, whose saved rows are counted; and a list with its time."""
    now, saved = [100.0], []
    monkeypatch.setattr(comparison_table.time, "monotonic", lambda: now[0])
    variants = [variant("baseline", BEFORE), variant("all", AFTER, peak_memory_mb=30.0),
                Variant("a name of some length", SETTINGS)]
    made = LiveTable(lambda result: saved.append([row["measured"] for row in result["variants"]]))
    made.begin(dict(variants=[], nominal=None, launch_kind="cpu_ops"), variants, 2e12)
    return SimpleNamespace(table=made, now=now, saved=saved, variants=variants)


def test_the_table_prints_every_row_once(live, capsys):
    live.now[0] = 103.6
    live.table.note("at work")
    before, after = two_rows()
    live.table.rows.append(before)
    live.table.add()
    first = capsys.readouterr()
    assert first.err == "[   4 s] at work\n" and first.out.count("\n") == 2
    assert first.out.startswith("variant                step ms (p20, p80)")
    live.table.rows.append(after)
    live.table.add()
    live.table.add()
    again = capsys.readouterr().out.splitlines()
    assert len(again) == 1 and again[0].split()[0] == "all" and live.saved == [[True], [True] * 2, [True] * 2]
    silent = LiveTable()
    silent.note("nothing")
    silent.begin(dict(variants=[before]), live.variants, 1e12)
    silent.progress(live.variants[:2], 1, Pace(3))
    silent.add()
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize("terminal", [False, True])
def test_times_are_shown_from_the_first_round_on(terminal, live, capsys):
    """In lines after the first round and every ten seconds; on a terminal in place, until the row comes."""
    table, pace = live.table, Pace(4)
    table.in_place, table.every = terminal, 0.5 if terminal else 10.0
    pace.over(live.variants, 0)
    drawn = ["variant   step ms (p20, p80)          speed-up (95%)",
             "baseline  6500.00 (5000.00, 8000.00)  1.00x",
             "all       4000.00 (3000.00, 7000.00)  1.62x (0.50, 3.00)"]
    live.now[0] = 104.0
    table.progress(live.variants[:2], 1, pace)
    assert capsys.readouterr().err.splitlines() == [*drawn, "[   4 s] round 1, at most 12 s left"]
    live.now[0] = 108.0
    table.progress(live.variants[:2], 2, pace)
    again = capsys.readouterr().err
    assert again == (("\x1b[4A\x1b[J" + "\n".join([*drawn, "[   8 s] round 2, at most 8 s left\n"]))
                     if terminal else "")
    table.note("next")
    assert capsys.readouterr().err == ("\x1b[4A\x1b[J" if terminal else "") + "[   8 s] next\n"


def test_rounds_that_a_signal_broke_off_are_in_the_table(live, capsys):
    table = live.table
    table.finish(2)
    assert capsys.readouterr().out == "Interrupted before the first round: no figures\n" and live.saved == []
    table.progress(live.variants[:2], 6, Pace(None, 50.0))
    live.variants[0].losses.append(0.5)  # in the middle of a round
    table.finish(2)
    out = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in out[1:3]] == ["baseline", "all"]
    assert live.saved[-1] == [True, True, False]
    assert out[3] == "Interrupted: these are the rounds before it; 1 more row not measured"
    assert table.rows[2]["reason"] == UNMEASURED and not any("some length" in line for line in out)


def test_when_rounds_end(monkeypatch):
    """After so many; or when no other one fits into the time; or when all intervals are narrow."""
    now = [0.0]
    monkeypatch.setattr(pacing.time, "monotonic", lambda: now[0])
    pair = [variant("baseline", [1.0] * 20), variant("all", [1.0] * 10 + [1.1] * 10)]
    steady = [pair[0], variant("all", [0.5] * 20), Variant("broken", SETTINGS, reason="why")]

    def rounds(pace, variants, seconds):
        now[0] = number = 0
        while not pace.over(variants, number):
            number, now[0] = number + 1, now[0] + seconds
        return number
    assert rounds(Pace(3), steady, 1e9) == 3 and rounds(Pace(30, 10.0), steady, 0.01) == 30
    assert rounds(Pace(None, 10.0), steady, 0.01) == pacing.FEWEST
    assert rounds(Pace(None, 10.0), pair, 3.0) == 3 and rounds(Pace(None, 10.0), pair, 99.0) == 1
    assert str(Pace(3)) == "3 of each" and str(Pace(3, 9)) == "3 of each or at most 9 s of them"
    for device, whole in ((CPU, 30.0), (GPU, 15.0)):
        now[0] = 0
        assert Pace(None, 10.0).whole(device) == whole and Pace(3).whole(device) is None
    late = Pace(None, 10.0)
    now[0] += 20.0  # counting took all of it
    assert late.left_text() == ", at most 2 s left" and not late.over(pair, 0)
    now[0] += 1.0
    assert not late.over(pair, 1) and late.over(pair, 1.0 / 2) and late.left() == 1.5
    part = Pace(7, 10.0).part(0.5)
    assert (part.steps, part.seconds) == (7, 5.0) and Pace(7).part(0.5).left_text() == ""
    assert Pace(7, 10.0).part(0.5, now[0] + 4).seconds == 4.0 and Pace(7, 10.0).part(0.5, now[0] - 1).late()
    now[0] += 3.7  # a quarter of its 5 s is for rounds
    assert not part.late() and not Pace(7).part(0.5).late()
    part.slowest = 0.1  # s that one took: there is no time for another
    assert part.late() and part.part(1.0).slowest == 0.0  # rows of another table take their own time
    now[0], part.slowest = now[0] + 0.1, 0.0
    assert part.late() and not Pace(7, 10.0).late()


# Who measures when


CPU, GPU = torch.device("cpu"), torch.device("cuda")
COMPILED = replace(PLAIN, enable_torch_compile=True)


class FakeGuardian:
    """Notes whom it guards."""
    told = []

    def tell(self, sign, process):
        FakeGuardian.told.append(f"{sign}{process}")

    def close(self):
        FakeGuardian.told.append("closed")


class FakeRung:
    """A process that answers with these rows, one each time it is asked, and notes what it hears."""
    rows, heard_by_all, ready, compiling = [], [], True, ""

    def __init__(self, program, variant, pace):
        self.variant, self.log = variant, FakeRung.heard_by_all
        self.guest = SimpleNamespace(wait_until_ready=lambda: True, go=lambda: self.log.append("go"),
                                     process=SimpleNamespace(pid=f" {variant.name}"))
        self.log.append(f"start {variant.name}")

    def heard(self, seconds):
        return FakeRung.ready and self.variant.name not in FakeRung.compiling

    def signal(self, number):
        self.log.append(number)

    def row(self):
        return FakeRung.rows.pop(0)

    def end(self):
        self.log.append(f"end {self.variant.name}")


@pytest.fixture
def fake_rungs(monkeypatch):
    monkeypatch.setattr(rungs, "Rung", FakeRung)
    monkeypatch.setattr(rungs, "Guardian", FakeGuardian)
    FakeRung.rows, FakeRung.heard_by_all, FakeRung.compiling, FakeGuardian.told = [], [], "", []
    monkeypatch.setattr(rungs, "free_memory", {GPU: 200 * 2 ** 20}.get)
    monkeypatch.setattr(rungs.os, "setpriority", lambda which, process, value: FakeGuardian.told.append(
        f"nice{process}") if (which, value) == (os.PRIO_PROCESS, 19) else None)
    return FakeRung.heard_by_all


def measured(name, **values):
    return dict(name=name, measured=True, median_batch_time=0.5, flops_per_step=10, peak_memory_mb=5.0,
                saved_activation_mb=4.0, launches_per_step=None, **values)


BASE = measured("baseline", reason=None) | dict(peak_memory_mb=10.0, launches_per_step=9)


def test_those_that_compile_are_stopped_while_others_are_measured(fake_rungs, monkeypatch):
    slept = []
    monkeypatch.setattr(rungs.time, "sleep", slept.append)
    variants = [Variant(name, with_fusion(SETTINGS, COMPILED)) for name in "abc"]
    FakeRung.compiling, FakeRung.rows = "bc", [measured(name) for name in "abc"]
    with Rungs(SECOND, variants, GPU, print, Pace(5)) as all_three:
        all_three.begin()
        with contextlib.suppress(KeyError), all_three.paused():
            fake_rungs.append("within")
            raise KeyError
        started, fake_rungs[:] = fake_rungs[:], []
        FakeRung.compiling = "c"
        next(all_three.measure(BASE, 40.0))
    stop, go_on = signal.SIGSTOP, signal.SIGCONT
    assert started == ["start a", "start b", "start c", stop, stop, "within", go_on, go_on]
    assert fake_rungs == [stop, "go", go_on, "end a", "end b", "end c"]
    assert FakeGuardian.told == [*(f"{what} {name}" for name in "abc" for what in ("+", "nice")),
                                 "- a", "- b", "- c", "closed"]
    with Rungs(SECOND, variants, CPU, print, Pace(5)) as none, none.paused():
        none.begin()
        assert slept == [rungs.SETTLE_SECONDS] * 2 + [0] and none.running == [] and none.guardian is None


def test_they_compile_early_only_where_there_is_memory_for_all(fake_rungs):
    variants = [Variant(name, with_fusion(SETTINGS, COMPILED)) for name in "ab"]
    for peak, early in ((50.0, 2), (50.1, 0)):
        with Rungs(SECOND, variants, GPU, print, Pace(5)) as both:
            both.begin(peak)
            assert len(both.running) == early
            both.begin()
            both.begin()
            assert len(both.running) == 2


def test_compiled_variants_one_after_the_other_on_a_cpu(fake_rungs, monkeypatch):
    """All of it has three budgets."""
    now, said = [1000.0], []
    monkeypatch.setattr(rungs.time, "monotonic", lambda: now[0])
    variants = [Variant(name, with_fusion(SETTINGS, COMPILED)) for name in "abc"]
    FakeRung.rows = [measured("a"), dict(name="b", measured=False, reason="out of memory"), measured("c")]
    with Rungs(SECOND, variants, CPU, said.append, Pace(None, 8.0)) as queue:
        now[0] += 4
        first, second, third = queue.measure(BASE, 40.0)
    assert (first["mfu"], first["peak_memory_reduction_percent"]) == (0.5, 50.0)
    assert first["launch_reduction_percent"] is None and "mfu" not in second and third["name"] == "c"
    assert said == [f"{what} {name}, {number} of 3, at most 20 s left" for number, name in
                    enumerate("abc", 1) for what in ("compiling", "measuring")]
    assert fake_rungs.count("go") == 3 and fake_rungs[-3:] == ["end a", "end b", "end c"]
    assert FakeGuardian.told == ["+ a", "+ b", "+ c", "- a", "- b", "- c", "closed"]


def test_what_ran_out_of_memory_beside_others_has_a_second_try(fake_rungs):
    said, variants = [], [Variant(name, with_fusion(SETTINGS, COMPILED)) for name in "ab"]
    FakeRung.rows = [dict(name="a", measured=False, reason="CUDA error: out of memory"), measured("b"),
                     measured("a again")]
    with Rungs(SECOND, variants, GPU, said.append, Pace(5)) as both:
        both.begin()
        rows = list(both.measure(BASE, 40.0))
    assert [row["name"] for row in rows] == ["b", "a again"]
    assert said[0] == "waiting for 2 variants to compile"
    assert fake_rungs == ["start a", "start b", "go", "go", "end a", "end b", "start a", "go", "end a"]
    assert FakeGuardian.told == ["+ a", "nice a", "+ b", "nice b", "- a", "- b", "+ a", "nice a", "- a",
                                 "closed"]


@pytest.mark.parametrize("late", [False, True])
def test_slow_compilers_take_a_share_of_the_time_and_a_reason_is_kept(late, fake_rungs, monkeypatch):
    """Six tenths of what is left, however many there are; the last of them ran out of memory."""
    now, waited, variants = [1000.0], [], [Variant(name, with_fusion(SETTINGS, COMPILED)) for name in "abc"]
    monkeypatch.setattr(rungs.time, "monotonic", lambda: now[0])

    def heard(self, seconds):
        if self.variant.name == "c":
            return not (late and "go" in fake_rungs)
        waited.append(seconds)
        now[0] += seconds
        return False
    monkeypatch.setattr(FakeRung, "heard", heard)
    FakeRung.rows = [dict(name="c", measured=False, reason="CUDA error: out of memory"), measured("c")]
    with Rungs(SECOND, variants, GPU, print, Pace(None, 20.0)) as three:
        now[0] += 20.0
        three.begin()
        rows = list(three.measure(BASE, 40.0))
    assert waited[0] == pytest.approx(6.0) and now[0] == pytest.approx(1026.0) and not any(waited[1:])
    assert [row.get("reason") for row in rows] == [
        TOO_LATE, TOO_LATE, "CUDA error: out of memory" if late else None]


def test_what_has_not_compiled_when_the_time_is_spent_has_that_for_a_reason(fake_rungs, monkeypatch):
    variants = [Variant(name, with_fusion(SETTINGS, COMPILED)) for name in "ab"]
    monkeypatch.setattr(FakeRung, "ready", False)
    for device in (CPU, GPU):
        with Rungs(SECOND, variants, device, print, Pace(None, 1e-9)) as queue:
            queue.begin()
            assert [row["reason"] for row in queue.measure(BASE, 1.0)] == [TOO_LATE] * 2
    assert fake_rungs == ["start a", "start b", signal.SIGKILL, signal.SIGKILL, "end a", "end b"]


def stepping(name, log, fails_at=None, device=CPU):
    """A variant with a trainer that notes each of its steps and of its marks."""
    def step(batch, mark=None):
        log.append((name, batch))
        if mark:
            mark()
            if fails_at == sum(entry == "mark" for entry in log):
                raise RuntimeError("broken\nreally")
        return torch.tensor(1.0)

    @contextlib.contextmanager
    def preserved():
        log.append(f"keep {name}")
        try:
            yield
        finally:
            log.append(f"restore {name}")

    made = Variant(name, SETTINGS, trainer=SimpleNamespace(step=step, preserved=preserved, device=device))
    made.timer = SimpleNamespace(start=lambda: log.append("start"), mark=lambda: log.append("mark"))
    return made


def test_rounds_begin_with_another_variant_each_and_repeat_their_batches():
    log = []
    variants = [stepping(name, log) for name in "abc"]
    heard = []
    comparison.alternate(variants, Pace(4), ["x", "y"], heard.append)
    assert heard == [1, 2, 3, 4]
    assert [entry for entry in log if isinstance(entry, tuple)] == [
        *((name, "x") for name in "abc"), *((name, "y") for name in "bca"),
        *((name, "x") for name in "cab"), *((name, "y") for name in "abc")]
    assert log[:3] == ["keep a", "keep b", "keep c"] and log[-3:] == ["restore c", "restore b", "restore a"]
    assert log[3:6] == ["start", ("a", "x"), "mark"] and variants[0].losses == [1.0] * 4


def test_a_variant_that_fails_drops_out_and_a_signal_ends_at_once():
    log = []
    variants = [stepping(BASELINE, log), stepping("b", log, fails_at=3)]
    comparison.alternate(variants, Pace(4), ["x"])
    assert variants[1].reason == "RuntimeError: broken" and variants[1].trainer is None
    assert len(variants[0].losses) == 4 and len(variants[1].losses) == 1
    log.clear()
    again = [stepping(name, log) for name in "ab"]

    def signalled(rounds):
        if rounds == 2:
            raise Interrupted
    with pytest.raises(Interrupted):
        comparison.alternate(again, Pace(9), ["x"], signalled)
    assert [variant.losses for variant in again] == [[1.0, 1.0]] * 2 and log[-1] == "restore a"


def test_settings_that_are_the_same_have_one_row_under_their_first_name():
    other = replace(PLAIN, enable_fused_relu=not PLAIN.enable_fused_relu)
    for names, expected in ((("a", "b", "c"), ["a", "b"]), (("a", "b", ALL), [ALL, "b"]),
                            ((ALL, "b", "c"), [ALL, "b"])):
        found = distinct(SETTINGS, dict(zip(names, (PLAIN, other, PLAIN), strict=True)))
        assert [variant.name for variant in found] == expected
        assert [variant.settings.fusion for variant in found] == [PLAIN, other]


def test_on_a_gpu_an_untimed_step_keeps_the_queue_full(monkeypatch):
    log, seeds = [], []
    monkeypatch.setattr(torch, "manual_seed", seeds.append)
    comparison.take_turn(stepping("a", log, device=GPU), 7, "x")
    assert log == [("a", "x"), "start", ("a", "x"), "mark"] and seeds == [7]


def test_reasons_are_one_line_and_the_baseline_must_run():
    for error, reason in ((ValueError("x" * 200), f"ValueError: {'x' * 160}"),
                          (KeyError(), "KeyError: no message")):
        broken = Variant("a", SETTINGS, trainer="there")
        with comparison.reasons(broken):
            raise error
        assert (broken.reason, broken.trainer) == (reason, None)
    with pytest.raises(ValueError), comparison.reasons(Variant(BASELINE, SETTINGS)):
        raise ValueError


def test_memory_alone_on_a_gpu_is_without_what_others_left(monkeypatch):
    """Of 30 MB when the variant begins, 10 are its batch; it peaks at 100."""
    batch = dict(x=SimpleNamespace(nbytes=6 * MB), y=SimpleNamespace(nbytes=4 * MB))
    order, ticks = [], iter([1.0, 3.5])
    trainer = SimpleNamespace(device=GPU, preserved=contextlib.nullcontext,
                              step=lambda _: order.append("step") or torch.ones(()))
    program = replace(SECOND, trainer=lambda *_: trainer)
    clear = "_cuda_clearCublasWorkspaces"
    monkeypatch.setattr(torch._C, clear, lambda: order.append("cleared"), raising=False)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 30 * MB)
    monkeypatch.setattr(comparison, "process_settings", lambda *_: order.append("settings"))
    monkeypatch.setattr(comparison.time, "perf_counter", lambda: next(ticks))
    monkeypatch.setattr(comparison, "probe", lambda trainer, batch: Findings({}, 7))
    monkeypatch.setattr(comparison, "peak_of_two_steps", lambda *_: 100.0)
    monkeypatch.setattr(comparison, "operations_by_sublayer", lambda *_: {})
    alone = Variant("a", SETTINGS)
    comparison.measure_alone(program, alone, GPU, batch)
    assert (alone.found.peak_memory_mb, alone.found.first_step_time, alone.found.flops) == (80.0, 2.5, 7)
    assert alone.trainer is None and order == ["cleared", "settings", "step"]
    idle = Variant("idle", with_fusion(SETTINGS, replace(PLAIN, enable_master_weights=True)))
    comparison.measure_alone(program, idle, GPU, batch)
    assert idle.found is None and idle.reason == "master weights need --use-amp" and len(order) == 3


def test_a_process_of_its_own_says_its_row_last(monkeypatch, capsys):
    """Here in this one: after the step that is counted, its steps and the baseline's alternate."""
    turns = []

    class Noting(SECOND.trainer):
        def step(self, batch, mark=None):
            if mark:
                turns.append(self.settings.fusion.enable_fused_relu)
            return super().step(batch, mark or (lambda: None))

    program = replace(SECOND, trainer=Noting)
    monkeypatch.setattr(rung, "load_program", lambda file: program if file == "here.py" else None)
    settings = SECOND.settings(width=4, batch_size=3, num_steps=20, device="cpu", warmup_steps=1)
    rung.main("here.py", "mine", json.dumps(settings.as_dict()), "[20, null]")
    row = json.loads(capsys.readouterr().out)
    assert turns == [True, *[False, True, True, False] * 10] and row["name"] == "mine" and row["measured"]
    assert row["speedup"] == pytest.approx(row["baseline_batch_time"] / row["median_batch_time"])
    assert row["samples_per_second"] == pytest.approx(3 / row["median_batch_time"])
    idle = settings.having(enable_master_weights=True)
    rung.main("here.py", "idle", json.dumps(idle.as_dict()), "[20, null]")
    row = json.loads(capsys.readouterr().out)
    assert (row["measured"], row["reason"], len(turns)) == (False, "master weights need --use-amp", 41)
