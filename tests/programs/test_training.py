"""The trainer as its users meet it: runs, modes, results, wrong input."""
import json
import sys

import numpy as np
import pytest
import torch

import tiny_openfold_v2 as tof
from tests.support import ROOT, last_json, require_shared, run_program
from tests.tiny import flags_of
from tests.training.test_resume import plain
from tiny_openfold.proteins.contacts import SEPARATION
from tiny_openfold.proteins.synthetic import PARTNER, synthetic_proteins

pytestmark = pytest.mark.usefixtures("quick_runs")
SMALL = flags_of(num_seqs=6, seq_len=16)


def train(tmp_path, *flags):
    """main() in this process: as fast as a call, same exit code; what an earlier call left is set aside."""
    return tof.main([*SMALL, "--profile-dir", str(tmp_path / "profiles"), "--force", *map(str, flags)])


def summary_of(capsys):
    return last_json(capsys.readouterr().out)["performance_summary"]


def test_training_run_as_a_subprocess(tmp_path):
    result = run_program("tiny_openfold_v2.py", *SMALL, "--num-steps", 12, "--log-every", 5, cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    assert "Traceback" not in result.stderr
    lines = result.stdout.splitlines()
    steps = [line for line in lines if line.startswith("Step ")]
    assert [line.split(" | ")[0] for line in steps] == ["Step   5/12", "Step  10/12", "Step  12/12"]
    summary = last_json(result)
    assert json.loads((tmp_path / "pytorch_profiles_v2/performance_summary_v2.json").read_text()) == summary
    assert len(summary["evaluation"]["final"]["held_out"]) == 16


def test_modes_that_check_pass_and_end_in_json(tmp_path, capsys):
    assert train(tmp_path, "--verify-accuracy", "--dropout", "0.2") == 0  # no three runs would draw alike
    out = capsys.readouterr().out
    assert last_json(out)["passed"] is True and "\nPASS\n" in out
    assert train(tmp_path, "--validate-setup") == 0
    lines = capsys.readouterr().out.strip().splitlines()
    assert json.loads(lines[-2])["passed"] is True and lines[-1].startswith("V2 validation successful!")


def test_validation_and_accuracy_fail_with_exit_code_1(tmp_path, monkeypatch, capsys):
    attend = tof.attend
    monkeypatch.setattr(tof, "attend", lambda *a: attend(*a) * (1 if a[-1] == "math" else float("nan")))
    assert train(tmp_path, "--verify-accuracy") == 1
    out = capsys.readouterr().out
    assert "\nFAIL\n" in out and last_json(out)["max_absolute"] is None
    assert train(tmp_path, "--validate-setup") == 1
    assert capsys.readouterr().out.strip().splitlines()[-1].startswith("V2 validation failed: ")


@pytest.mark.parametrize("amp", [[], ["--use-amp", "--amp-dtype", "float16"],
                                 ["--use-amp", "--enable-master-weights"]])
def test_resume_continues_bit_for_bit_also_with_dropout(tmp_path, capsys, amp):
    flags, part = [*amp, *"--dropout 0.2 --ema-decay 0.9 --save-every 3".split()], tmp_path / "part.pt"
    assert train(tmp_path, "--num-steps", 6, "--save-checkpoint", tmp_path / "whole.pt", *flags) == 0
    whole = summary_of(capsys)
    assert train(tmp_path, "--num-steps", 3, "--save-checkpoint", part, *flags) == 0
    assert train(tmp_path, "--num-steps", 6, "--resume", part, "--save-checkpoint", part, *flags) == 0
    assert summary_of(capsys)["final_loss"] == whole["final_loss"]
    assert plain(torch.load(tmp_path / "whole.pt")) == plain(torch.load(part))


def test_non_finite_loss_stops_with_exit_code_1(tmp_path, capsys):
    saved = tmp_path / "c.pt"
    assert train(tmp_path, "--num-steps", 50, "--learning-rate", 1e30, "--save-checkpoint", saved) == 1
    error = capsys.readouterr().err
    assert "loss is nan at step" in error or "loss is inf at step" in error
    assert not (tmp_path / "c.pt").exists()


@pytest.mark.slow
def test_missing_compiler_is_exit_code_3(tmp_path):
    env = dict(CXX="/no/such/compiler", TORCHINDUCTOR_CACHE_DIR=str(tmp_path / "cache"))
    result = run_program("tests/second_program.py", "--width", 4, "--device", "cpu", "--enable-torch-compile",
                         "--profile-dir", tmp_path / "p", env=env)  # whose layers are soon traced
    assert result.returncode == 3 and "needs a C++ compiler" in result.stderr
    assert "Traceback" not in result.stderr


@pytest.mark.parametrize("flag, value", [
    ("--device", "tpu"), ("--holdout", "A"), ("--data", ""), ("--data", "/no/such/dir"),
    ("--resume", "/no/such.pt"), ("--resume", str(ROOT / "README.md")),
    ("--compare-with-v1", "/no/such.json"), ("--compare-with-v1", str(ROOT / "README.md")),
    ("--save-checkpoint", "/proc/no/c.pt"), ("--profile-dir", "/proc/no"), ("--seq-len", 300000)])
def test_wrong_use_is_one_line_that_names_flag_or_file(flag, value, tmp_path, capsys):
    try:
        code = train(tmp_path, flag, value)
    except SystemExit as error:
        code = error.code
    error = capsys.readouterr().err
    assert code == 2 and error.count("\n") == 1 and (flag in error or value and str(value) in error)
    assert not any(path.is_file() for path in tmp_path.rglob("*"))  # nothing was begun


@pytest.mark.parametrize("package, flags", [("matplotlib", ["--plot-contacts", "maps"]),
                                            ("gemmi", ["--msa", "x.a3m", "--structure", "x.pdb"])])
def test_missing_optional_package_is_exit_code_3(package, flags, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "x.a3m").write_text(">q\nACDEF\n")
    (tmp_path / "x.pdb").write_text("END\n")
    for name in {package, *(name for name in sys.modules if name.startswith(f"{package}."))}:
        monkeypatch.setitem(sys.modules, name, None)
    assert train(tmp_path, *flags) == 3
    error = capsys.readouterr().err
    assert "pip install" in error and package in error and error.count("\n") == 1


def test_compare_with_an_earlier_summary(tmp_path, capsys):
    (tmp_path / "v1.json").write_text('{"performance_summary": {"avg_training_speed": 1e-3}}')
    assert train(tmp_path, "--num-steps", 2, "--compare-with-v1", tmp_path / "v1.json") == 0
    out = capsys.readouterr().out
    assert last_json(out)["compared_with_v1"]["speedup"] > 1 and "Training speed: 0.0 ->" in out


def test_synthetic_proteins_are_what_they_claim():
    msa, coords = synthetic_proteins(0, range(20), 16, 48)
    again, _ = synthetic_proteins(0, [7], 16, 48)
    assert np.array_equal(msa[7], again[0])  # each depends on its own number alone
    bonds = np.linalg.norm(np.diff(coords, axis=1), axis=-1)
    assert 3.0 < bonds.mean() < 4.5
    first, second = np.nonzero((PARTNER[msa[0]].T[:, None] == msa[0].T[None]).all(-1))
    assert len(first) > 5  # residues that hold partners in every row touch, and are far apart along the chain
    assert (np.linalg.norm(coords[0, first] - coords[0, second], axis=-1) < 8).all()
    assert (np.abs(first - second) >= SEPARATION).all()


@pytest.mark.slow
def test_learning_generalises_to_unseen_proteins(tmp_path, capsys):
    flags = ("--device cpu --num-blocks 1 --msa-dim 32 --pair-dim 32 --num-seqs 16 --seq-len 24 "
             "--batch-size 8 --num-steps 150 --learning-rate 3e-3 --warmup-steps 0 --eval-every 50")
    assert tof.main([*flags.split(), "--profile-dir", str(tmp_path / "p")]) == 0
    result = last_json(capsys.readouterr().out)
    assert result["performance_summary"]["final_loss"] < result["performance_summary"]["first_loss"] - 0.3
    held_out = {step: np.mean([p["p_l2"] for p in groups["held_out"].values()])
                for step, groups in result["evaluation"].items()}
    chance = np.mean([p["chance"] for p in result["evaluation"]["final"]["held_out"].values()])
    assert held_out["final"] > held_out["50"] and held_out["final"] > chance + 0.25


@pytest.mark.slow
def test_real_families_train_and_hold_out(families_dir, tmp_path, capsys):
    (tmp_path / "data").mkdir()
    for name in ("1CTF_A", "2PPN_A", "1UCS_A"):
        for path in families_dir.glob(f"{name}.*"):
            (tmp_path / "data" / path.name).symlink_to(path)
    flags = ["--data", tmp_path / "data", "--holdout", "2PPN_A,1CTF_A", "--num-steps", "2"]
    assert train(tmp_path, *flags, "--plot-contacts", tmp_path / "maps") == 0
    result = last_json(capsys.readouterr().out)
    final = result["evaluation"]["final"]
    assert set(final["held_out"]) == {"2PPN_A", "1CTF_A"} and set(final["training"]) == {"1UCS_A"}
    assert {p.name for p in (tmp_path / "maps").iterdir()} == {
        f"{name}.{suffix}" for name in ("2PPN_A", "1CTF_A") for suffix in ("png", "tsv")}
    assert train(tmp_path, *flags[:2], "--holdout", "NOPE") == 2
    assert "--holdout NOPE: no such family" in capsys.readouterr().err
    assert train(tmp_path, *flags[:2], "--holdout-fraction", "0.99") == 2


def test_one_real_protein_by_msa_and_structure(tmp_path, capsys):
    pairs = require_shared("data", "pairs")
    for msa, structure, code in (  # of the second the first row is not the query
            ("4CUP_A.a3m", "4CUP.cif:A", 0), ("PF00708.align.80.fasta", "3BR8_A.pdb", 2)):
        flags = ["--msa", pairs / msa, "--structure", pairs / structure]
        assert train(tmp_path, "--num-steps", 1, *flags) == code
    assert "--query" in capsys.readouterr().err
