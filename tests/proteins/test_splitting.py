"""Samples split over ranks (--sequence-parallel): equal to one process, on two and four of them."""
import json
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

import tiny_openfold_v2 as tof
from fusion_lab.kernels.library import exchanges
from proteins import splitting
from proteins.files import GAP
from proteins.orientations import UNKNOWN
from tests.proteins.split_samples import CASES, MUTANTS, a_batch, a_model, deviation, results
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


class Threads:
    """Ranks as threads of this process: what exchanges asks of torch.distributed."""

    def __init__(self, size):
        self.size, self.here, self.given = size, threading.local(), [None] * size
        self.barrier = threading.Barrier(size, timeout=PATIENCE)

    def of_all(self, x):
        self.given[self.here.rank] = x
        self.barrier.wait()
        found = [*self.given]
        self.barrier.wait()
        return found

    def all_gather_into_tensor(self, x, size, name):
        return torch.cat(self.of_all(x))

    def reduce_scatter_tensor(self, x, kind, size, name):
        return sum(self.of_all(x)).chunk(size)[self.here.rank]

    def all_to_all_single(self, x, there, here, name):
        return torch.stack([other[self.here.rank] for other in self.of_all(x)])

    def all_reduce(self, x, kind, name):
        return sum(self.of_all(x))

    def wait_tensor(self, x):
        return x

    def run(self, work):
        """[work(group) of every rank]"""
        def at(rank):
            self.here.rank = rank
            try:
                return work(SimpleNamespace(group_name="", size=lambda: self.size, rank=lambda: rank))
            except BaseException:
                self.barrier.abort()  # or the others wait
                raise
        with ThreadPoolExecutor(self.size) as pool:
            return [*pool.map(at, range(self.size))]


@pytest.mark.parametrize("name", ["uneven, masks", "orientations, uneven", "predictions, orientations"])
def test_two_ranks_share_a_sample(name, monkeypatch):
    case, threads = CASES[name], Threads(2)
    monkeypatch.setattr(exchanges, "ops", threads)
    settings = replace(tof.PROGRAM.settings(**case["sizes"] | dict(num_blocks=1)), fusion=case["fusion"])
    batch = a_batch(settings, case["masks"], case["targets"])
    exact = results(a_model(settings, settings.fusion), batch)
    models = [a_model(settings, settings.fusion) for _ in range(2)]

    def work(group):
        model = models[group.rank()]
        return results(model, batch, ranks=splitting.split_over(model, group))
    for found in threads.run(work):
        assert deviation(exact, found)["error"] < 1e-10
    assert len(exact) > (1 if "predictions" in name else 40)


def test_what_pads_a_sample_is_missing_residues():
    shapes = dict(msa_tokens=(2, 3, 5), target_tokens=(2, 5), extra_msa=(2, 4, 5), msa_targets=(2, 3, 5),
                  coord_mask=(2, 5), coords=(2, 5, 3), orientations=(2, 5, 5, 3), row_mask=(2, 3))
    pads = dict(msa_tokens=GAP, target_tokens=GAP, extra_msa=GAP, msa_targets=-100, coord_mask=0, coords=0,
                orientations=UNKNOWN, seq_mask=0)
    batch = {name: torch.ones(shape) for name, shape in shapes.items()}
    found = splitting.padded(batch | dict(features=None), 2)
    assert found.keys() == {*pads, "row_mask"} and found.pop("row_mask") is batch["row_mask"]
    for name, x in found.items():
        longer = [7 if size == 5 else size for size in shapes.get(name, (2, 5))]
        expected = torch.full(longer, float(pads[name]))
        expected[tuple(slice(5) for _ in longer)] = 1
        assert torch.equal(x, expected), name
    masked = splitting.padded(batch | dict(seq_mask=torch.zeros(2, 5)), 1)["seq_mask"]
    assert masked.shape == (2, 6) and not masked.any() and splitting.padded(batch, 0) is batch


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
