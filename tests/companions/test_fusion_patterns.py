"""The laboratory of fusion patterns: what it counts and judges, by hand; kernels for GPUs not here."""
import pytest
import torch

import companions.fusion_patterns as lab

CPU = torch.device("cpu")
TARGETS = ("sm_90", "gfx90a", "gfx942", "gfx950")


@pytest.mark.parametrize("medians, expected", [
    (dict(plain=4.0), ("NONE", "only plain code ran, so there is nothing to compare")),
    (dict(plain=4.0, compiled=3.9, library=4.1), ("DON'T", "compiled 1.03x plain, library 0.98x plain")),
    (dict(plain=4.0, compiled=3.4), ("DON'T", "compiled 1.18x plain")),  # 3.74, plain 3.6
    (dict(plain=4.0, compiled=2.0, ours=1.0), ("FUSE", "compiled 2.00x plain, ours 4.00x plain")),
    (dict(plain=4.0, compiled=2.0, library=1.9), ("LIBRARY", "compiled 2.00x plain, library 2.11x plain")),
    (dict(plain=4.0, compiled=2.9, library=3.4), (  # the library is within noise of both
        "FUSE", "compiled 1.38x plain, library 1.18x plain")),
    (dict(plain=4.0, library=2.0), ("LIBRARY", "library 2.00x plain"))])
def test_verdicts_by_hand(medians, expected):
    assert lab.verdict({name: (0.9 * t, t, 1.1 * t) for name, t in medians.items()}) == expected


def broken(x):
    return x * 2 + (x - x.detach())  # the same, with another gradient


def test_a_way_whose_results_or_gradients_are_off_is_not_timed():
    ways = dict(plain=lambda x: x * 2, right=lambda x: x + x, off=lambda x: x * 2.00001, gradient=broken,
                nan=lambda x: x * float("nan"), fails=lambda x: x.no_such_thing,
                forward=lambda x: x.detach() * 2, absent=None)
    found = lab.faults(ways, [torch.randn(4, 8, requires_grad=True)], torch.float32)
    assert {name: reason.split(":")[0] for name, reason in found.items()} == dict(
        off="wrong", gradient="wrong", nan="wrong", fails="AttributeError", absent="needs a GPU and Triton")
    assert "result 1" in found["gradient"]


@pytest.mark.parametrize("name", lab.PATTERNS)
def test_every_way_is_right_on_a_cpu(name):
    pattern = lab.PATTERNS[name]
    sizes = dict(scores=(2, 16, 8), topk=(3, 100)).get(name, (6, 16, 8)[:len(pattern.on_cpu)])
    ways = lab.ways_of(pattern, compiled=False, on_gpu=False)
    given = lab.tensors_of(pattern, sizes, torch.float32, CPU)
    ours = dict(ours="needs a GPU and Triton") if pattern.ours else {}
    assert lab.faults(ways, given, torch.float32) == ours and ("library" in ways or not pattern.library)


@pytest.mark.parametrize("target, registers, shared, warps, expected", [
    ("sm_90", 32, 0, 4, 1.0), ("sm_90", 255, 0, 4, 0.125), ("sm_80", 100, 0, 8, 0.25),
    ("sm_80", 16, 100_000, 4, 4 / 64), ("sm_90", 16, 100_000, 4, 8 / 64),
    ("gfx942", 92, 0, 4, 0.625), ("gfx942", 512, 0, 4, 0.125), ("gfx942", 16, 40_000, 4, 0.125),
    ("gfx950", 16, 40_000, 4, 0.5), ("gfx942", 64, 0, 16, 1.0), ("sm_70", 1, 0, 1, None)])
def test_occupancy_by_hand(target, registers, shared, warps, expected):
    """Of an H100: 65,536 registers for 64 warps of 32 threads, so 32 a thread are all that 64 warps may have;
    of an MI300X: 512 a thread in each of four parts, so 92, rounded to 96, leave five of eight waves."""
    assert lab.occupancy(target, registers, shared, warps) == expected


def test_a_pattern_as_it_is_measured(monkeypatch):
    """x (4, 8), weight (6, 8), bias (6,), 440 bytes with the result's; plain code moves the product twice."""
    monkeypatch.setitem(lab.PATTERNS, "p", lab.Pattern(
        "a product", (4, 6, 8), (1, 1, 1), lambda *n: [torch.randn(*s) for s in (n[::2], n[1:], n[1:2])],
        lambda x, w, b: x @ w.t() + b, torch.addmm, torch.nn.functional.linear))
    found = lab.measure("p", CPU, 2, False)
    assert found["least_bytes"] == 440 and found["plain_bytes"] == 440 + 2 * 4 * 4 * 6
    plain, ours, library = found["ways"]
    assert ours["forward"] is ours["both"] is None
    for low, median, high in (way[key] for way in (plain, library) for key in ("forward", "both")):
        assert 0 < low <= median <= high


@pytest.mark.slow
@pytest.mark.full
@pytest.mark.parametrize("target", TARGETS)
def test_kernels_compile_without_spills(target):
    pytest.importorskip("triton", reason="Triton is not installed")
    from evoformer_kernels.ahead_of_time import compiling, resources
    for name, pattern in ((name, p) for name, p in lab.PATTERNS.items() if p.ours):
        given = lab.tensors_of(pattern, pattern.on_cpu, torch.bfloat16, CPU)
        with compiling(target) as launches:
            lab.step(pattern.ours, given)
        used = [resources(each.compiled) for each in launches]
        assert used and not any(kernel["spills"] for kernel in used), name
        assert name not in ("gelu", "relu", "scores", "causal") or used[0]["mma"]
    found = lab.rung(65536, 4, target, CPU)
    assert found["forward"]["spills"] and found["backward"]["spills"]  # this row does not fit
    assert 0 < found["forward"]["occupancy"] <= 1 and "%" in lab.ladder_line(found)


@pytest.mark.parametrize("flags", [["--patterns"], ["--patterns", "nothing"], ["--ladder", "nothing"]])
def test_a_pattern_or_gpu_that_is_none_is_refused(flags, capsys):
    with pytest.raises(SystemExit) as ended:
        lab.run(flags)
    said = capsys.readouterr()
    assert ended.value.code == 2 and said.out == "" and said.err.count("\n") == 1 and flags[0] in said.err


@pytest.mark.gpu
@pytest.mark.parametrize("name", lab.PATTERNS)
def test_our_kernels_are_right_on_a_gpu(name):
    pattern = lab.PATTERNS[name]
    sizes = pattern.on_cpu if name != "wide" else (5, 3001)
    given = lab.tensors_of(pattern, sizes, torch.bfloat16, torch.device("cuda"))
    ways = lab.ways_of(pattern, compiled=False, on_gpu=True)
    assert lab.faults(ways, given, torch.bfloat16) == {}
