"""The programs in benchmarks/, at tiny sizes on a CPU: they run, judge accuracy and write their results."""
import json
import os
import re
import shutil
import subprocess
import sys
import types

import pytest
import torch

from fusion_lab.measuring import clocks, contest
from tests.support import ROOT

sys.path.insert(0, str(ROOT / "benchmarks"))


def run(program, *flags, **environment):
    return subprocess.run([sys.executable, ROOT / "benchmarks" / program, *map(str, flags)], text=True,
                          env={**os.environ, **environment}, capture_output=True, check=False)


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
    assert all(row["accurate"] and row["both_ms"] > 0 for row in rows.values()), rows
    assert "| trifast | not installed (trifast) |" in (tmp_path / "peers.md").read_text()


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


def test_verdict_on_peers_of_llama():
    import compare_llama
    def rows(*seconds, memory=(100, 110, 50)):
        names = ("ours, compiled", "Liger", f"transformers, {compare_llama.LOW}")
        return [dict(name=name, median=t, peak_mb=mb)
                for name, t, mb in zip(names, seconds, memory, strict=True)]
    said = compare_llama.verdict([*rows(0.8, 1.0, 0.5), dict(name="Liger, compiled", reason="failed")])
    assert said == (
        "ours, compiled takes 0.80 times the time and 0.91 times the memory of Liger: the goal (0.8, no more "
        "memory) is reached; 1.60 times the time and 2.00 times the memory of transformers, bf16 weights, "
        "which is less exact")
    for missed in (rows(0.81, 1.0, 0.5), rows(0.8, 1.0, 0.5, memory=(111, 110, 50))):
        assert "is missed" in compare_llama.verdict(missed)
    on_cpu = compare_llama.verdict(rows(1.0, 2.0, 2.0, memory=(None,) * 3))
    assert on_cpu.startswith("ours, compiled takes 0.50 times the time of Liger;") and "goal" not in on_cpu
    assert compare_llama.verdict(rows(1.0, 2.0, 2.0)[:1]) == "no peer was measured"
    assert compare_llama.verdict(rows(1.0, 2.0, 2.0)[1:]) == "none of ours was measured"


def test_contenders_warm_up_alone_and_race_in_turn(monkeypatch):
    steps, now = [], iter(range(1000))

    def contender(name, seconds):
        def step(batch):
            steps.append((name, batch))
            for _ in range(seconds):
                next(now)
            return torch.tensor(float(seconds))
        return contest.Contender(name, lambda: types.SimpleNamespace(step=step), "batch", torch.device("cpu"))
    monkeypatch.setattr(clocks.time, "perf_counter", lambda: float(next(now)))
    slow, fast = contender("slow", 5), contender("fast", 2)
    assert steps == [("slow", "batch")] * 4 + [("fast", "batch")] * 4
    assert fast.row == dict(name="fast", loss=2.0, peak_mb=None)
    del steps[:]
    assert fast.step("other") == 2 and steps.pop() == ("fast", "other")
    contest.race([slow, fast], "new", 3)  # an untimed step, then a timed one
    assert steps == [(name, "new") for name in ("slow", "slow", *["fast"] * 4, *["slow"] * 4, "fast", "fast")]
    assert [(row["p20"], row["median"], row["p80"]) for row in (slow.row, fast.row)] == [(6,) * 3, (3,) * 3]
    assert contest.cells(dict(slow.row, p20=4.004, p80=7.0)) == ("6000.00 (4004.00, 7000.00)", "n/a")
    assert contest.cells(dict(fast.row, peak_mb=9.6))[1] == "10"
    contest.race([], "new", 3)


@pytest.mark.slow
def test_scaling(tmp_path):
    done = run("measure_scaling.py", "--quick", "--only", "A", "--steps", 3, "--out", tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads((tmp_path / "scaling.json").read_text())
    assert [(row["name"], row["gpus"]) for row in found["rows"]] == [("A", 1), ("A", 2)]
    assert [kind for kind, *_ in found["gains"]] == ["weak, A"]
    for row in found["rows"]:
        assert row["samples_per_s"] == pytest.approx(1e3 * row["gpus"] * 2 / row["median_ms"])
        assert len(row["peak_mb_by_rank"]) == row["gpus"]


def test_gains_of_weak_and_strong_scaling():
    import measure_scaling
    keys = "name", "gpus", "samples_per_s", "batch_of_each"
    rows = [dict(zip(keys, values, strict=True)) for values in (
        ("A", 1, 10, 2), ("A", 2, 18, 2), ("B8", 1, 12, 4), ("B8", 2, 24, 4))]
    assert measure_scaling.gains(rows, 2) == [
        ("weak, A", 10, 18, 1.8), ("weak, B8", 12, 24, 2), ("strong, batch 4", 12, 18, 1.5)]
    assert measure_scaling.gains(rows[:1] + rows[2:], 2) == [("weak, B8", 12, 24, 2)]  # one has failed


@pytest.mark.slow
def test_ladder_of_two_checkouts(tmp_path):
    """The other one's code runs: there the model says something else of its attention."""
    other = tmp_path / "other"
    shutil.copytree(ROOT / "fusion_lab", other / "fusion_lab")
    shutil.copytree(ROOT / "proteins", other / "proteins")
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
    plot = "--plot", tmp_path / "x.png"  # for which a CPU's rows have no memory figure
    for wrong in (("--root", tmp_path), (*plot, tmp_path / "ladder.json"), (*plot, tmp_path / "absent.json")):
        done = run("measure_ladder.py", *wrong)
        assert done.returncode == 2 and done.stderr.count("\n") == 1 and str(tmp_path) in done.stderr
    assert not (tmp_path / "x.png").exists()


@pytest.mark.slow
def test_a_rung_that_fails_is_a_row_with_its_reason(tmp_path):
    import measure_ladder
    rung = measure_ladder.Rung("x", ROOT, ["--use-tf32", "--batch-size", "0"], 2)
    assert not rung.guest.wait_until_ready()
    assert "--batch-size" in rung.finish()["failed"]


def test_rungs_for_which_memory_was_short_begin_again_without_the_others(monkeypatch):
    """A machine that holds five units; a rung takes as many as its name says."""
    import measure_ladder
    rounds = []

    def one_round(rungs, steps, together):
        rounds.append((rungs, together))
        left = 5
        for rung in rungs:
            left = left - int(rung) if together else 5 - int(rung)
            yield dict(name=rung, out_of_memory=True) if left < 0 else dict(name=rung)
    monkeypatch.setattr(measure_ladder, "one_round", one_round)
    rows = list(measure_ladder.measured(["1", "2", "3", "9", "4"], 2, True))
    assert [row["name"] for row in rows if not row.get("out_of_memory")] == ["1", "2", "3", "4"]
    assert [row["name"] for row in rows if row.get("out_of_memory")] == ["9"]
    assert rounds == [(["1", "2", "3", "9", "4"], True), (["3", "9", "4"], True), (["9", "4"], True),
                      (["9", "4"], False)]
    rounds.clear()
    assert list(measure_ladder.measured(["9"], 2, False)) == [dict(name="9", out_of_memory=True)] and (
        len(rounds) == 1)


@pytest.mark.slow
def test_patched_layers(tmp_path):
    """Of a stand-in, on a CPU, where the layer's own code runs in both."""
    done = run("measure_patches.py", "--quick", "--sizes", 5, "--steps", 1, "--out", tmp_path,
               "--path", ROOT / "tests/programs/fake_peer")
    assert done.returncode == 0, done.stdout + done.stderr
    rows = json.loads((tmp_path / "patches.json").read_text())["results"]["openfold S5"]
    assert len(rows) == 4 and rows["patched"]["errors"] == rows["as it is"]["errors"]
    assert all(row["median_ms"] > 0 for row in rows.values()) and "its own forward runs" in done.stderr


def test_patched_layers_that_are_wrong_or_absent():
    import measure_patches
    rows = {"as it is": dict(errors=[1e-2] * 3), "patched": dict(errors=[1e-2, 1e-2, 5e-2]),
            "as it is, checkpointed": dict(failed="x"), "patched, checkpointed": dict(errors=[1] * 3),
            "cuEquivariance": dict(failed="not ours to judge")}
    assert [text.partition(":")[0] for text in measure_patches.broken(rows)] == [
        "patched", "as it is, checkpointed"]
    done = run("measure_patches.py", "--quick")
    assert done.returncode == 3 and done.stderr.count("\n") == 1 and "boltz" in done.stderr


@pytest.mark.parametrize("longest", [600, 1000, 1100, 1190, 2000])
def test_the_longest_protein_is_found_in_few_trials(longest, tmp_path):
    """The memory of two short ones promises 1159 residues; really so many fit."""
    import measure_long
    asked = types.SimpleNamespace(lengths=[64, 256, 512], trials=4, stride=8, limit=1.0, quick=False,
                                  out=tmp_path)
    tried = []

    def launch(part, ranks, lengths, steps):
        tried.append(lengths)
        return [dict(length=n, ranks=ranks, part=part, peak_mb=100 + n * n * 6.6e-4) if n <= longest else
                dict(length=n, ranks=ranks, part=part, out_of_memory=True, reason="out of memory")
                for n in lengths]
    measurement = measure_long.Measurement(asked, dict(rows=[], seconds=[]))
    measurement.launch = launch
    measurement.longest(2)
    rows = json.loads((tmp_path / "long.json").read_text())["rows"]
    trials = [row for row in rows if row.get("trial")]
    assert tried[0] == [256, 512] and len(trials) == len(tried) - 1 <= 4
    fit = max(row["length"] for row in trials if "peak_mb" in row)
    assert all(row["length"] % 8 == 0 for row in trials) and fit <= longest
    assert fit > 0.9 * min(longest, 1159)
    assert any(str(fit) in line for line in measure_long.findings(rows))


def test_the_longest_protein_is_one_that_was_no_trial():
    import measure_long
    rows = [dict(length=n, ranks=2, part="longest", peak_mb=n) for n in (16, 32)]
    rows += [dict(length=64, ranks=2, part="longest", trial=True, out_of_memory=True)]
    assert measure_long.findings(rows) == ["Longest S that trains on 2: 32; 64 does not fit."]
    assert measure_long.findings(rows[:2]) == ["Longest S that trains on 2: 32; nothing longer was tried."]


@pytest.mark.slow
@pytest.mark.parametrize("program, flags, code, words", [
    ("compare_llama.py", "--out OUT --hidden-size 32 --num-heads 2 --num-kv-heads 1 --num-layers 1 "
                         "--seq-len 16 --batch-size 1 --only nothing", 2, "--only nothing: no contender")])
def test_what_benchmarks_refuse(program, flags, code, words, tmp_path):
    if "OUT" in flags and not (ROOT / "companions").exists():
        pytest.skip("companions were deleted")
    done = run(program, *(str(tmp_path) if flag == "OUT" else flag for flag in flags.split()))
    assert done.returncode == code and words in done.stderr and done.stderr.count("\n") == 1
    assert not list(tmp_path.iterdir())


def waiting_workers(tmp_path, monkeypatch):
    """(a measurement whose workers sleep, those that it started)"""
    import measure_long
    begun, popen = [], subprocess.Popen
    monkeypatch.setattr(measure_long.subprocess, "Popen", lambda command, **how: begun.append(
        popen(["sleep", "60"], **how)) or begun[-1])
    asked = types.SimpleNamespace(lengths=[8, 16], ranks=[1, 2], steps=1, limit=0, quick=True, patience=60,
                                  out=tmp_path)
    return measure_long.Measurement(asked, dict(rows=[], seconds=[])), begun


@pytest.mark.parametrize("stopped", ["has_compiled", "text_of"])
def test_a_measurement_that_is_stopped_ends_its_workers(stopped, tmp_path, monkeypatch):
    """They held 60 GB of each GPU, and what came after was measured beside them."""
    import measure_long
    measurement, begun = waiting_workers(tmp_path, monkeypatch)

    def stop(_):
        raise SystemExit(143)
    monkeypatch.setattr(measure_long, "has_compiled", lambda started: True)
    monkeypatch.setattr(measure_long, stopped, stop)
    measurement.arguments.patience = 0.1
    with pytest.raises(SystemExit):
        measurement.in_turn(["compiled"])
    assert len(begun) == 4 and all(process.wait(10) == -signal.SIGTERM for process in begun)


def test_what_ran_out_of_memory_beside_others_is_measured_alone(tmp_path, monkeypatch):
    import measure_long
    measurement, _ = waiting_workers(tmp_path, monkeypatch)
    monkeypatch.setattr(measure_long, "has_compiled", lambda started: True)
    measurement.rows = lambda started: [dict(length=started.lengths[0], ranks=started.ranks,
                                             out_of_memory=started.ranks == 2)]
    measurement.launch = lambda part, ranks, lengths, steps: [dict(ranks=ranks, alone=part)]
    monkeypatch.setattr(measurement, "write", lambda: None)
    measurement.in_turn(["ultra"])
    assert [row.get("alone") for row in measurement.result["rows"]] == [None, None, "ultra", "ultra"]


def test_the_table_of_long_proteins_compares_with_one_gpu():
    import measure_long
    times = dict(median_ms=10.0, p20_ms=9.0, p80_ms=11.0, peak_mb=500.0, length=768, part="steps")
    rows = [dict(times, ranks=1), dict(times, ranks=2, median_ms=8.0, peak_mb=275.0,
                                       collectives_ms={"all-gather": 1.0, "all-to-all": 1.0})]
    _, one, two = measure_long.table(rows)
    assert one[4] == "" and two[4] == "1.25x" and two[6] == "0.55" and two[7] == "2.00 (25%)"
    assert measure_long.findings(rows) == ["Peak at S 768 on two GPUs (steps): 0.55 of one's; "
                                           "goal at 768: 0.6."]


@pytest.mark.slow
def test_long_proteins(tmp_path):
    done = run("measure_long.py", "--quick", "--lengths", 16, "--steps", 2,
               "--only", "accuracy|steps|ultra", "--out", tmp_path)
    assert done.returncode == 0, done.stderr + done.stdout
    rows = json.loads((tmp_path / "long.json").read_text())["rows"]
    assert [(row["part"], row["ranks"]) for row in rows] == [
        ("accuracy", 2), ("steps", 1), ("steps", 2), ("ultra", 1), ("ultra", 2)]
    assert rows[0]["accurate"]
    assert all(0 < row["peak_mb"] and 0 < row["median_ms"] for row in rows[1:])
    assert set(rows[2]["collectives_ms"]) >= {"all-gather", "all-to-all", "all-reduce"}
    done = run("measure_long.py", "--quick", "--lengths", 8, 64, "--steps", 2, "--only", "steps",
               "--ranks", 1, "--limit", 5e-3, "--out", tmp_path)
    short, long = json.loads((tmp_path / "long.json").read_text())["rows"]
    assert short["peak_mb"] < 5 and long["out_of_memory"] and long["reason"] == "out of memory"
