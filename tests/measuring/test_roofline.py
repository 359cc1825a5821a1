"""Bounds of sub-layers, by hand and by formulas: what a session's roofline is made of."""
from dataclasses import replace

import pytest
import torch

import tiny_openfold_v2 as tof
from fusion_lab.measuring import roofline
from fusion_lab.measuring.flops import flops_by_sublayer
from fusion_lab.training.program import Cost
from tests.profiler.test_session import PROGRAM, given
from tests.second_program import PROGRAM as SECOND
from tiny_openfold.proteins.costs import costs

MB = 2 ** 20
RECOMPUTING = {"enable_activation_checkpointing", "enable_selective_checkpointing"}
SPEEDS = dict(matmul_flops_per_s=dict(float32=1e9, bfloat16=1e12), dtype="float32", copy_bytes_per_s=1e6,
              element_bytes=4, dispatch_s=1e-4)


def settings(**values):
    return SECOND.settings(**{**dict(width=8, depth=2, batch_size=3, device="cpu"), **values})


class Three(SECOND.model):
    SUBLAYERS = ("a", "b", "c")

    def costs(self, training):
        return dict(a=Cost(3e6, 6e3, 12e3), b=Cost(3e6, 6e3, 12e3), c=Cost(6e6, 3e3, None))


THREE = replace(SECOND, model=Three)


@pytest.fixture
def three(monkeypatch):
    """The count of such a step: three blocks, backward twice as many, and what stands beside them."""
    monkeypatch.setattr(roofline, "flops_by_sublayer",
                        lambda *_: dict(a=9e6, b=9e6, c=18e6, rest=3e5))


def test_bounds_of_a_sublayer():
    cost = Cost(1e6, 2e3, 4e3).times(3)
    assert roofline.total_bytes(cost) == 18e3 and roofline.floor_seconds(9e6, 18e3, SPEEDS) == (
        pytest.approx(0.009), pytest.approx(0.018))
    assert roofline.floor_seconds(3e6, None, dict(SPEEDS, dtype="bfloat16")) == (pytest.approx(3e-6), None)
    assert roofline.total_bytes(Cost(1.0, None, 5.0)) is roofline.total_bytes(None) is None
    flops = dict(a=1.0, b=1.0, c=2.0, rest=4.0)
    assert roofline.flops_share(THREE, flops) == dict(a=0.25, b=0.25, c=0.5)
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
    row = dict(rows[0], flops=2.5e9, minimal_bytes=1.5 * MB)
    assert roofline.roofline_rows([row])[1][1:3] == ["2.50", "1.5"]


@pytest.mark.parametrize("speeds, tries", [((1e6, 4e6), 2), ((1e6, 1e6), 2), ((4e6, 1e9), 1)])
def test_ceilings_that_a_busy_machine_spoiled_are_measured_again(speeds, tries, three, monkeypatch):
    """At 1 MB/s a sub-layer of 9 ms would need 18 ms to move its bytes: what is still so has no bound."""
    measured = iter([dict(SPEEDS, copy_bytes_per_s=speed) for speed in speeds])
    monkeypatch.setattr(roofline, "measure_ceilings", lambda *_: next(measured))
    found = roofline.measured_roofline(THREE, settings(), torch.device("cpu"), dict(
        a=dict(seconds=0.0091, launches=1)))
    row = found["roofline"][0]
    assert 2 - len(list(measured)) == tries
    if speeds[1] == 1e6:
        assert row["bound"] is row["share"] is None and "faster than the ceilings" in row["note"]
        assert roofline.roofline_rows([row])[1][-2].startswith("none (faster")
    else:
        assert row["bound"] == "compute" and row["share"] == pytest.approx(9 / 9.1)
        assert found["ceilings"]["copy_bytes_per_s"] == 4e6


def test_on_a_gpu_launching_bounds_where_it_takes_longer_than_the_kernels(three):
    times = dict(compute=2.0, memory=1.0, launch=3.0)
    assert roofline.bound(times, 3.0, on_gpu=True) == "compute"
    assert roofline.bound(times, 2.9, on_gpu=True) == roofline.bound(times, None, on_gpu=True) == "launch"
    measured = dict(a=dict(seconds=0.019, launches=1000))
    assert roofline.roofline_table(THREE, settings(), SPEEDS, measured, on_gpu=True)[0]["bound"] == "launch"


FEW_ROWS = dict(num_blocks=1, num_seqs=3, seq_len=13, batch_size=1, msa_dim=8, outer_product_dim=6)


def of_formulas(settings):
    """{sub-layer or "rest": FLOPs of a step of one block}; backward takes twice those of forward."""
    of_a_step = costs(settings.model, settings.fusion, settings.training)
    found = {name: 3 * cost.flops for name, cost in of_a_step.items()}
    return {"rest": found.pop("heads"), **found}


def test_flops_under_every_switch_are_those_of_the_formulas():
    """Few rows of many residues are re-associated, which costs less; recomputation costs a forward more."""
    off, found = tof.FusionConfig.preset(False), {}
    for name in (None, *off.names()):
        settings = replace(given(**FEW_ROWS), fusion=replace(off, **{name: True} if name else {}))
        expected, found[name] = of_formulas(settings), flops_by_sublayer(PROGRAM, settings)
        if name in RECOMPUTING:
            assert sum(expected.values()) <= sum(found[name].values()) <= 4 / 3 * sum(expected.values())
        else:
            assert found[name] == expected, name
    assert found["enable_opm_fusion"]["outer_product_mean"] < found[None]["outer_product_mean"]
    every = replace(settings, fusion=tof.FusionConfig.preset(True))
    assert flops_by_sublayer(PROGRAM, every) == found["enable_opm_fusion"]
    more_rows = replace(given(**dict(FEW_ROWS, num_seqs=5, num_blocks=2)), fusion=tof.FusionConfig())
    plain = replace(more_rows, fusion=off)
    assert flops_by_sublayer(PROGRAM, more_rows) == flops_by_sublayer(PROGRAM, plain)
