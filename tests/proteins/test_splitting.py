"""Samples split over ranks (--sequence-parallel): equal to one process, on two and four of them."""
import json
import subprocess
import sys

import pytest
import torch

from tests.proteins.split_samples import CASES, MUTANTS
from tests.support import PATIENCE, ROOT, last_json, run_program

ON = {"uneven, masks": "24", "predictions": "24", "uneven, no masks, more ranks than rows": "4",
      "baseline": "4"}  # ranks; two otherwise
LONG = ("compiled", "kernels")
PRECISION = {"couplings, uneven": 1e-5}  # float64 otherwise
BROKEN = 1e-3


def errors(names, **environment):
    """Of cases and mutants, all in one go, for the sake of the imports."""
    done = run_program("tests/proteins/split_samples.py", *names, env=environment)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.slow
def test_losses_and_all_gradients_are_those_of_one_process():
    cases = (f"{name} / {ON.get(name, '2')}" for name in CASES if name not in LONG)
    found = errors(["trained", "peaks / 24", *cases])
    assert found.pop("trained")["error"] < 1e-10  # two pairs of ranks, data parallel, three steps
    for ranks, peak in found.pop("peaks").items():
        assert 0.9 / int(ranks) < peak["split"] / peak["alone"] < 1.15 / int(ranks)
    rounded = found.pop("bfloat16")["2"]  # by the rule of 3 of all mixed precision
    assert 0.001 < rounded["error"] <= 3 * rounded["alone"], rounded
    for name, by_ranks in found.items():
        assert set(by_ranks) == set(ON.get(name, "2"))
        for ranks, worst in by_ranks.items():
            assert worst["error"] < PRECISION.get(name, 1e-10), (name, ranks, worst)


@pytest.mark.slow
def test_a_broken_exchange_is_caught():
    found = errors(MUTANTS)
    assert set(found) == set(MUTANTS)
    assert {name: worst for name, worst in found.items() if worst["error"] < BROKEN} == {}


@pytest.mark.slow
def test_compiled_in_one_piece():
    worst = errors(["compiled"])["compiled"]["2"]
    assert worst["error"] < 1e-10, worst


@pytest.mark.slow
def test_triton_kernels_of_local_rows():
    worst = errors(["kernels"], TRITON_INTERPRET="1")["kernels"]["2"]
    assert 0 < worst["error"] <= 3 * worst["alone"] < 1e-4, worst


@pytest.mark.gpu
def test_two_gpus_are_as_accurate_as_one(tmp_path):
    """All kernels that take a rank's rows, by the rule of three, over NCCL or RCCL."""
    if torch.cuda.device_count() < 2:
        pytest.skip("one GPU")
    done = run_program("benchmarks/measure_long.py", "--only", "accuracy", "--out", tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr


def run_by_torchrun(processes, *flags):
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", processes,
               ROOT / "tiny_openfold_v2.py", *flags]
    return subprocess.run(list(map(str, command)), capture_output=True, text=True, check=False,
                          timeout=PATIENCE)


SMALL = ("--msa-dim 16 --pair-dim 16 --msa-heads 2 --pair-heads 2 --outer-product-dim 4 --num-blocks 1 "
         "--seq-len 31 --num-seqs 5 --device cpu --warmup-steps 1 --log-every 1").split()


def losses(directory):
    lines = map(json.loads, (directory / "metrics.jsonl").read_text().splitlines())
    return [line["loss"] for line in lines if "loss" in line]


@pytest.mark.slow
def test_a_run_by_torchrun_learns_and_ends_as_one_process_does(tmp_path):
    def flags(name, batch, steps=3):
        saved = tmp_path / f"{name}.pt"
        return [*SMALL, "--batch-size", batch, "--num-steps", steps, "--profile-dir", tmp_path / name,
                "--save-checkpoint", saved], saved
    alone, _ = flags("alone", 2, 5)
    split, saved = flags("split", 1)
    expected = last_json(run_program("tiny_openfold_v2.py", *alone))
    done = run_by_torchrun(4, *split, "--sequence-parallel", 2)
    assert done.returncode == 0, done.stderr
    assert "2 with samples of their own, 2 for each sample" in done.stdout
    found = last_json(done)
    assert losses(tmp_path / "split") == pytest.approx(losses(tmp_path / "alone")[:3], abs=1e-5)
    ratio = found["performance_summary"]["peak_memory_mb"] / expected["performance_summary"]["peak_memory_mb"]
    assert ratio < 0.5  # of two samples on one process; each rank has half of one
    resumed, _ = flags("resumed", 2, 5)
    done = run_by_torchrun(2, *resumed, "--sequence-parallel", 2, "--resume", saved)
    assert done.returncode == 0, done.stderr
    found = last_json(done)
    assert losses(tmp_path / "resumed") == pytest.approx(losses(tmp_path / "alone")[3:], abs=1e-5)
    assert found["contact_precision"]["final"]["held_out"].keys() == (
        expected["contact_precision"]["final"]["held_out"].keys())


@pytest.mark.slow
def test_other_programs_are_refused():
    flags = ["--program", ROOT / "tests" / "second_program.py", "--device", "cpu"]
    done = run_by_torchrun(2, *flags, "--sequence-parallel", 2)
    assert done.returncode == 1 and "cannot split its samples" in done.stderr
