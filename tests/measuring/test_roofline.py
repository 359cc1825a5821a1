"""Bounds of sub-layers, by hand and by formulas: what a session's roofline is made of."""
from dataclasses import replace

import numpy as np
import pytest
import torch

import tiny_openfold_v2 as tof
from evoformer_kernels import limits
from fusion_lab.measuring import clocks, roofline
from fusion_lab.measuring.flops import Traffic, counts_by_sublayer
from fusion_lab.training.program import Cost
from tests.profiler.test_session import PROGRAM, given
from tests.second_program import PROGRAM as SECOND
from tiny_openfold.proteins.costs import costs

MB, CPU = 2 ** 20, torch.device("cpu")
SPEEDS = dict(matmul_flops_per_s=1e9, dtype="float32", copy_bytes_per_s=1e6)


def settings(**values):
    return SECOND.settings(**{**dict(width=8, depth=2, batch_size=3, device="cpu"), **values})


class Three(SECOND.model):
    SUBLAYERS = ("a", "b", "c")

    def costs(self, training):
        return dict(a=Cost(3e6, 6e3, 12e3), b=Cost(3e6, 6e3, 12e3), c=Cost(6e6, 3e3, None))


THREE = replace(SECOND, model=Three)


@pytest.fixture
def three(monkeypatch):
    """The count of such a step: three blocks, backward twice as many, and what stands beside them; and the
    bytes of its baseline."""
    counts = {(): dict(a=9e6, b=9e6, c=18e6, rest=3e5), (Traffic,): dict(a=9e4, b=3 * MB, c=0)}
    monkeypatch.setattr(roofline, "counts_by_sublayer", lambda _, settings, gpu, batch, *what: counts[what])


def test_shares_of_flops_are_of_the_sub_layers_alone():
    flops = dict(a=1.0, b=1.0, c=2.0, rest=4.0)
    assert roofline.flops_share(THREE, flops) == dict(a=0.25, b=0.25, c=0.5)
    assert roofline.flops_share(THREE, dict.fromkeys("abc", 0)) == dict(a=0, b=0, c=0)


@pytest.mark.parametrize("asks", [False, True])  # the model for the autocast of its device
def test_flops_of_every_sub_layer_by_hand(asks):
    """Products of 3 x 8 with 8 x 32, four blocks, backward twice as many, and nothing beside them."""
    flops = counts_by_sublayer(SECOND, settings(depth=4, enable_fused_residual=asks), on_gpu=False)
    assert flops == dict(up=12 * 1536, down=12 * 1536, rest=0)


def test_the_table_as_cells(three):
    """At 1 GFLOP/s and 1 MB/s; b is faster than that, which nothing can be."""
    rows = roofline.roofline_table(THREE, settings(), False, SPEEDS, dict(a=0.036, b=0.0091))
    assert [row["name"] for row in rows] == ["a", "b", "c"]
    assert rows[1]["bound"] is rows[1]["share"] is rows[2]["measured_s"] is rows[2]["bound"] is None
    cells = roofline.roofline_rows(rows)
    assert cells[1] == ["a", "0.01", "0.0", "0.1 (5.0x)", "500.0 (100.0)", "9.000", "18.000", "36.000",
                        "memory", "50.0%"]
    assert cells[2][-2].startswith("none (faster") and cells[2][-1] == "above 100%"
    assert cells[3] == ["c", "0.02", "", "0.0", "", "18.000", "", "", "none (bytes not worked out)", ""]
    assert cells[4] == ["all", "0.04", "", "3.1", " (11.1)", "36.000", "", "", "", ""]
    row = dict(rows[0], flops=2.5e9, minimal_bytes=1.5 * MB)
    assert roofline.roofline_rows([row, row])[-1][1:3] == ["5.00", "3.0"]


def test_without_bytes_there_is_no_bound_and_half_precision_has_half_the_bytes(three):
    [_, _, c] = roofline.roofline_table(THREE, settings(), False, SPEEDS, dict(a=1.0, b=1.0, c=1.0))
    assert c["bound"] is c["share"] is None and c["compute_s"] and c["note"]
    half = roofline.roofline_table(THREE, settings(use_amp=True), False, SPEEDS, {})
    assert half[0]["baseline_bytes"] == 4.5e4


def test_bytes_of_operations_by_hand():
    """A product of (2, 3) and (3, 4), and its ReLU in place; a view is free."""
    with Traffic() as traffic:
        (torch.ones(2, 3) @ torch.ones(3, 4)).view(8).relu_()
    made = 4 * (6 + 12)
    assert traffic.total == made + 4 * (6 + 12 + 8) + 4 * (8 + 8)


def test_a_program_without_formulas_has_counted_flops_and_no_bound():
    """As counts_by_sublayer has them above, for two layers."""
    up = roofline.roofline_table(SECOND, settings(), False, SPEEDS, dict(up=0.5))[0]
    assert (up["name"], up["flops"], up["minimal_bytes"], up["measured_s"]) == ("up", 6 * 1536, None, 0.5)


FEW_ROWS = dict(num_blocks=1, num_seqs=3, seq_len=13, batch_size=1, msa_dim=8, outer_product_dim=6)


def of_formulas(settings):
    """{sub-layer or "rest": FLOPs of a step of one block}; backward takes twice those of forward."""
    of_a_step = costs(settings.model, settings.fusion, settings.training)
    flops = {name: 3 * cost.flops for name, cost in of_a_step.items()}
    return {"rest": flops.pop("heads"), **flops}


def test_flops_under_every_switch_are_those_of_the_formulas():
    """Few rows of many residues are re-associated, which costs less; recomputation does not count."""
    off, flops = tof.FusionConfig.baseline(), {}
    for name in (None, *off.names()):
        settings = replace(given(**FEW_ROWS), fusion=replace(off, **{name: True} if name else {}))
        expected, flops[name] = of_formulas(settings), counts_by_sublayer(PROGRAM, settings, on_gpu=False)
        assert flops[name] == expected, name
    assert flops["enable_opm_fusion"]["outer_product_mean"] < flops[None]["outer_product_mean"]
    every = replace(settings, fusion=tof.FusionConfig.preset())
    assert counts_by_sublayer(PROGRAM, every, on_gpu=False) == flops["enable_opm_fusion"]
    more_rows = replace(given(**dict(FEW_ROWS, num_seqs=5, num_blocks=2)), fusion=tof.FusionConfig())
    plain = replace(more_rows, fusion=off)
    assert counts_by_sublayer(PROGRAM, more_rows, False) == counts_by_sublayer(PROGRAM, plain, False)


@pytest.mark.parametrize("switches, precision, first", [  # 4 N = S
    ({}, dict(use_amp=True), True), ({}, {}, False), ({}, dict(use_tf32=True), True),
    (dict(enable_triton_outer_layout=True), dict(use_amp=True), False)])
def test_flops_are_those_of_the_order_of_sums_that_a_gpu_takes(switches, precision, first, monkeypatch):
    """Our kernel is for the plain order, and float32 counts multiplications; a CPU never minds."""
    monkeypatch.setattr(limits, "HAS_TRITON", True)
    on = given(**dict(FEW_ROWS, num_seqs=4, seq_len=16), **precision, **switches)
    off = replace(on, fusion=tof.FusionConfig.baseline())
    of_layer = [counts_by_sublayer(PROGRAM, chosen, on_gpu)["outer_product_mean"]
                for chosen, on_gpu in ((on, True), (on, False), (off, True))]
    assert of_layer[1] < of_layer[2] and of_layer[0] == of_layer[1 if first else 2]


# Ceilings


def test_a_product_is_two_operations_an_entry_and_a_copy_reads_and_writes(monkeypatch):
    """Of the layouts that a linear layer uses one may be 20 times as fast, as in float16 on a CPU."""
    def seconds(run, device):
        if not hasattr(run, "args"):
            return 0.5
        left, right = run.args
        return 1.0 if left.is_contiguous() and right.is_contiguous() else 20.0
    monkeypatch.setattr(roofline, "fastest", seconds)
    assert roofline.matmul_ceiling(CPU, torch.float32) == 2 * max(roofline.SIDES["cpu"]) ** 3
    assert roofline.copy_ceiling(CPU) == 2 * 2 ** 26 / 0.5


@pytest.mark.parametrize("runs, counts", [([0.1, 0.3, 0.15, 0.2, 0.12, 0.18], 0.12), ([9.0], 9.0)])
def test_the_best_of_five_runs_after_a_first_one_counts_and_a_slow_run_is_the_only_one(runs, counts,
                                                                                       monkeypatch):
    ends = np.cumsum(runs)
    ticks = iter(np.stack([ends - runs, ends], axis=1).flatten())
    monkeypatch.setattr(clocks.time, "perf_counter", lambda: next(ticks))
    assert roofline.fastest(lambda: None, CPU) == pytest.approx(counts) and next(ticks, None) is None


def test_the_ceilings_of_a_run_are_those_of_its_precision(monkeypatch):
    speeds = {torch.float32: 1e12, torch.float16: 3e12}
    monkeypatch.setattr(roofline, "matmul_ceiling", lambda device, dtype: speeds[dtype])
    monkeypatch.setattr(roofline, "copy_ceiling", lambda _: 2.5e9)
    ceilings = roofline.measure_ceilings(CPU, SECOND.settings().training)
    assert ceilings == dict(copy_bytes_per_s=2.5e9, dtype="float32", matmul_flops_per_s=1e12)
    half = SECOND.settings(use_amp=True, amp_dtype="float16").training
    assert roofline.measure_ceilings(CPU, half) == dict(ceilings, dtype="float16", matmul_flops_per_s=3e12)
    assert "copy 2.5 GB/s" in roofline.ceiling_line(ceilings)
