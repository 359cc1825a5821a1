"""--compare-fusion: its figures and tables by hand, from times that somebody else measured."""
import contextlib
import json
import signal
from dataclasses import asdict, replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import tiny_openfold_v2 as tof
from fusion_lab.measuring.comparison import compare as comparison
from fusion_lab.measuring.comparison import rung, rungs, worth
from fusion_lab.measuring.comparison import table as comparison_table
from fusion_lab.measuring.comparison.rows import reduction, rows_of, switch_effects
from fusion_lab.measuring.comparison.rungs import Rungs
from fusion_lab.measuring.comparison.table import (
    LiveTable,
    cells,
    detail_table,
    headline,
    print_details,
    print_table,
    table,
)
from fusion_lab.measuring.comparison.variants import (
    ALL,
    AS_GIVEN,
    BASELINE,
    UNMEASURED,
    Variant,
    combination_variants,
    distinct,
    with_fusion,
)
from fusion_lab.measuring.comparison.worth import UNKNOWN, add_worth, operations_by_sublayer, touched
from fusion_lab.measuring.probe import Findings
from fusion_lab.measuring.tables import aligned
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
        baseline_batch_time=6.5, speedup=1.625, speedup_p20=1.0, speedup_p80=3.0,
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


def test_shares_of_a_step_by_hand(monkeypatch):
    """Two steps: up takes 1 of 4 s and 3 of 4 s, forward and backward; the median is in the middle."""
    amounts = iter([{("up", "forward"): 0.25, ("up", "backward"): 0.75, ("rest", "forward"): 3.0},
                    {("up", "forward"): 3.0, ("rest", "forward"): 0.5, ("rest", "optimizer"): 0.5}])
    monkeypatch.setattr(worth, "amounts_in_a_step", lambda *_: next(amounts))
    shares = worth.shares_of_a_step(SimpleNamespace(device=torch.device("cpu")), None, 2)
    assert shares == dict(up=0.5, rest=0.5)


def test_the_sublayers_that_a_switch_touches_are_seen_not_declared():
    settings = SETTINGS.having(width=8)
    found = {}
    for name, fusion in dict(plain=PLAIN, fused=SECOND.fusion_config(), again=PLAIN).items():
        trainer = SECOND.trainer(SECOND, with_fusion(settings, fusion), torch.device("cpu"))
        found[name] = operations_by_sublayer(trainer, SECOND.open_source(settings).batch(0))
    assert touched(found["again"], found["plain"]) == []
    assert touched(found["fused"], found["plain"]) == ["up"]  # where its ReLU is fused


def test_what_is_saved_is_a_percentage_of_what_there_was():
    assert (reduction(8.0, 2.0), reduction(2.0, 3.0), reduction(4, 0)) == (75.0, -50.0, 100.0)
    assert reduction(None, 2.0) is reduction(0, 2.0) is reduction(2.0, None) is None


def test_effects_of_switches_are_means_over_the_others():
    """relu gains 2x alone and 8x on top of residual, residual 1x and 4x; geometric means are 4 and 2."""
    def row(relu, residual, seconds, saved, measured=True):
        fusion = replace(PLAIN, enable_fused_relu=relu, enable_fused_residual=residual)
        return dict(fusion_config=asdict(fusion), measured=measured, median_batch_time=seconds,
                    saved_activation_mb=saved)
    rows = [row(False, False, 8.0, 10.0), row(True, False, 4.0, 7.0), row(False, True, 8.0, 9.0),
            row(True, True, 1.0, 4.0)]
    assert switch_effects(SECOND, rows) == {
        "enable_fused_relu": dict(speedup=pytest.approx(4.0), smallest=2.0, largest=8.0,
                                  saved_activation_mb=4.0),
        "enable_fused_residual": dict(speedup=pytest.approx(2.0), smallest=1.0, largest=4.0,
                                      saved_activation_mb=2.0)}
    rows[3]["measured"] = False
    effects = switch_effects(SECOND, rows)
    assert [effect["largest"] for effect in effects.values()] == [2.0, 1.0]
    assert switch_effects(SECOND, [rows[0], rows[3]]) == {}


# On paper


NOMINAL = dict(kernel_reduction_percent=80.0, total_kernel_reduction=12)


def test_a_row_of_the_table():
    before, after = two_rows()
    assert cells(after, before) == ["all", "4000.00 (3000.00, 7000.00)", "0.8", "1.62x", "30.0 (+25.0%)",
                            "4.0 (+50.0%)", "50 (+50.0%)"]
    unknown = dict(after, peak_memory_mb=None, launches_per_step=None)
    assert cells(unknown, before)[4:] == ["n/a", "4.0 (+50.0%)", "n/a"]
    compiled = dict(after, baseline_batch_time=5.0)  # of its own process
    assert cells(compiled, before)[3] == "1.62x of 5000.00 ms"
    lines = table([before, after])
    assert lines[0] == ["variant", "step ms (p20, p80)", "samples/s", "speed-up", "peak MB (saved)",
                        "saved act. MB (saved)", "launches (fewer)"]
    assert lines[1:] == [cells(before, before), cells(after, before)] and len(lines[0]) == len(lines[1])


def test_the_headline_is_of_all_default_fusions():
    before, after = two_rows()
    other = dict(after, name="+ graph", speedup=9.0)
    clear = dict(after, speedup_p20=1.01)
    assert headline([before, clear, other], NOMINAL, "cpu_ops") == [
        "Training speed: 1.62x speed-up (0.5 -> 0.8 samples/sec)",
        "Memory reduction: 25.0% (peak 40.0 -> 30.0 MB)",
        "Batch time improvement: 38.5% (6500.00 -> 4000.00 ms)",
        "Kernel reduction: 50.0% measured (100 -> 50 cpu_ops per step); nominal 80.0% (12 fewer kernels)"]
    unknown = dict(after, peak_memory_reduction_percent=None, launch_reduction_percent=None)
    assert headline([before, unknown], None, "cpu_ops")[1::2] == ["Memory reduction: not measured",
                                                                 "Kernel reduction: not measured"]
    noise = headline([before, after], None, "")  # p20 is 1
    assert "1.62x speed-up (within noise) (0.5" in noise[0] and "38.5% (within noise) (6500" in noise[2]
    lost = dict(clear, name="x", speedup=0.999)
    slow = headline([before, other, lost], None, "")  # the last one, then
    assert "1.00x speed-up (a slowdown) (" in slow[0] and "% (a slowdown) (" in slow[2]
    both = headline([before, dict(lost, speedup_p20=0.9)], None, "")
    assert "1.00x speed-up (a slowdown, within noise) (" in both[0]
    assert "slowdown" not in headline([before, dict(clear, speedup=1.0)], None, "")[0]
    failed = dict(name="x", measured=False, reason="why")
    assert headline([before, failed], None, "") == ["No headline: x was not measured (why)"]
    assert "+ graph" not in str(headline([before, dict(failed, name="all"), other], None, ""))


def test_details_name_what_is_within_noise(capsys):
    before, after = two_rows()
    rows = [before, *(dict(after, name=name, speedup_p20=low, speedup_p80=high) for name, low, high in (
        ("unclear", 0.9, 1.1), ("faster", 1.01, 1.2), ("slower", 0.8, 0.99), ("from one", 1.0, 1.3),
        ("to one", 0.7, 1.0)))]
    rows.append(dict(name="broken", measured=False, reason="x"))
    effects = {"enable_opm_fusion": dict(speedup=1.25, smallest=1.0, largest=1.5, saved_activation_mb=2.0)}
    print_details(dict(variants=rows, switch_effects=effects, nominal=None, launch_kind="gpu_kernels"))
    out = capsys.readouterr().out
    assert "(p20 to p80 of the paired steps includes 1): unclear, from one, to one\n" in out
    assert "\nopm              1.250x over all settings of the others (from 1.000 to 1.500), saved " \
           "activations -2.0 MB\n" in out
    few = dict(variants=[before, rows[2]], switch_effects=None, nominal=None, launch_kind="gpu_kernels")
    print_table(few)
    assert capsys.readouterr().out.splitlines() == [
        *aligned(table(few["variants"])), "", *aligned(detail_table(few["variants"])), "",
        *headline(few["variants"], None, "gpu_kernels")]
    for share in (1.0, 1.01):
        print_details(dict(few, variants=[before, dict(rows[2], mfu=share)]))
        assert ("MFU above 100%: a fault of the bound" in capsys.readouterr().out) == (share > 1)


def test_the_live_table_prints_every_row_once(monkeypatch, capsys):
    ticks, saved = iter([100.0, 103.6, 200.0]), []
    monkeypatch.setattr(comparison_table.time, "monotonic", lambda: next(ticks))
    before, after = two_rows()
    live = LiveTable(lambda result: saved.append(len(result["variants"])))
    live.note("at work")
    live.begin(dict(variants=[before]), ["baseline", "all", "a name of some length"])
    first = capsys.readouterr()
    assert first.err == "[   4 s] at work\n" and first.out.count("\n") == 2
    assert first.out.startswith("variant                step ms (p20, p80)")
    live.add(dict(variants=[before, after]))
    assert capsys.readouterr().out.splitlines()[0].split()[0] == "all" and saved == [1, 2]
    silent = LiveTable()
    silent.note("nothing")
    silent.add(dict(variants=[before]))
    assert capsys.readouterr() == ("", "")


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
    rows, heard_by_all = [], []

    def __init__(self, program, variant):
        self.variant, self.log = variant, FakeRung.heard_by_all
        self.guest = SimpleNamespace(wait_until_ready=lambda: True, go=lambda: self.log.append("go"),
                                     process=SimpleNamespace(pid=f" {variant.name}"))
        self.log.append(f"start {variant.name}")

    def heard(self, stop):
        return True

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
    FakeRung.rows, FakeRung.heard_by_all, FakeGuardian.told = [], [], []
    return FakeRung.heard_by_all


def measured(name, **values):
    return dict(name=name, measured=True, median_batch_time=0.5, flops_per_step=10, peak_memory_mb=5.0,
                saved_activation_mb=4.0, launches_per_step=None, **values)


BASE = measured("baseline", reason=None) | dict(peak_memory_mb=10.0, launches_per_step=9)


def test_others_are_stopped_while_rows_of_this_process_are_measured(fake_rungs, monkeypatch):
    slept = []
    monkeypatch.setattr(rungs.time, "sleep", slept.append)
    variants = [Variant(name, with_fusion(SETTINGS, COMPILED)) for name in "ab"]
    with Rungs(SECOND, variants, GPU, print) as both:
        with contextlib.suppress(KeyError), both.paused():
            fake_rungs.append("within")
            raise KeyError
    stop, go_on = signal.SIGSTOP, signal.SIGCONT
    assert fake_rungs == ["start a", "start b", stop, stop, "within", go_on, go_on, "end a", "end b"]
    assert FakeGuardian.told == ["+ a", "+ b", "- a", "- b", "closed"]
    with Rungs(SECOND, variants, CPU, print) as none, none.paused():
        assert slept == [rungs.SETTLE_SECONDS, 0] and none.running == [] and none.guardian is None


def test_compiled_variants_one_after_the_other_on_a_cpu(fake_rungs, monkeypatch):
    """The first took 10 s and the second 20, so the third has 15 left."""
    ticks, said = iter([0.0, 10.0, 10.0, 30.0, 30.0, 40.0]), []
    monkeypatch.setattr(rungs.time, "monotonic", lambda: next(ticks))
    variants = [Variant(name, with_fusion(SETTINGS, COMPILED)) for name in "abc"]
    FakeRung.rows = [measured("a"), dict(name="b", measured=False, reason="out of memory"), measured("c")]
    with Rungs(SECOND, variants, CPU, said.append) as queue:
        first, second, third = queue.measure(BASE, 40.0)
    assert (first["mfu"], first["peak_memory_reduction_percent"]) == (0.5, 50.0)
    assert first["launch_reduction_percent"] is None and "mfu" not in second and third["name"] == "c"
    assert said == ["compiling a, 1 of 3", "measuring a, 1 of 3", "compiling b, 2 of 3, about 20 s left",
                    "measuring b, 2 of 3", "compiling c, 3 of 3, about 15 s left", "measuring c, 3 of 3"]
    assert fake_rungs.count("go") == 3 and fake_rungs[-3:] == ["end a", "end b", "end c"]
    assert FakeGuardian.told == ["+ a", "+ b", "+ c", "- a", "- b", "- c", "closed"]


def test_what_ran_out_of_memory_beside_others_has_a_second_try(fake_rungs):
    said, variants = [], [Variant(name, with_fusion(SETTINGS, COMPILED)) for name in "ab"]
    FakeRung.rows = [dict(name="a", measured=False, reason="CUDA error: out of memory"), measured("b"),
                     measured("a again")]
    with Rungs(SECOND, variants, GPU, said.append) as both:
        rows = list(both.measure(BASE, 40.0))
    assert [row["name"] for row in rows] == ["b", "a again"]
    assert said[0] == "waiting for 2 variants to compile"
    assert fake_rungs == ["start a", "start b", "go", "go", "end a", "end b", "start a", "go", "end a"]
    assert FakeGuardian.told == ["+ a", "+ b", "- a", "- b", "+ a", "- a", "closed"]


def test_a_signal_leaves_the_rest_unmeasured(fake_rungs):
    variants = [Variant(name, with_fusion(SETTINGS, COMPILED)) for name in "ab"]
    stop = SimpleNamespace(signal=2)
    with Rungs(SECOND, variants, CPU, print) as queue:
        assert [row["reason"] for row in queue.measure(BASE, 1.0, stop)] == [UNMEASURED] * 2
    assert fake_rungs == FakeGuardian.told == []


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
        yield
        log.append(f"restore {name}")

    made = Variant(name, SETTINGS, trainer=SimpleNamespace(step=step, preserved=preserved, device=device))
    made.timer = SimpleNamespace(start=lambda: log.append("start"), mark=lambda: log.append("mark"))
    return made


def test_rounds_begin_with_another_variant_each_and_repeat_their_batches():
    log = []
    variants = [stepping(name, log) for name in "abc"]
    comparison.alternate(variants, 4, ["x", "y"], None)
    assert [entry for entry in log if isinstance(entry, tuple)] == [
        *((name, "x") for name in "abc"), *((name, "y") for name in "bca"),
        *((name, "x") for name in "cab"), *((name, "y") for name in "abc")]
    assert log[:3] == ["keep a", "keep b", "keep c"] and log[-3:] == ["restore c", "restore b", "restore a"]
    assert log[3:6] == ["start", ("a", "x"), "mark"] and variants[0].losses == [1.0] * 4


def test_a_variant_that_fails_drops_out_and_a_signal_ends_after_the_round():
    log = []
    variants = [stepping(BASELINE, log), stepping("b", log, fails_at=3)]
    comparison.alternate(variants, 4, ["x"], None)
    assert variants[1].reason == "RuntimeError: broken" and variants[1].trainer is None
    assert len(variants[0].losses) == 4 and len(variants[1].losses) == 1
    log.clear()
    again = [stepping(name, log) for name in "ab"]
    comparison.alternate(again, 9, ["x"], SimpleNamespace(signal=15))
    assert [variant.losses for variant in again] == [[1.0], [1.0]]


def test_variants_begin_with_the_same_weights_and_run_on_their_own():
    """What runs the baseline's operations has a reason instead of a time, but for what was asked for."""
    settings = SETTINGS.having(width=4, device="cpu", warmup_steps=2)
    other = SECOND.trainer(SECOND, settings.having(seed=7), CPU)
    weights = {name: p + 1 for name, p in other.model.state_dict().items()}
    for trainer in (other, None):
        made = Variant("a", settings, trainer=trainer)
        comparison.bring_to_life(SECOND, made, CPU, weights, SECOND.open_source(settings).batch(0))
        found = made.trainer.model.state_dict()
        assert all(torch.equal(found[name], weights[name]) for name in weights) and made.timer.steps == []
        assert made.trainer is other or trainer is None
    for name, refused in ((AS_GIVEN, False), (ALL, False), ("b", True)):
        variants = [Variant(name, settings.having(num_steps=1)) for name in (BASELINE, name)]
        comparison.measure(SECOND, variants, CPU, SECOND.open_source(settings), equal=False)
        assert bool(variants[1].reason) is refused and len(variants[1].losses) == (not refused)
        assert str(variants[1].reason).endswith("operations as the baseline" if refused else "None")


def test_combinations_count_up_from_the_baseline():
    names = [variant.name for variant in combination_variants(tof.PROGRAM, tof.PROGRAM.settings())]
    assert names[:5] == [BASELINE, "triangle", "flash_attention", "flash_attention+triangle", "qkv_triangle"]
    assert len(names) == 16 and names[-1] == "qkv_msa+qkv_triangle+flash_attention+triangle"


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


def test_the_file_holds_the_whole_comparison_and_the_line_its_speed_ups(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(comparison, "matmul_ceiling", lambda *_: 4e9)
    settings = with_fusion(SETTINGS.having(width=4, num_steps=2, device="cpu", warmup_steps=1,
                                           profile_dir=str(tmp_path)), PLAIN)
    assert comparison.compare_fusion(SECOND, settings, picked=ALL) == 0
    out = capsys.readouterr().out.splitlines()
    assert out[0].endswith("| B 3, W 4 | 2 steps of every variant, in turn")
    result = json.loads((tmp_path / SECOND.result("fusion_comparison")).read_text())
    rows, line = result["variants"], json.loads(out[-1])
    assert line["variants"] == [dict(name=row["name"], speedup=row["speedup"]) for row in rows]
    assert [row["name"] for row in rows] == [BASELINE, ALL]
    for row in rows:
        assert row["speedup"] == pytest.approx(rows[0]["median_batch_time"] / row["median_batch_time"])
        assert row["mfu"] == pytest.approx(row["achieved_tflops"] / 0.004)
    assert result["matmul_ceiling_tflops"] == 0.004 and result["mode"] == "compare_fusion"
    assert result["training_params"]["amp_dtype"] is None and result["launch_kind"] == "cpu_ops"


def test_a_process_of_its_own_says_its_row_last(monkeypatch, capsys):
    """Here in this one: after the step whose operations are counted, its steps and the baseline's alternate,
    and it compares itself with that."""
    turns = []

    class Noting(SECOND.trainer):
        def step(self, batch, mark=None):
            if mark:
                turns.append(self.settings.fusion.enable_fused_relu)
            return super().step(batch, mark or (lambda: None))

    program = replace(SECOND, trainer=Noting)
    monkeypatch.setattr(rung, "load_program", lambda file: program if file == "here.py" else None)
    settings = SECOND.settings(width=4, batch_size=3, num_steps=20, device="cpu", warmup_steps=1)
    assert rung.main("here.py", "mine", json.dumps(settings.as_dict())) == 0
    row = json.loads(capsys.readouterr().out)
    assert turns == [True, *[False, True, True, False] * 10] and row["name"] == "mine" and row["measured"]
    assert row["speedup"] == pytest.approx(row["baseline_batch_time"] / row["median_batch_time"])
    assert row["samples_per_second"] == pytest.approx(3 / row["median_batch_time"])
    idle = settings.having(enable_master_weights=True)
    assert rung.main("here.py", "idle", json.dumps(idle.as_dict())) == 0
    row = json.loads(capsys.readouterr().out)
    assert (row["measured"], row["reason"], len(turns)) == (False, "master weights need --use-amp", 41)
