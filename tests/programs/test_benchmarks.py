"""The programs in benchmarks/, at tiny sizes on a CPU: they run, judge accuracy and write their results."""
import json
import math
import os
import re
import shutil
import subprocess
import sys
import types
import warnings

import pytest
import torch

from fusion_lab.measuring import bench, clocks
from fusion_lab.training import errors
from tests.kernels.clients import sources
from tests.support import ROOT, require_shared

sys.path.insert(0, str(ROOT / "benchmarks"))


def run(program, *flags, **environment):
    return subprocess.run([sys.executable, ROOT / "benchmarks" / program, *map(str, flags)], text=True,
                          env={**os.environ, **environment}, capture_output=True, check=False)


@pytest.mark.slow
@pytest.mark.interpreted
@pytest.mark.parametrize("operation", ["sub-layer, starting node", "sub-layer, ending node",
                                       "outer product", "triangle multiplication", "pair transition"])
def test_what_is_timed_computes_the_same(operation):
    """In the interpreter, in float32; the compiler's ways are left out."""
    import measure_kernels
    functions, tensors = measure_kernels.OPERATIONS[operation](torch.float32, 8)
    tensors.append(torch.randn_like(functions["plain"](*tensors)))
    exact = measure_kernels.step(functions["plain"], [t.double() for t in tensors])
    for name in functions.keys() - {"compiled"}:
        found = measure_kernels.errors(measure_kernels.step(functions[name], tensors), exact)
        assert all(error < 1e-4 for error in found), (name, found)


@pytest.mark.slow
def test_everyones_triangle_kernels(tmp_path):
    """A stand-in of cuEquivariance on a path; ours in Triton's interpreter."""
    pytest.importorskip("triton")
    done = run("peers.py", "--quick", "--sizes", 4, "--repeats", 1, "--only", "plain|SDPA|ours|cuEq|trifast",
               "--path", ROOT / "tests/programs/fake_peer", "--out", tmp_path, TRITON_INTERPRET="1")
    assert done.returncode == 0, done.stdout + done.stderr
    rows = {(row["operation"], row["peer"]): row
            for row in json.loads((tmp_path / "peers.json").read_text())["rows"]}
    assert len(rows) == 8 and rows.pop(("attention", "trifast"))["failed"] == "not installed (trifast)"
    assert all(row["accurate"] and row["called_ms"] > 0 for row in rows.values()), rows


def test_a_peer_that_is_wrong_or_fell_back_is_said():
    from benchmarks import peers, peers_cases
    rows = [dict(peer="plain", error=1e-2, gradient_error=1e-2), dict(peer="ours", failed="x"),
            dict(peer="far", error=1e-2, gradient_error=5e-2)]
    peers.judge(rows, torch.bfloat16)
    assert [row.get("accurate") for row in rows] == [True, None, False]
    proofs = {operation: {peer.name: peer.proof for peer in found}
              for operation, found in peers_cases.PEERS.items()}
    ran = ["kernel_cutlass_kernel_kf_trimul_sm90_training", "void at::native::elementwise_kernel"]
    proof = proofs["multiplication"]["cuEquivariance"]
    assert [bool(re.search(proof, name)) for name in ran] == [True, False]


def test_a_part_that_seems_slower_than_the_whole_is_refused():
    from benchmarks import peers
    peer = types.SimpleNamespace(proof="^ours")
    row = dict(kernels=[("ours_kernel", 1.0)], forward_ms=0.4, both_ms=1.0, called_ms=1.2)
    peers.refuse(row, peer)
    for wrong in (dict(both_ms=1.3), dict(forward_ms=1.1)):
        with pytest.raises(errors.UserError, match="the host stalled"):
            peers.refuse(row | wrong, peer)
    with pytest.raises(errors.UserError, match="its kernel did not run, but other"):
        peers.refuse(dict(row, kernels=[("other", 1.0)]), peer)


def test_contenders_take_turns(monkeypatch):
    """Steps of 5 and of 2 s, and a clock that takes one to be read."""
    now = iter(range(1000))

    def made(seconds):
        def step(batch, mark=lambda: None):
            for _ in range(seconds):
                next(now)
            mark()
            return torch.tensor(float(seconds))
        return types.SimpleNamespace(step=step)
    monkeypatch.setattr(clocks.time, "perf_counter", lambda: float(next(now)))
    contenders = dict(slow=lambda: made(5), fast=lambda: made(2), absent=lambda: 1 / 0)
    rows = bench.contest(contenders, "", {}, torch.device("cpu"), 3)
    assert [(row["p20"], row["median"], row["p80"]) for row in rows[:2]] == [(6,) * 3, (3,) * 3]
    assert rows[2] == dict(name="absent", reason="ZeroDivisionError: division by zero")
    assert re.search(r"6000.00 \(6000.00, 6000.00\) \| n/a", bench.contest_table("float32", rows))
    with pytest.raises(errors.UserError, match="--only nothing"):
        bench.contest(contenders, "nothing", {}, torch.device("cpu"), 3)


@pytest.mark.slow
def test_ladder_of_two_checkouts(tmp_path):
    """The other one's code runs: there the model says something else of its attention."""
    other = tmp_path / "other"
    for package in ("evoformer_kernels", "fusion_lab", "tiny_openfold"):
        shutil.copytree(ROOT / package, other / package)
    (other / "benchmarks").mkdir()
    shutil.copy(ROOT / "benchmarks" / "ladder_rung.py", other / "benchmarks")
    text = (ROOT / "tiny_openfold_v2.py").read_text()
    (other / "tiny_openfold_v2.py").write_text(text.replace(
        "\nPROGRAM = ", '\nTinyOpenFoldV2.attention_kernel = lambda *_: "of the other"\n\nPROGRAM = '))
    done = run("measure_ladder.py", "--quick", "--only", "fused bf16", "--steps", 2, "--out", tmp_path,
               "--root", ROOT, other)
    assert done.returncode == 0, done.stderr
    rows = json.loads((tmp_path / "ladder.json").read_text())["rows"]
    assert [row["name"].split(" | ")[1] for row in rows] == [f"fused bf16 autocast ({root})"
                                                             for root in (ROOT, other)]
    assert [row["kernel"] == "of the other" for row in rows] == [False, True]
    assert all(row["accurate"] and row["median_ms"] > 0 for row in rows)
    assert re.search(rf"\({re.escape(str(ROOT))}\): time [\d.]+ of \({re.escape(str(other))}\)", done.stdout)
    done = run("measure_ladder.py", "--quick", "--root", tmp_path)
    assert done.returncode == 2 and done.stderr.count("\n") == 1 and str(tmp_path) in done.stderr


@pytest.mark.slow
def test_a_rung_that_fails_is_a_row_with_its_reason():
    import measure_ladder
    rung = measure_ladder.Rung("x", ROOT, ["--use-tf32", "--batch-size", "0"], 2)
    rung.wait_until_ready()
    assert "--batch-size" in rung.finish()["failed"]


def test_rungs_for_which_memory_was_short_begin_again_alone(monkeypatch):
    """Of three, 2 is short beside others and 9 always; each try has a row of its own number."""
    import measure_ladder
    tries = []

    def rung(name, steps):
        tries.append(name)
        row = dict(name=name, number=len(tries), out_of_memory=name == 9 or name == 2 and len(tries) < 4)
        return types.SimpleNamespace(wait_until_ready=lambda: None, finish=lambda: row)
    monkeypatch.setattr(measure_ladder, "Rung", rung)
    rows = list(measure_ladder.measured([(1,), (2,), (9,)], 2))
    assert [(row["name"], row["number"], row["out_of_memory"]) for row in rows] == [
        (1, 1, False), (2, 4, False), (9, 5, True)]


@pytest.mark.parametrize("size, trial", [pytest.param(5, ["--quick"], marks=pytest.mark.slow),
                                         pytest.param(64, [], marks=pytest.mark.gpu)])
def test_patched_blocks(size, trial, tmp_path):
    """Boltz' own; on a CPU, where the block's own code runs in both."""
    import measure_patches
    sizes = ["--sizes", str(size), "--steps", "1"]
    with sources.project("boltz-2.2.1").loaded(), warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        assert measure_patches.main([*trial, *sizes, "--out", str(tmp_path)]) == 0
    rows = json.loads((tmp_path / "patches.json").read_text())["results"][f"boltz S{size}"]
    assert len(rows) == (6 if trial else 8)
    assert (rows["patched"]["errors"] == rows["as it is"]["errors"]) == bool(trial)
    assert any("its own forward runs" in str(each.message) for each in said) == bool(trial)
    assert all(row["median_ms"] > 0 for row in rows.values())


def test_patched_layers_that_are_wrong_or_absent():
    import measure_patches
    rows = {"as it is": dict(errors=[1e-2] * 3), "patched": dict(errors=[1e-2, 1e-2, 5e-2]),
            "as it is, checkpointed": dict(failed="x"), "patched, checkpointed": dict(errors=[1] * 3),
            "cuEquivariance": dict(failed="not ours to judge")}
    assert [text.partition(":")[0] for text in measure_patches.broken(rows)] == [
        "patched", "as it is, checkpointed"]
    one, nan = torch.ones(3), torch.full((3,), torch.nan)
    wrong = measure_patches.errors([(one, nan), (nan, one)], [(one, one), (one, one)])
    assert len(measure_patches.broken({"as it is": dict(errors=[0, 0]), "patched": dict(errors=wrong)})) == 1
    assert all(math.isnan(error) for error in wrong)
    done = run("measure_patches.py", "--quick")
    assert done.returncode == 3 and done.stderr.count("\n") == 1 and "boltz" in done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("program, flags", [
    ("compare_llama", "--hidden-size 32 --num-heads 2 --num-kv-heads 1 --num-layers 1"),
    ("compare_mpnn", "--hidden-dim 16 --num-layers 1 --neighbors 6 --only baseline|fused")])
def test_companions_beside_their_peers(program, flags, tmp_path):
    flags = f"{flags} --seq-len 16 --batch-size 1 --steps 2 --device cpu".split()
    done = run(f"{program}.py", *flags, "--out", tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads((tmp_path / f"{program.partition('_')[2]}.json").read_text())
    for rows in found.get("tables", dict(bfloat16=found.get("rows"))).values():
        times = {row["name"]: row["median"] for row in rows}
        assert {"ours, baseline", "ours, fused"} <= times.keys() and min(times.values()) > 0


@pytest.mark.slow
def test_smaller_models_have_their_recovery_beside_their_speed(tmp_path):
    done = run("mpnn_sizes.py", "--num-steps", 2, "--seq-len", 16, "--rounds", 2, "--device", "cpu", "--out",
               tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = json.loads((tmp_path / "mpnn_sizes.json").read_text())["rows"]
    assert [(row["name"], row["batch_size"]) for row in rows] == [
        (name, count) for name in ("baseline", "minimal", "EXTREME-v2") for count in (1, 8)]
    for row in rows:
        per_protein = row["median"] / row["batch_size"]
        assert row["speedup"] == pytest.approx(rows[0]["median"] / per_protein) and 0 <= row["recovery"] <= 1


@pytest.mark.slow
def test_ranks(tmp_path):
    done = run("measure_ranks.py", "--quick", "--steps", 3, "--only", "A", "--out", tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = json.loads((tmp_path / "ranks.json").read_text())["rows"]
    assert [(row["name"], row["gpus"]) for row in rows] == [("A", 1), ("A", 2)]
    for row in rows:
        assert row["samples_per_s"] == pytest.approx(1e3 * row["gpus"] * 2 / row["median_ms"])


def test_gains_are_of_runs_on_one_gpu_and_on_several():
    import measure_ranks
    rows = [dict(zip(("name", "gpus", "samples_per_s"), values, strict=True)) for values in (
        ("A", 1, 10), ("A", 2, 18), ("split", 1, 12), ("split", 2, 18), ("B", 1, 3), ("S 9", 1, 3))]
    assert measure_ranks.gains([*rows, dict(name="B", failed="x")])[1:] == [
        ["A", "10.0", "18.0", "1.80"], ["split", "12.0", "18.0", "1.50"]]
    for gpus, whole, each in ((4, 8, 2), (3, 6, 2), (16, 16, 1)):
        runs = measure_ranks.runs_of(gpus, quick=False)
        assert [run[:3] for run in runs if run[0] in "B split"] == [
            ("B", 1, 1), ("B", gpus, 1), ("split", 1, whole), ("split", gpus, each)]


def record_of(monkeypatch, tmp_path, *flags, losses=(4.0, 4.0), precisions=(0.7, 0.7, 0.7), **row):
    """record.py's exit code, with stand-ins for the processes that it starts. DCA's P(L/2) is .6."""
    import record
    found = iter([dict(performance_summary=dict(avg_loss=loss)) for loss in losses] if "step" in flags else [
        dict(performance_summary=dict(total_samples=20, avg_training_speed=2.0),
             evaluation=dict(final=dict(held_out=dict(a=dict(p_l2=p), b=dict(p_l2=p))))) for p in precisions])
    row = dict(accurate=True, failures=["far off"], median_ms=2.5, p20_ms=2.4, p80_ms=2.6) | row
    monkeypatch.setattr(record, "measured", lambda rungs, steps: [dict(row, name=name) for name, *_ in rungs])
    monkeypatch.setattr(record, "summary_of", lambda flags: next(found))
    monkeypatch.setattr(record, "dca_precision", lambda data, names: 0.6)
    monkeypatch.setattr(record, "compare_numerics", lambda *_: ({}, [] if row["accurate"] else ["far off"]))
    flags = [*flags, "--out", str(tmp_path), "--", "--device", "cpu"]
    return errors.exit_code(record.main, flags, "record.py")


STEP, LEARN = ("step", "--quick"), ("learn", "--data", "families")


@pytest.mark.parametrize("track, cells", [
    (STEP, "2.50 (2.40, 2.60)"), ((*STEP, "--record", str(ROOT)), "2.50 (2.40, 2.60)"),
    (LEARN, "10.00 (10.00, 10.00) | 0.700")])
def test_a_record_is_a_row_and_a_raw_file(monkeypatch, tmp_path, capsys, track, cells):
    assert record_of(monkeypatch, tmp_path, *track) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1].endswith(f" | {cells} | ")
    assert any("time 1.000 of (record)" in line for line in lines) == ("--record" in track)
    assert json.loads((tmp_path / "record.json").read_text())["broken"] == []


@pytest.mark.parametrize("track, broken", [
    (STEP, dict(accurate=False)), (STEP, dict(losses=(4.0, 4.01))), (STEP, dict(losses=(4.0, math.nan))),
    (LEARN, dict(accurate=False)), (LEARN, dict(precisions=(0.7, 0.6, 0.7)))])
def test_a_candidate_that_breaks_a_rule_is_refused(monkeypatch, tmp_path, capsys, track, broken):
    assert record_of(monkeypatch, tmp_path, *track, **broken) == 1
    assert "cpu" not in capsys.readouterr().out.splitlines()[-1]  # no row
    assert json.loads((tmp_path / "record.json").read_text())["broken"]


@pytest.mark.parametrize("flags", ["step --quick -- --num-blocks 1", "step --quick -- --learning-rate 1",
                                   "learn --data x -- --init-from benchmarks/record.py", "learn", "x"])
def test_what_the_rules_forbid_is_one_line(flags, tmp_path):
    done = run("record.py", "--out", tmp_path, *flags.split())
    assert done.returncode == 2 and done.stderr.count("\n") == 1 and not [*tmp_path.iterdir()]


def test_precision_of_dca_for_the_record(tmp_path):
    """That of another program, as in tests/proteins/test_coevolution.py."""
    import record
    pytest.importorskip("gemmi")
    for suffix in ("a3m", "pdb"):
        shutil.copy(require_shared("data", "families", f"1WVN_A.{suffix}"), tmp_path)
    assert record.dca_precision(tmp_path, ["1WVN_A"]) == pytest.approx(0.595, abs=5e-4)


@pytest.mark.slow
def test_a_record_of_a_tiny_step(tmp_path):
    done = run("record.py", "step", "--quick", "--out", tmp_path, "--", "--use-amp")
    assert done.returncode == 0, done.stdout + done.stderr
    rows = json.loads((tmp_path / "record.json").read_text())["rows"]
    assert [row["accurate"] for row in rows] == [True] and "| `--use-amp` |" in done.stdout.splitlines()[-1]
