"""The programs in benchmarks/, at tiny sizes on a CPU: they run, judge accuracy and write their results."""
import json
import os
import subprocess
import sys

import pytest
from conftest import ROOT


def run(program, *flags, **environment):
    return subprocess.run([sys.executable, ROOT / "benchmarks" / program, *map(str, flags)], text=True,
                          env={**os.environ, **environment}, capture_output=True, check=False)


def test_attention(tmp_path):
    done = run("measure_attention.py", "--quick", "--precisions", "fp32", "--steps", 2, "--out", tmp_path)
    assert done.returncode == 0, done.stderr
    rows = json.loads((tmp_path / "attention.json").read_text())["rows"]
    assert len(rows) == 6 and all(row["accurate"] and row["median_ms"] > 0 for row in rows)


def test_ladder(tmp_path):
    done = run("measure_ladder.py", "--quick", "--only", "master", "--steps", 2, "--out", tmp_path)
    assert done.returncode == 0, done.stderr
    rows = json.loads((tmp_path / "ladder.json").read_text())["rows"]
    assert [row["name"].split(" | ")[1] for row in rows] == ["+ master weights"]
    for wrong in (tmp_path / "ladder.json", tmp_path / "absent.json"):  # a CPU's rows have no memory figure
        done = run("measure_ladder.py", "--plot", tmp_path / "x.png", wrong)
        assert done.returncode == 2 and done.stderr.count("\n") == 1 and not (tmp_path / "x.png").exists()
    assert rows[0]["accurate"] and rows[0]["median_ms"] > 0


def test_peers(tmp_path):
    done = run("compare_peers.py", "--quick", "--steps", 2, "--out", tmp_path,
               PYTHONPATH=str(ROOT / "tests" / "fake_peer"))
    assert done.returncode == 0, done.stderr
    rows = json.loads((tmp_path / "peers.json").read_text())["results"]["tiny"]
    assert set(rows) == {"plain", "ours", "cuEquivariance"}
    assert all(row["error"] < 3e-5 for row in rows.values()), rows


def test_peers_that_are_not_installed():
    if any(os.path.isdir(os.path.join(path, "cuequivariance_torch")) for path in sys.path):
        pytest.skip("cuEquivariance is installed")
    done = run("compare_peers.py")
    assert done.returncode == 3 and done.stderr.count("\n") == 1
    assert "pip install cuequivariance" in done.stderr


def test_loss_curves(tmp_path):
    tiny = "--num-blocks 1 --seq-len 16 --num-seqs 4 --batch-size 2 --msa-dim 16 --pair-dim 16 --device cpu"
    done = run("loss_curves.py", "--steps", 10, "--seeds", 1, "--out", tmp_path, "--", *tiny.split(),
               "--disable-torch-compile", "--eval-every", 10, "--warmup-steps", 1)
    assert done.returncode == 0, done.stderr
    runs = json.loads((tmp_path / "loss_curves.json").read_text())["runs"]
    assert len(runs) == 3 and all(len(r["losses"]) == 2 and "10" in r["p_l2"] for r in runs)
    done = run("loss_curves.py", "--out", tmp_path, "--", "--num-steps=3")  # it would read earlier results
    assert done.returncode == 2 and "--num-steps" in done.stderr and done.stderr.count("\n") == 1
