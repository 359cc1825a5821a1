"""A session's tables and sentences by hand, of one session and of two."""
import json

import pytest

import tiny_openfold_v2 as tof
from fusion_lab.measuring import tables
from fusion_lab.measuring.ranges import RECOMPUTE, REST
from fusion_lab.measuring.trace import NOT_RECORDED, OUTSIDE
from fusion_lab.profiler import plots, report
from fusion_lab.training.errors import UserError
from tests.second_program import PROGRAM as SECOND

SETTINGS = SECOND.settings(width=8, depth=2, batch_size=3, device="cpu")


def entry(name, direction, us, share, launches=None, saved=None):
    return dict(name=name, direction=direction, calls=2, total_us=us, share=share, launches=launches,
                allocated_mb=1.0, saved_activation_mb=saved)


def session(us=1000.0, **values):
    """An analysis as JSON has it."""
    usual = dict(
        mode="pytorch_profiler", timestamp="then", config=dict(width=8, depth=2),
        fusion_config=dict(enable_fused_relu=True, enable_x=False), training_params={},
        system_info=dict(gpu_name=None, host_cpu="C|`1`", torch_version="2", git_commit=None),
        time_kind="time", unit="operation", trace="t.json", profile_steps=5, launches_per_step=7,
        step=dict(untraced_ms=us / 1e3, p20_ms=us / 2e3, p80_ms=us / 5e2, step_times=[us / 1e6] * 7),
        sublayers=[entry("up", "backward", us / 2, 0.5, 3), entry("down", "forward", us / 4, 0.25, 2, 1.5),
                   entry("up", "forward", us / 8, 0.125, 1, 2.25), entry("rest", "data", us / 8, 0.125),
                   entry("rest", "outside steps", 0.0, 0.0)],
        coverage=dict(sublayers=0.875, rest=0.125, unattributed=0.0), unrecorded=[],
        kernels=[dict(name=f"k{i}", kind="copy", calls=2.0, self_us=us * (100 - i), share=0.125,
                      launches=None) for i in range(45)],
        saved_activation_mb=dict(up=2.25, down=1.5), memory_peak_mb=None, findings=["first", "second"])
    return {**usual, **values}


def test_a_row_for_each_sublayer_with_amdahl_s_ceiling():
    head, *rows = report.sublayer_rows(session())
    assert head[:5] == ["sub-layer", "ms", "of it backward", "share", "at most"]
    assert rows == [["up", "0.625", "0.500", "62.5%", "2.67x", "4", "2.0", "2.2"],
                    ["down", "0.250", "", "25.0%", "1.33x", "2", "1.0", "1.5"],
                    ["rest, data", "0.125", "", "12.5%", "", "", "1.0", ""]]
    again = [*session()["sublayers"], entry("up", RECOMPUTE, 125.0, 0.125)]  # made again in backward
    assert report.sublayer_rows(session(sublayers=again))[1][:3] == ["up", "0.750", "0.625"]
    compiled = session(sublayers=[entry("rest", "forward", 1000.0, 1.0)])
    assert [row[0] for row in report.sublayer_rows(compiled)[1:]] == ["rest, forward"]
    assert report.switch_rows(tof.PROGRAM, compiled)[1:] == []  # whose time is unknown, which is not 0


def test_a_switch_that_needs_another_one_changes_nothing_without_it():
    """Gates go into the GEMM of left and right where there is one."""
    entries = [entry(name, "forward", 9.0, 0.5) for name in ("outer_product_mean", "triangle_mult_outgoing")]
    for on, changed in ((False, ["outer_product_mean"]), (True, [
            "outer_product_mean", "triangle_mult_outgoing", "triangle_mult_incoming"])):
        given = session(sublayers=entries, fusion_config=dict(enable_triangle_fusion=on))
        changes = {row[0]: row[1] for row in report.switch_rows(tof.PROGRAM, given)}
        assert changes["projection-fusion"] == ", ".join(changed)


def test_the_report_says_what_was_run_and_what_is_missing():
    text = report.text(SECOND, SETTINGS, session(unrecorded=["2 of 3 kernels"]))
    for part in ("**1.00 ms** (median of 7; p20 0.50, p80 2.00)", "B 3, W 8; depth 2; on: fused_relu.",
                 "2 of 3 kernels", "1. first", "2. second", "3.8 MB are saved", "87.5% of the time",
                 "not measured"):
        assert part in text, part


def test_sessions_are_matched_by_name_and_the_longest_comes_first():
    before = [dict(name="a", us=10.0), dict(name="gone", us=40.0), dict(name="zero", us=0.0)]
    after = [dict(name="zero", us=0.5), dict(name="a", us=25.0), dict(name="new", us=30.0)]
    rows = report.matched(before, after, lambda e: e["name"], "us")
    assert [tuple(row.values()) for row in rows] == [
        ("gone", 40.0, None, None), ("new", None, 30.0, None), ("a", 10.0, 25.0, 2.5),
        ("zero", 0.0, 0.5, None)]
    assert report.comparison_rows(rows[:3], "t") == [
        ["t", "before ms", "after ms", "ratio"], ["`gone`", "0.040", "", "gone"],
        ["`new`", "", "0.030", "new"], ["`a`", "0.010", "0.025", "2.50"]]


def test_names_of_kernels_cannot_break_a_table():
    rows = report.comparison_rows([dict(name="f|<`x`>\n", before_us=1e3, after_us=2e3, ratio=2.0)], "k")
    assert tables.markdown(rows)[2] == r"| `f\|<'x'>\n` | 1.000     | 2.000    | 2.00  |"
    assert tables.escaped("a<b>*[c]`\\") == r"a\<b\>\*\[c\]\`\\"


def test_two_sessions_in_words():
    """Steps of 3.9 to 4.1 ms and of 1 ms; the medians' intervals are the outermost of seven."""
    step = dict(untraced_ms=4.0, step_times=[3.9e-3, 4e-3, 4e-3, 4e-3, 4e-3, 4e-3, 4.1e-3])
    comparison = report.compare_sessions(session(step=step), session(), "earlier")
    assert comparison["step_ms"] == [4.0, 1.0] and comparison["differences"] == []
    gain = [comparison[key] for key in ("speedup", "speedup_low", "speedup_high")]
    assert gain == pytest.approx([4, 3.9, 4.1])
    text = "\n".join(report.comparison_lines(comparison, "operation"))
    assert "4.00 -> 1.00 ms: 4.00x (95% interval 3.90 to 4.10)" in text and "different clocks" not in text
    assert "| operation" in text and "| kernel" not in text
    older = report.compare_sessions(session(step=dict(untraced_ms=4.0)), session(), "earlier")
    assert "4.00x (too few steps for an interval)" in "\n".join(report.comparison_lines(older, "kernel"))
    other = session(fusion_config=dict(enable_fused_relu=False), time_kind="GPU time",
                    system_info=dict(gpu_name="G", host_cpu="C|`1`", torch_version="3"))
    comparison = report.compare_sessions(session(), other, "earlier")
    assert comparison["differences"] == ["enable_fused_relu True -> False", "gpu_name None -> G",
                                    "torch_version 2 -> 3"]
    assert "different clocks" in "\n".join(report.comparison_lines(comparison, "kernel"))


def test_only_sessions_are_read(tmp_path):
    (tmp_path / report.ANALYSIS).write_text(json.dumps(session()))
    assert report.read_analysis(str(tmp_path)) == session()
    for broken in (dict(mode="ablation"), dict(sublayers=[1]), dict(step={}), dict(kernels=[dict(name="k")]),
                   dict(step=dict(untraced_ms=0.0)), dict(kernels=[dict(name="m", self_us="1")])):
        (tmp_path / report.ANALYSIS).write_text(json.dumps(session(**broken)))
        with pytest.raises(UserError, match="not the analysis"):
            report.read_analysis(str(tmp_path))
    with pytest.raises(UserError, match="No such file"):
        report.read_analysis(tmp_path / "absent")


def test_the_picture_keeps_what_lies_outside_of_steps_apart_from_the_rest():
    pytest.importorskip("matplotlib")
    from matplotlib.figure import Figure
    axis = Figure().subplots()
    entries = [dict(name=name, direction=direction, total_us=us) for name, direction, us in (
        (REST, OUTSIDE, 340e3), ("mix", "forward", 9e3), (REST, "forward", 1e3), (REST, NOT_RECORDED, 2e3))]
    plots.plot_sublayers(axis, entries, "GPU time")
    names = [label.get_text() for label in axis.get_yticklabels()]
    bars = [sum(bars[k].get_width() for bars in axis.containers) for k in range(len(names))]
    assert dict(zip(names, bars, strict=True)) == {OUTSIDE: 340, "mix": 9, REST: 1, NOT_RECORDED: 2}
