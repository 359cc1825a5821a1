"""Ceilings, counts and predictions against formulas: what a session's bounds are made of."""
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from torch import nn

import tiny_openfold_v2 as tof
from fusion_lab.measuring.bounds import ceilings, predictions, roofline
from fusion_lab.measuring.bounds.flops import flops_by_sublayer
from fusion_lab.measuring.bounds.sizes import shapes_around, shrunk
from fusion_lab.measuring.probe import probe
from fusion_lab.measuring.ranges import ranges
from fusion_lab.training.program import Cost
from proteins.costs import costs
from tests.profiler.test_session import CPU, PROGRAM, given, two_steps_later


class HalfSeconds:
    """A PhaseTimer by which the first of six runs takes 0.1 s, the best of the others half a second."""

    def __init__(self, device):
        self.runs = 0

    def start(self):
        self.runs += 1

    def mark(self):
        pass

    def seconds(self):
        assert self.runs <= 6
        return np.array([[0.1], [1.0], [0.5], [2.0], [1.0], [3.0]])[:self.runs]


def test_ceilings_are_work_over_the_best_time(monkeypatch):
    monkeypatch.setattr(ceilings, "PhaseTimer", HalfSeconds)
    assert ceilings.matmul_ceiling(CPU, torch.float32) == 2 * 1024 ** 3 / 0.5
    assert ceilings.copy_ceiling(CPU) == 2 * 2 ** 26 / 0.5  # read and written
    ticks = iter(range(100))
    monkeypatch.setattr(ceilings.time, "perf_counter", lambda: next(ticks))
    assert ceilings.dispatch_cost(CPU) == 1 / 200


def test_ceilings_are_those_of_the_precision(monkeypatch):
    for name, value in (("matmul_ceiling", 5.0), ("copy_ceiling", 7.0), ("dispatch_cost", 3.0)):
        monkeypatch.setattr(ceilings, name, lambda *_, value=value: value)
    found = ceilings.measure_ceilings(CPU, given(use_amp=True).training)
    assert (found["dtype"], found["element_bytes"], found["dispatch_s"]) == ("bfloat16", 2, 3.0)
    assert found["matmul_flops_per_s"] == dict(float32=5.0, bfloat16=5.0)
    found = ceilings.measure_ceilings(CPU, given().training)
    assert (found["dtype"], found["element_bytes"], found["copy_bytes_per_s"]) == ("float32", 4, 7.0)


RECOMPUTING = {"enable_activation_checkpointing", "enable_selective_checkpointing"}


FEW_ROWS = dict(num_blocks=1, num_seqs=3, seq_len=13, batch_size=1, msa_dim=8, outer_product_dim=6)


def of_formulas(settings):
    """{sub-layer or "rest": FLOPs of a step of one block}; backward takes twice those of forward."""
    found = {name: 3 * cost.flops for name, cost in costs(settings).items()}
    return {"rest": found.pop("heads"), **found}


def test_flops_under_every_switch_are_those_of_the_formulas():
    """Few rows of many residues are re-associated, which costs less; recomputation costs more than the
    formulas, by at most another forward pass."""
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


def test_every_tool_has_the_same_flops():
    """Roofline, prediction, comparison and summary, of an outer product that is re-associated."""
    settings = replace(given(**FEW_ROWS), fusion=tof.FusionConfig())
    flops = flops_by_sublayer(PROGRAM, settings)
    speeds = dict(matmul_flops_per_s=dict(float32=1.0), dtype="float32", copy_bytes_per_s=1e30, dispatch_s=0)
    table = roofline.roofline_table(PROGRAM, settings, speeds, {})
    assert {row["name"]: row["flops"] for row in table} | dict(rest=flops["rest"]) == flops
    assert roofline.step_floor(PROGRAM, settings, speeds, 0)[0] == sum(flops.values())
    trainer = PROGRAM.trainer(PROGRAM, settings, CPU)
    assert probe(trainer, PROGRAM.open_source(settings).batch(0)).flops == sum(flops.values())


def test_backward_of_a_module_fed_with_data(recwarn):
    """It ends with the gradients of its parameters: there is none of its input."""
    model, opened, seen = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4)), [], []
    for number, parameter in enumerate(model.parameters()):
        parameter.register_hook(lambda _, number=number: seen.append((number, list(opened))))
    for x in (torch.ones(2, 4), torch.ones(2, 4, requires_grad=True)):
        for named in ([("whole", model)], [("first", model[0]), ("last", model[2])]):
            with ranges(named, opened.append, opened.pop, backward=True):
                for _ in range(2):
                    model(x).sum().backward()
            assert not opened
    whole, parts = [(n, ["whole.backward"]) for n in (3, 2, 1, 0)], [
        (n, ["last.backward" if n > 1 else "first.backward"]) for n in (3, 2, 1, 0)]
    assert sorted(seen) == sorted(4 * whole + 4 * parts) and not recwarn.list


def test_backward_of_a_module_without_parameters_of_its_own():
    """Fed with data, with another's weights: its backward ends at once, since nothing says when."""
    owner, opened = nn.Linear(4, 4), []
    borrower = nn.Sequential(nn.Identity())
    borrower.forward = lambda x: torch.nn.functional.linear(x, owner.weight)
    with ranges([("borrower", borrower)], opened.append, opened.pop, backward=True):
        borrower(torch.ones(2, 4)).sum().backward()
    assert not opened and owner.weight.grad.any()


def test_minimal_bytes_at_the_sizes_of_alphafold():
    """Where N c_m = S c_z, a pass over either tensor is as long: passes per sub-layer, counted by hand."""
    settings = PROGRAM.settings(msa_dim=256, pair_dim=128, msa_heads=8, num_seqs=128, seq_len=256,
                                batch_size=1, use_amp=True)
    one_pass = 256 * 256 * 128 * 2
    passes = {name: [None if size is None else size / one_pass
                     for size in (cost.forward_bytes, cost.backward_bytes)]
              for name, cost in costs(settings).items()}
    assert passes["triangle_mult_outgoing"] == [9, 15] and passes["pair_transition"] == [2, 3]
    assert passes["msa_column_attention"] == [11, 18]
    assert passes["triangle_attn_starting"] == pytest.approx([11, 18], rel=0.01)
    assert 2.4 <= passes["outer_product_mean"][0] <= 3.5 and 3 <= passes["outer_product_mean"][1] <= 6
    full = costs(settings.having(use_amp=False))
    assert full["pair_transition"].forward_bytes == 2 * 2 * one_pass  # four bytes instead of two


def test_the_arithmetic_of_the_roofline_by_hand(monkeypatch):
    """Two sub-layers, one of them without known bytes, three blocks, and a head."""
    program = replace(PROGRAM, sublayers=("a", "b"), blocks=lambda settings: 3, costs=lambda settings: dict(
        a=Cost(1e6, 2e3, 4e3), b=Cost(5e5)))
    speeds = dict(matmul_flops_per_s=dict(bfloat16=1e9), dtype="bfloat16", copy_bytes_per_s=1e6,
                  dispatch_s=1e-4)
    monkeypatch.setattr(roofline, "flops_by_sublayer", lambda *_: dict(a=9e6, b=4.5e6, rest=3e5))
    a, b = roofline.roofline_table(program, given(), speeds, dict(
        a=dict(seconds=0.036, launches=10), b=dict(seconds=0.009, launches=100)))
    assert (a["flops"], a["minimal_bytes"], a["flops_per_byte"]) == (9e6, 18e3, 500)
    assert (a["compute_s"], a["memory_s"], a["launch_s"]) == pytest.approx((0.009, 0.018, 0.001))
    assert a["share"] == pytest.approx(0.5) and a["bound"] == "memory" and "note" not in a
    assert b["bound"] == "launch" and b["share"] == pytest.approx(0.5)
    assert b["note"] == "bytes not worked out"
    device, host = roofline.step_floor(program, given(), speeds, parameters=1000, launches=70)
    assert device == pytest.approx(0.018 + 0.0045 + 0.0003 + 28 * 1000 / 1e6) and host == pytest.approx(0.007)


@pytest.mark.parametrize("switches", [{}, dict(use_amp=True), dict(use_amp=True, enable_master_weights=True)])
@pytest.mark.parametrize("fused", [False, True])
def test_simulated_memory_agrees_with_the_measured_one(switches, fused):
    settings = given(fused, **switches)
    trainer, batch = two_steps_later(settings)
    found, state = probe(trainer, batch), torch.get_rng_state()
    peak, saved = roofline.simulate_memory(PROGRAM, settings, CPU)
    assert peak == pytest.approx(found.peak, rel=0.02)
    assert saved == pytest.approx(sum(found.saved.values()), rel=0.01)
    assert torch.equal(torch.get_rng_state(), state)


def test_the_simulation_allocates_nothing():
    """Proteins of 2048 residues in two very wide blocks: more than a terabyte."""
    settings = given(seq_len=2048, num_blocks=2, pair_dim=512)
    peak, saved = roofline.simulate_memory(PROGRAM, settings, CPU)
    assert peak > saved > 2 ** 40


def test_exponent_of_a_cubic_is_three():
    points = [dict(size=s, peak_memory_mb=s ** 3, saved_activation_mb=None) for s in (8, 16, 32)]
    fitted = predictions.exponents(points, "size")
    assert fitted["peak_memory_mb"] == pytest.approx(3) == fitted["last_peak_memory_mb"]
    assert fitted["saved_activation_mb"] is None


def test_prediction_checks_cover_six_shapes_at_least():
    for values in ({}, dict(batch_size=1)):
        shapes = shapes_around(PROGRAM, PROGRAM.settings(**values))
        assert len({tuple(shape.values()) for shape in shapes}) == len(shapes) >= 6
        assert shapes[0] == {axis: PROGRAM.settings(**values).get(axis) for axis in PROGRAM.axes}
    shortest = shapes_around(PROGRAM, PROGRAM.settings(seq_len=1, num_seqs=1, batch_size=1))
    assert min(min(shape.values()) for shape in shortest) == 1


@dataclass(frozen=True)
class OfFours(tof.TinyOpenFoldConfig):
    """A model that takes multiples of four residues only."""

    def __post_init__(self):
        super().__post_init__()
        if self.seq_len % 4:
            self.refuse("seq_len", "must be a multiple of 4")


def test_sizes_next_to_nothing_are_those_that_the_program_takes():
    small = shrunk(PROGRAM, PROGRAM.settings(seq_len=64, num_seqs=16, batch_size=3), largest=2)
    assert {axis: small.get(axis) for axis in PROGRAM.axes} == dict(batch_size=3, seq_len=2, num_seqs=1)
    deep = shrunk(PROGRAM, PROGRAM.settings(seq_len=64, num_seqs=512), largest=16)
    assert (deep.model.seq_len, deep.model.num_seqs) == (2, 16)
    picky = replace(PROGRAM, model_config=OfFours)
    settings = picky.settings(seq_len=64, num_seqs=16)
    assert shrunk(picky, settings, largest=2).model.seq_len == 4
    assert all(shape["seq_len"] % 4 == 0 for shape in shapes_around(picky, picky.settings(seq_len=4)))
    batch_only = replace(PROGRAM, axes=dict(batch_size="B"))
    assert shrunk(batch_only, settings, largest=2) == settings


@pytest.mark.slow
def test_check_of_predictions_prints_errors(capsys):
    result = predictions.predict_mode(PROGRAM, given(), sizes=(1, 12, 4))
    assert result["prediction"]["seq_len"] == 12 and result["prediction"]["batch_size"] == 1
    _, sizes, step, memory = capsys.readouterr().out.splitlines()
    bound = result["prediction"]
    assert sizes.split("  ")[0] == "B 1, S 12, N 4" and sizes.split()[-2:] == ["at", "least"]
    assert step.split()[:4] == ["a", "step", f"{1e3 * bound['step_s']:.3f}", "ms"]
    assert memory.split()[:4] == ["peak", "memory", f"{bound['peak_memory_mb']:.1f}", "MB"]
    checks = predictions.check_predictions(PROGRAM, given(), CPU, result["ceilings"],
                                           [dict(batch_size=1, seq_len=12, num_seqs=4)])
    assert abs(checks[0]["peak_error_percent"]) < 5 and checks[0]["time_ratio"] > 0
    assert predictions.prediction_rows(checks, PROGRAM.axes)[1][:3] == ["1", "12", "4"]
    assert predictions.errors_line(checks).startswith("Over 1 shape: ")
    assert predictions.errors_line([dict(reason="x")]) == "No shape could be measured"
