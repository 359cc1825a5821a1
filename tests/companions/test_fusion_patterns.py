"""The laboratory of fusion patterns: what it counts, judges and says, by hand; kernels for GPUs not here."""
import json
from types import SimpleNamespace

import pytest
import torch

from tests.support import run_program

pytest.importorskip("companions.fusion_patterns", reason="this companion was deleted")
from companions import fusion_patterns, patterns

CPU = torch.device("cpu")
TARGETS = ("sm_90", "gfx90a", "gfx942", "gfx950")


def way(name, median, judged=True, reason=None):
    found = dict(p20=0.9 * median, median=median, p80=1.1 * median, gb_per_s=8.0)
    return dict(name=name, judged=judged, reason=reason, forward=found, both=found)


def result(kernels=(), **medians):
    return dict(kernels=list(kernels), ways=[way(name, median) for name, median in medians.items()])


SPILLS = dict(kernel="k", spills=7)


@pytest.mark.parametrize("found, expected", [
    (result(plain=4.0), ("NONE", "only plain code ran, so there is nothing to compare")),
    (result(plain=4.0, compiled=3.9, library=4.1), (
        "DON'T", "nothing is faster beyond noise: compiled 1.03x plain")),
    (result(plain=4.0, compiled=2.0, library=3.0), ("FUSE", "compiled, 2.00x plain, library 1.33x plain")),
    (result(plain=4.0, compiled=2.0, ours=1.0), ("FUSE", "ours, 4.00x plain")),
    (result(plain=4.0, compiled=2.0, library=1.9), ("LIBRARY", "2.11x plain, compiled 2.00x plain")),
    (result(plain=4.0, compiled=2.9, library=3.4), (  # the library is within noise of both
        "FUSE", "compiled, 1.38x plain, library 1.18x plain")),
    (result(plain=4.0, library=2.0), ("LIBRARY", "2.00x plain")),
    (result([SPILLS], plain=4.0, ours=8.0), (
        "DON'T", "nothing is faster beyond noise: ours 0.50x plain; k has 7 spills")),
    (result([SPILLS], plain=4.0, ours=1.0), ("FUSE", "ours, 4.00x plain")),
])
def test_verdicts_by_hand(found, expected):
    assert patterns.verdict(found) == expected


def test_what_is_wrong_or_something_else_is_not_judged():
    found = result(plain=4.0, compiled=2.0)
    found["ways"] += [way("ours", 0.1, reason="wrong: result 0"), way("beside", 0.1, judged=False)]
    assert patterns.verdict(found) == ("FUSE", "compiled, 2.00x plain")


def tensors(*sizes):
    return [torch.randn(size, requires_grad=True) for size in sizes]


def test_bytes_by_hand():
    """x (4, 8) and y (8,): 128 + 32 bytes in, 128 out; back 128 of the gradient, 160 read, 160 written."""
    plain = patterns.Way("plain", lambda x, y: (x + 1) * y, tensors((4, 8), (8,)))
    assert patterns.necessary(plain) == (288, 288 + 288 + 160)
    with patterns.Traffic() as traffic, torch.no_grad():
        plain.outputs()
        plain.tensors[0].view(-1)  # costs nothing
    assert traffic.bytes == (128 + 128) + (128 + 32 + 128)
    constant = patterns.Way("plain", lambda x: x * 2, [torch.ones(8)])
    assert patterns.necessary(constant) == (64, 64) and len(constant.step()) == 1


def broken(x):
    return x * 2 + (x - x.detach())  # the same, with another gradient


def test_a_way_whose_gradients_are_off_is_not_timed():
    given = tensors((4, 8))
    ways = [patterns.Way(name, run, given) for name, run in (
        ("plain", lambda x: x * 2), ("right", lambda x: x + x), ("off", lambda x: x * 2.01),
        ("gradient", broken), ("fails", lambda x: x.no_such_thing), ("other", lambda x: x * 3))]
    ways[-1].judged = False
    patterns.faults(ways, torch.float32)
    assert [way.reason and way.reason.split(":")[0] for way in ways] == [
        None, None, "wrong", "wrong", "AttributeError", None]
    assert "result 1" in ways[3].reason


def test_ways_take_turns_and_each_round_begins_with_another():
    ways, order = [patterns.Way(name, None, []) for name in "abc"], []
    patterns.by_turns(ways, "forward", lambda way: order.append(way.name), CPU, 4)
    assert "".join(order) == "abcbcacababcbcacab" and all(len(way.forward) == 4 for way in ways)


def product(x, weight, bias):
    return x @ weight.t() + bias


SMALL = patterns.Pattern("a product", (4, 6, 8), (1, 1, 1), lambda m, n, k: ((m, k), (n, k), (n,)), product,
                         from_library=torch.nn.functional.linear, constants=1,
                         liger=("json", "no_such_function", None),
                         beside=("half of it", lambda x, weight, _: x @ weight.t()))


def test_tensors_of_a_pattern():
    """What is multiplied with a row is as much smaller as its sum has summands; the last one is constant."""
    x, weight, bias = patterns.tensors_of(SMALL, (400, 600, 64), torch.float64, CPU)
    assert [t.requires_grad for t in (x, weight, bias)] == [True, True, False] and x.dtype == torch.float64
    assert [t.std().item() for t in (x, weight, bias)] == pytest.approx([1, 1 / 8, 1], rel=0.05)
    again = patterns.tensors_of(SMALL, (400, 600, 64), torch.float64, CPU)
    assert all(map(torch.equal, (x, weight, bias), again))
    kernel = patterns.Pattern("", (), (), lambda c: ((9, 9), (500, c, 3, 3), (4, 5, 6)), None)
    of_convolution = patterns.tensors_of(kernel, (7,), torch.float32, CPU)
    assert [t.std().item() for t in of_convolution[1:]] == pytest.approx([63 ** -0.5, 1], rel=0.1)
    elsewhere = patterns.tensors_of(SMALL, SMALL.on_gpu, torch.bfloat16, torch.device("meta"))
    assert {(t.device.type, t.dtype) for t in elsewhere} == {("meta", torch.bfloat16)}


def test_ways_of_a_pattern(monkeypatch):
    given, compiled = [torch.ones(2, 8), torch.ones(3, 8), torch.ones(3)], []
    monkeypatch.setattr(torch, "compile", lambda function, dynamic: compiled.append(dynamic) or function)
    ways = patterns.ways_of(SMALL, given, compiled=True, on_gpu=False)
    assert [(way.name, way.judged, way.reason) for way in ways] == [
        ("plain", True, None), ("compiled", True, None), ("library", True, None),
        ("liger", True, "not installed"), ("half of it", False, None)]
    assert compiled == [False] and all(way.tensors is given for way in ways)
    assert ways[0].run is ways[1].run is product


def test_a_pattern_as_it_is_measured():
    """x (4, 8), weight (6, 8), bias (6,), 416 bytes with the result's; 2 * 4 * 6 * 8 FLOPs, thrice."""
    found = patterns.measure("p", SMALL, CPU, 2, False, ())
    assert {key: found[key] for key in ("name", "title", "sizes", "dtype", "kernels")} == dict(
        name="p", title="a product", sizes=[4, 6, 8], dtype="float32", kernels=[])
    least = 4 * (4 * 8 + 6 * 8 + 6 + 4 * 6)
    assert (found["least_bytes"], found["least_bytes_both"]) == (least, 2 * least + 4 * (4 * 8 + 6 * 8))
    assert found["plain_bytes_both"] > found["plain_bytes"] == least + 2 * 4 * 4 * 6  # the product, twice
    assert found["flops"] == 3 * 2 * 4 * 6 * 8
    for row in found["ways"]:
        for key, count in (("forward", least), ("both", found["least_bytes_both"])):
            assert (row[key] is None) == (row["name"] == "liger")
            if row[key]:
                assert 0 < row[key]["p20"] <= row[key]["median"] <= row[key]["p80"]
                assert row[key]["gb_per_s"] == pytest.approx(count / row[key]["median"] / 1e9)


def test_gradients_on_the_limit_are_right():
    """Where plain code is exact, and so is every way, nothing is off, though nothing is allowed."""
    ways = [patterns.Way(name, lambda x: x * 0, tensors((4,))) for name in ("plain", "same")]
    patterns.faults(ways, torch.float32)
    assert [way.reason for way in ways] == [None, None]


def test_what_is_said_of_a_kernel(monkeypatch):
    """With as many warps as it was launched with, 4 if nobody said."""
    known = SimpleNamespace(resources=lambda compiled: dict(registers=compiled))
    monkeypatch.setattr(patterns, "ahead_of_time", known, raising=False)
    launched = SimpleNamespace(compiled=40, options=dict(num_warps=8), name="k")
    assert patterns.resources("sm_90", launched) == dict(
        target="sm_90", kernel="k", warps=8, registers=40)
    launched.options = {}
    assert patterns.resources("sm_1", launched) == dict(
        target="sm_1", kernel="k", warps=4, registers=40)


@pytest.mark.parametrize("name", fusion_patterns.PATTERNS)
def test_every_way_is_right_on_a_cpu(name):
    pattern = fusion_patterns.PATTERNS[name]
    special = dict(conv=(2, 4, 5, 5), scores=(2, 16, 8), topk=(3, 100))
    sizes = special.get(name, (6, 16, 8)[:len(pattern.on_cpu)])
    given = patterns.tensors_of(pattern, sizes, torch.float32, CPU)
    ways = patterns.ways_of(pattern, given, compiled=False, on_gpu=False)
    patterns.faults(ways, torch.float32)
    reasons = {way.name: way.reason for way in ways if way.reason}
    assert set(reasons) <= {"ours", "liger"} and len(ways) > 1
    assert all(reason in ("needs a GPU", "needs Triton", "not installed") for reason in reasons.values())


def test_claims_say_what_was_measured():
    found = dict(name="gelu", plain_bytes=4e6, least_bytes=2e6, **result(plain=4.0, compiled=2.0))
    found["ways"].append(way("library", 1.0, reason="wrong"))
    step = dict(target="sm_90", width=8192, warps=4, spills=350, kernel="k")
    said = fusion_patterns.claims([found], [dict(step, spills=0, width=64), step], 16e9)
    assert len(said) == 6 and said[0][1] == "bytes 4.0 -> 2.0 MB (weights included); step 2.00x (compiled)"
    assert said[1][1] == said[4][1] == "not measured" and "8192 with 4 warps has 350 spills (k)" in said[5][1]
    alone = dict(name="topk", plain_bytes=2e6, least_bytes=1e6, **result(plain=4.0))
    assert fusion_patterns.claims([alone], [], 16e9)[3][1].endswith("step not compared, only plain code ran")
    wide = dict(name="wide", **result(plain=4.0, library=2.0))
    said = fusion_patterns.claims([wide], [], 16e9)[2][1]
    assert said == "library: 8.0 GB/s of the bytes that must move, 50% of a copy"


@pytest.mark.parametrize("names", ["", " , "])
def test_no_pattern_at_all_is_refused(names, capsys):
    with pytest.raises(SystemExit) as ended:
        fusion_patterns.run(["--patterns", names])
    said = capsys.readouterr()
    assert ended.value.code == 2 and said.out == "" and said.err.count("\n") == 1
    assert "argument --patterns: names none of relu gelu" in said.err


def test_registers_by_hand():
    triton = pytest.importorskip("triton", reason="Triton is not installed")
    from fusion_lab.kernels.ahead_of_time import resources
    listing = "\t.vgpr_count:     92\n\t.vgpr_spill_count: 5\n v_mfma_f32 v_mfma_f32"
    kernel = SimpleNamespace(asm=dict(amdgcn=listing), metadata=SimpleNamespace(shared=1024))
    assert resources(kernel) == dict(shared=1024, registers=92, spills=5, mma=2) and triton


@pytest.mark.slow
@pytest.mark.full
@pytest.mark.sample
@pytest.mark.parametrize("target", TARGETS)
def test_kernels_compile_without_spills(target):
    pytest.importorskip("triton", reason="Triton is not installed")
    options = SimpleNamespace(reason="compiled only")
    for name, pattern in fusion_patterns.PATTERNS.items():
        if pattern.ours:
            found = patterns.kernels_of(pattern, [SimpleNamespace(name="ours", **vars(options))], [target])
            assert found and not any(kernel["spills"] for kernel in found), found
            assert name not in ("gelu", "scores") or found[0]["mma"]
    steps = fusion_patterns.rung(65536, 4, target, CPU)
    assert len(steps) == 2 and all(step["spills"] for step in steps)  # and this row does not fit


@pytest.mark.slow
def test_the_laboratory_runs(tmp_path):
    flags = ["--patterns", "topk conv", "--rounds", 2, "--no-compile", "--targets", "gfx942"]
    done = run_program("companions/fusion_patterns.py", *flags, "--device", "cpu", "--profile-dir", tmp_path)
    assert done.returncode == 0, done.stderr
    found = json.loads((tmp_path / "fusion_patterns.json").read_text())
    assert [p["name"] for p in found["patterns"]] == ["topk", "conv"] and len(found["claims"]) == 6
    assert found["patterns"][0]["verdict"][0] == "NONE"  # no library has it
    said = json.loads(done.stdout.splitlines()[-1])
    assert said["verdicts"]["topk"] == "NONE" and said["summary_file"].endswith("fusion_patterns.json")
    wrong = run_program("companions/fusion_patterns.py", "--patterns", "nothing")
    assert wrong.returncode == 2 and wrong.stderr.count("\n") == 1


@pytest.mark.gpu
@pytest.mark.parametrize("name", fusion_patterns.USUAL)
def test_our_kernels_are_right_on_a_gpu(name):
    pattern = fusion_patterns.PATTERNS[name]
    for dtype in (torch.float32, torch.bfloat16):
        sizes = pattern.on_cpu if name != "wide" else (5, 3001)
        given = patterns.tensors_of(pattern, sizes, dtype, torch.device("cuda"))
        ways = patterns.ways_of(pattern, given, compiled=False, on_gpu=True)
        patterns.faults(ways, dtype)
        assert not any(way.reason for way in ways if way.name != "liger")
