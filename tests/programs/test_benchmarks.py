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
from fusion_lab.training import files
from fusion_lab.training.flags import make_parser, parse
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
    assert found["link"]["latency_s"] > 0 and found["predicted_share"]["A"].keys() == {"2", "8", "64"}
    assert "Predicted, not measured" in done.stdout


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
def test_roofline_and_its_tables(tmp_path):
    import measure_fusion
    done = run("measure_fusion.py", "--quick", "--part", "roofline", "--shapes", "1,8,4", "--precisions",
               "fp32", "--steps", 2, "--out", tmp_path)
    assert done.returncode == 0, done.stderr
    result = json.loads((tmp_path / "fusion.json").read_text())
    assert result["compare"] == {} and list(result["roofline"]) == ["B1 S8 N4 fp32"]
    part = result["roofline"]["B1 S8 N4 fp32"]
    lines = measure_fusion.tables(result)
    assert [line.startswith("| ") for line in lines].count(True) == 2 + 9 + len(part["checks"])
    assert f"The step is {part['launch']['text']}." in lines


@pytest.mark.slow
def test_peers(tmp_path):
    done = run("compare_peers.py", "--quick", "--steps", 2, "--out", tmp_path,
               PYTHONPATH=str(ROOT / "tests/programs/fake_peer"))
    assert done.returncode == 0, done.stderr
    rows = json.loads((tmp_path / "peers.json").read_text())["results"]["tiny"]
    assert set(rows) == {"plain", "all fusion", "cuEquivariance"}
    assert all(row["error"] < 3e-5 for row in rows.values()), rows


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


@pytest.mark.slow
def test_loss_curves(tmp_path, monkeypatch, capsys):
    import loss_curves
    for flags in loss_curves.SETTINGS.values():
        parse(make_parser(loss_curves.PROGRAM), loss_curves.PROGRAM, flags.split())
    monkeypatch.setattr(loss_curves, "SETTINGS", {
        name: loss_curves.SETTINGS[name] for name in ("baseline fp32", "ultra bf16")})
    tiny = "--num-blocks 1 --seq-len 16 --num-seqs 4 --batch-size 2 --msa-dim 16 --pair-dim 16 --device cpu"
    assert loss_curves.main(["--steps", "10", "--seeds", "1", "--out", str(tmp_path), "--", *tiny.split(),
                             "--disable-torch-compile", "--eval-every", "10", "--warmup-steps", "1"]) == 0
    runs = json.loads((tmp_path / "loss_curves.json").read_text())["runs"]
    assert len(runs) == 2 and all(len(r["losses"]) == 2 and "10" in r["p_l2"] for r in runs)
    with pytest.raises(SystemExit, match="2"):  # it would read earlier results
        loss_curves.main(["--out", str(tmp_path), "--", "--num-steps=3"])
    assert "--num-steps" in capsys.readouterr().err


def test_real_families_never_trains_on_a_relative_of_what_it_looks_at(tmp_path, monkeypatch):
    import real_families
    families = [types.SimpleNamespace(name=name) for name in "abcdef"]
    related = [["b", "e"], ["a"], ["c"], ["d"], ["f"]]
    monkeypatch.setattr(real_families.homology, "clusters", lambda found: related)
    folds = real_families.folds_of(families, 3)
    assert sorted(sum(folds, [])) == [*"abcdef"] and ["b", "e"] in folds
    assert [len(fold) for fold in folds] == [2, 2, 2]
    started = {}

    def train(directory, options, common, environment):
        started[directory.name] = options | dict(gpu=environment.get("CUDA_VISIBLE_DEVICES"), common=common)
        return dict(seconds=1.0)

    monkeypatch.setattr(real_families, "train", train)
    arguments = real_families.parse([
        "--data", "x", "--out", str(tmp_path), "--recipes", "full", "half mixed", "scratch", "--seeds", "1",
        "2", "--gpus", "2", "--most-steps", "5", "--", "--msa-dim", "16"])
    pretrained, tuned = real_families.Runs(arguments, folds).run()
    assert set(pretrained) == {("full", 1), ("full", 2)} and len(tuned) == 3 * 2 * 3  # one start serves both
    assert set(started) == {"full-1", "full-2"} | {
        f"{recipe}-{seed}-fold-{fold}" for recipe in ("full", "half-mixed", "scratch") for seed in (1, 2)
        for fold in range(3)}
    for fold in range(3):
        options = started[f"half-mixed-2-fold-{fold}"]
        assert options["holdout"] == ",".join(folds[fold]) and options["mix_synthetic"] == 0.5
        assert options["init_from"] == tmp_path / "runs" / "full-2" / "c.pt" and options["num_steps"] == 5
        assert options["validate_fraction"] == 0.1 and options["common"] == ["--msa-dim", "16"]
        assert options["lr_warmup_steps"] == 4  # the trainer refuses five
    assert "init_from" not in started["scratch-1-fold-0"]
    assert {options["gpu"] for options in started.values()} == {"0", "1"}


def test_real_families_trains_for_folds(tmp_path, monkeypatch, capsys):
    """Real chains in pre-training, longer crops in training, weights kept for folding what was held out."""
    import real_families
    started, argv = {}, ["--data", "x", "--out", str(tmp_path), "--seeds", "1", "--recipes", "folds"]
    monkeypatch.setattr(real_families, "train", lambda directory, options, *_: started.update(
        {directory.name: options}) or dict(seconds=1.0))
    arguments = real_families.parse([*argv, "--real-folds", "chains.npz"])
    real_families.Runs(arguments, [["a"], ["b"]]).run()
    assert set(started) == {"folds-1", "folds-1-fold-0", "folds-1-fold-1"}
    real, tuned = started["folds-1"], started["folds-1-fold-1"]
    assert str(real["real_folds"]) == "chains.npz" and real["num_blocks"] == tuned["num_blocks"] == 8
    assert (real["num_steps"], real["seq_len"]) == (5000, 96)
    assert (tuned["num_steps"], tuned["seq_len"], tuned["holdout"]) == (600, 128, "b")
    assert tuned["save_best"] == tmp_path / "runs" / "folds-1-fold-1" / "best.pt"
    assert tuned["orientations"] is real["orientations"] is True
    with pytest.raises(SystemExit):
        real_families.parse(argv)
    assert "folds needs --real-folds FILE" in capsys.readouterr().err


def test_real_families_passes_switches_without_a_value(tmp_path, monkeypatch):
    import real_families
    commands = []

    def run(command, stdout, **_):
        commands.append(command)
        (tmp_path / "r" / real_families.PROGRAM.result("performance_summary")).write_text("{}")
        return types.SimpleNamespace(returncode=0)
    monkeypatch.setattr(real_families.subprocess, "run", run)
    real_families.train(tmp_path / "r", dict(orientations=True, seq_len=8), ["--x"], {})
    assert commands[0][4:] == ["--orientations", "--seq-len", "8", "--x"]


def test_real_families_looks_at_the_step_that_validation_chose():
    import real_families

    def at(validation, held_out):
        return dict(validation={"v": dict(p_l2=validation)},
                    held_out={"h": dict(p_l2=held_out, p_l2_long=None)})
    summary = dict(contact_precision={"10": at(0.3, 0.9), "20": at(0.5, 0.2), "final": at(0.4, 0.8)},
                   performance_summary=dict(median_batch_time=0.5))
    assert real_families.chosen_step(summary) == ("20", {"h": dict(p_l2=0.2, p_l2_long=None)})
    assert real_families.curve(summary) == [(5.0, 0.9), (10.0, 0.2)]
    values = dict(a=0.1, b=0.4, c=0.6)
    scores = {"m": {name: dict(p_l2=value, p_l2_long=value / 2) for name, value in values.items()}}
    found = real_families.table(scores, dict(a="x", b="x", c="x"))["m"]["x"]
    assert (found["median"], found["median_long"], found["families"]) == (0.4, 0.2, 3)
    assert found["interval"] == [0.1, 0.6] and found["mean"] == pytest.approx(1.1 / 3)


@pytest.mark.slow
@pytest.mark.parametrize("program, flags, code, words", [
    ("compare_llama.py", "--out OUT --hidden-size 32 --num-heads 2 --num-kv-heads 1 --num-layers 1 "
                         "--seq-len 16 --batch-size 1 --only nothing", 2, "--only nothing: no contender"),
    ("compare_peers.py", "", 3, "pip install cuequivariance")])
def test_what_benchmarks_refuse(program, flags, code, words, tmp_path):
    if "OUT" in flags and not (ROOT / "companions").exists():
        pytest.skip("companions were deleted")
    if "peers" in program and any(os.path.isdir(f"{path}/cuequivariance_torch") for path in sys.path):
        pytest.skip("cuEquivariance is installed")
    done = run(program, *(str(tmp_path) if flag == "OUT" else flag for flag in flags.split()))
    assert done.returncode == code and words in done.stderr and done.stderr.count("\n") == 1
    assert not list(tmp_path.iterdir())


def test_everything_goes_on_where_one_program_fails(tmp_path, monkeypatch, capsys):
    import measure_everything
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(files.UserError, match="needs a GPU"):
        measure_everything.run(["--out", str(tmp_path)])
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(measure_everything, "PROGRAMS", dict(
        late=(1, "-c __import__('time').sleep(60)"), wrong=(60, "-c raise(SystemExit(3))"),
        right=(60, "-c print('{out}')"), peers=(60, "-c print('{peer}')")))
    flags = ["--out", str(tmp_path / "new" / "out"), "--skip", "late"]
    assert measure_everything.run(flags) == 1
    assert re.findall(r"^(\w+): (\S+),", capsys.readouterr().out, re.M) == [("wrong", "3"), ("right", "0")]
    assert (tmp_path / "new/out/right.txt").read_text() == f"{tmp_path}/new/out/right\n"
    assert measure_everything.run([*flags, "--only", "right|peers", "--peer", "a/b.py"]) == 0
    assert (tmp_path / "new/out/peers.txt").read_text() == f"{ROOT}/a/b.py\n"
    assert measure_everything.run(["--out", str(tmp_path), "--only", "late"]) == 1
    assert re.search(r"^late +over 1 s +\d+$", capsys.readouterr().out, re.M)
    with pytest.raises(SystemExit, match="2"):
        measure_everything.run(["--out", str(tmp_path), "--only", "nothing"])
