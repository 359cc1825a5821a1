"""--compare-fusion: its figures and tables by hand, from times that somebody else measured."""
from dataclasses import asdict, replace
from types import SimpleNamespace

import numpy as np
import pytest
from second_program import PROGRAM as SECOND

from fusion_lab.measuring import comparison_table
from fusion_lab.measuring.comparison_rows import reduction, rows_of, switch_effects
from fusion_lab.measuring.comparison_table import (
    LiveTable,
    cells,
    detail_table,
    headline,
    print_details,
    table,
)
from fusion_lab.measuring.probe import Findings
from fusion_lab.measuring.variants import Variant, with_fusion

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
        launch_reduction_percent=50.0)
    assert [before[f"{name}_batch_time"] for name in ("p20", "median", "p80")] == [5.0, 6.5, 8.0]
    assert (before["speedup"], before["speedup_p20"], before["speedup_p80"]) == (1.0, 1.0, 1.0)
    assert before["samples_per_second"] == pytest.approx(3 / 6.5) and before["final_loss_difference"] == 0


def test_rounds_that_a_signal_cut_short_are_compared_as_far_as_they_go():
    """Four of six: the speed-ups are 2 1 3 1, and the loss is compared with the baseline's fourth."""
    _, after = rows_of([variant("baseline", BEFORE), variant("all", AFTER[:4], losses=(5, 4, 3, 2.5))], 1e12)
    assert after["speedup_p20"] == 1.0 and after["speedup_p80"] == pytest.approx(2.4)
    assert after["final_loss_difference"] == 0.5 and after["speedup"] == 6.5 / 4
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
    assert cells(broken) == ["broken", "not measured: no such kernel"]
    assert [line[0] for line in detail_table([baseline, row, broken])] == ["variant", "baseline", "+ graph"]
    assert detail_table([baseline, row])[1:] == [
        ["baseline", "1625.00", "3250.00", "1625.00", "0.615", "61.5%", "2.50"],
        ["+ graph", "in one graph", "in one graph", "in one graph", "1.000", "100.0%", "2.50"]]


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
    assert cells(after) == ["all", "4000.00 (3000.00, 7000.00)", "0.8", "1.62x", "30.0 (+25.0%)",
                            "4.0 (+50.0%)", "50 (+50.0%)"]
    unknown = dict(after, peak_memory_mb=None, launches_per_step=None)
    assert cells(unknown)[4:] == ["n/a", "4.0 (+50.0%)", "n/a"]
    lines = table([before, after])
    assert lines[0] == ["variant", "step ms (p20, p80)", "samples/s", "speed-up", "peak MB (saved)",
                        "saved act. MB (saved)", "launches (fewer)"]
    assert lines[1:] == [cells(before), cells(after)] and len(lines[0]) == len(lines[1])


def test_the_headline_is_of_all_default_fusions():
    before, after = two_rows()
    other = dict(after, name="+ graph", speedup=9.0)
    assert headline([before, after, other], NOMINAL, "cpu_ops") == [
        "Training speed: 1.62x speed-up (0.5 -> 0.8 samples/sec)",
        "Memory reduction: 25.0% (peak 40.0 -> 30.0 MB)",
        "Batch time improvement: 38.5% (6500.00 -> 4000.00 ms)",
        "Kernel reduction: 50.0% measured (100 -> 50 cpu_ops per step); nominal 80.0% (12 fewer kernels)"]
    unknown = dict(after, peak_memory_reduction_percent=None, launch_reduction_percent=None)
    assert headline([before, unknown], None, "cpu_ops")[1::2] == ["Memory reduction: not measured",
                                                                 "Kernel reduction: not measured"]
    slow = headline([before, dict(after, name="x", speedup=0.999)], None, "")
    assert "1.00x speed-up (a slowdown) (" in slow[0] and "% (a slowdown) (" in slow[2]
    assert "slowdown" not in headline([before, dict(after, speedup=1.0)], None, "")[0]
    failed = dict(name="x", measured=False, reason="why")
    assert headline([before, failed], None, "") == ["No headline: x was not measured (why)"]
    assert "+ graph" not in str(headline([before, dict(failed, name="all"), other], None, ""))


def test_details_name_what_is_within_noise(capsys):
    before, after = two_rows()
    rows = [before, *(dict(after, name=name, speedup_p20=low, speedup_p80=high) for name, low, high in (
        ("faster", 1.01, 1.2), ("slower", 0.8, 0.99), ("unclear", 0.9, 1.1), ("from one", 1.0, 1.3),
        ("to one", 0.7, 1.0)))]
    rows.append(dict(name="broken", measured=False, reason="x"))
    effects = {"enable_opm_fusion": dict(speedup=1.25, smallest=1.0, largest=1.5, saved_activation_mb=2.0)}
    print_details(dict(variants=rows, switch_effects=effects, nominal=None, launch_kind="gpu_kernels"))
    out = capsys.readouterr().out
    assert "(p20 to p80 of the paired steps includes 1): unclear, from one, to one\n" in out
    assert "\nopm              1.250x over all settings of the others (from 1.000 to 1.500), saved " \
           "activations -2.0 MB\n" in out
    print_details(dict(variants=rows[:2], switch_effects=None, nominal=None, launch_kind="gpu_kernels"))
    assert "within noise" not in capsys.readouterr().out


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
