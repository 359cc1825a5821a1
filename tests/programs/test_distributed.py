"""Several processes train one model: what they reckon, how they end."""
import os
import signal
import socket
import subprocess
import sys
import time
from collections import Counter

import pytest
import torch

from fusion_lab.measuring.metrics import read_metrics
from fusion_lab.training.program import load_program
from tests.support import PATIENCE, ROOT
from tiny_openfold_v2 import main

FLAGS = ("--num-blocks 1 --seq-len 16 --num-seqs 6 --msa-dim 16 --pair-dim 16 --msa-heads 2 --pair-heads 2 "
         "--outer-product-dim 4 --warmup-steps 1 --num-steps 6 --log-every 3 --eval-every 2").split()
# The trainer, of which rank 1 sends itself a signal in step 3
SIGNALLED = f"""
import os, pathlib, sys
sys.path.insert(0, {str(ROOT)!r})
import tiny_openfold_v2 as tof
step = tof.Trainer.step
def signalled(self, *given):
    if self.world.rank == 1 and self.step_number == 2:
        pathlib.Path("signalled").touch()
        os.kill(os.getpid(), int(os.environ["TEST_SIGNAL"]))
    return step(self, *given)
tof.Trainer.step = signalled
sys.exit(tof.main())
"""


def run_two_ranks(directory, number, *flags):
    (directory / "signalled.py").write_text(SIGNALLED)
    command = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "signalled.py", *FLAGS,
               "--batch-size", "2", "--profile-dir", "two", "--save-checkpoint", "two.pt", *flags]
    return subprocess.run([sys.executable, *command], cwd=directory, timeout=PATIENCE, check=False, text=True,
                          env={**os.environ, "TEST_SIGNAL": str(int(number))}, capture_output=True)


GRAPHS = "--device cuda --enable-cuda-graphs"
FAST = "--device cuda --enable-all-fusion --use-amp --amp-dtype bfloat16"


@pytest.mark.slow
@pytest.mark.parametrize("flags, near", [
    ("--device cpu", 1e-5), pytest.param(GRAPHS, 1e-4, marks=pytest.mark.gpu),
    pytest.param(FAST, 2e-2, marks=pytest.mark.gpu)])
def test_two_ranks_are_one_run_of_the_double_batch(flags, near, tmp_path, monkeypatch):
    """Which a signal to one of them ends after the same step; then one process takes the other half."""
    if "cuda" in flags and torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    monkeypatch.chdir(tmp_path)
    done = run_two_ranks(tmp_path, signal.SIGTERM, *flags.split())
    said = done.stdout + done.stderr
    assert "Ranks: 2" in done.stdout and "Interrupted at step 3 of 6" in done.stdout, said
    assert done.stderr.count("exitcode  : 143") == 2 and "tiny_openfold_v2.py: error" not in done.stderr
    assert torch.load("two.pt")["step"] == 3
    flags = [*FLAGS, *flags.split(), "--batch-size", "4"]
    assert main([*flags, "--profile-dir", "two", "--save-checkpoint", "two.pt", "--resume", "two.pt"]) == 0
    assert main([*flags, "--profile-dir", "one", "--save-checkpoint", "one.pt"]) == 0
    (of_two, evaluations), (of_one, _) = (read_metrics(f"{name}/metrics.jsonl") for name in ("two", "one"))
    assert [step["step"] for step in evaluations] == [2, 4, 6]
    assert [step["loss"] for step in of_two] == pytest.approx([step["loss"] for step in of_one], rel=near)
    two, one = torch.load("two.pt"), torch.load("one.pt")
    assert two["step"] == two["updates"] == 6
    for found, expected in ((two["model"], one["model"]), *(
            (two["moments"][kind], one["moments"][kind]) for kind in ("exp_avg", "exp_avg_sq"))):
        for name, tensor in expected.items():
            torch.testing.assert_close(found[name], tensor, rtol=100 * near, atol=near, msg=name)


@pytest.mark.slow
def test_two_nodes_of_one_rank_are_one_node_of_two(tmp_path):
    """Two torchruns that meet at an address, here on one host, as a script of several hosts starts them."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        meeting = f"localhost:{free.getsockname()[1]}"

    def start(directory, *torchrun):
        (tmp_path / directory).mkdir()
        return subprocess.Popen(
            [sys.executable, "-m", "torch.distributed.run", *torchrun, ROOT / "tiny_openfold_v2.py", *FLAGS,
             "--device", "cpu", "--batch-size", "2"],
            cwd=tmp_path / directory, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    meet = ["--rdzv-backend", "c10d", "--rdzv-endpoint", meeting, "--rdzv-id", "test"]
    nodes = [start(name, "--nnodes", "2", "--nproc-per-node", "1", *meet) for name in ("first", "second")]
    one = start("one", "--standalone", "--nproc-per-node", "2")
    said = [run.communicate(timeout=PATIENCE)[0] for run in (*nodes, one)]
    assert [run.returncode for run in (*nodes, one)] == [0, 0, 0], said
    files = [*tmp_path.glob("*/pytorch_profiles_v2/metrics.jsonl")]
    assert len(files) == 2 and sum("Ranks: 2" in text for text in said) == 2  # the first rank alone writes
    of_two, of_one = ([step["loss"] for step in read_metrics(file)[0]] for file in files)
    assert len(of_two) == 6 and of_two == pytest.approx(of_one, rel=1e-5)


@pytest.mark.slow
def test_one_of_two_ranks_is_profiled(tmp_path):
    done = run_two_ranks(tmp_path, 0, "--device", "cpu", "--enable-pytorch-profiler")  # 0 is no signal
    assert done.returncode == 0 and len(list((tmp_path / "two").glob("*.pt.trace.json"))) == 1, done.stderr


@pytest.mark.slow
def test_a_rank_that_dies_ends_all_within_a_minute(tmp_path):
    done = run_two_ranks(tmp_path, signal.SIGKILL, "--device", "cpu", "--save-every", "1")
    assert time.time() - (tmp_path / "signalled").stat().st_mtime < 60
    assert done.returncode == 1 and "Signal 9" in done.stderr and "Written" not in done.stdout
    assert torch.load(tmp_path / "two.pt")["step"] == 2


@pytest.mark.parametrize("file", ["tiny_openfold_v2.py", "tests/second_program.py",
                                  "companions/protein_mpnn.py", "companions/tiny_llama.py"])
def test_the_samples_of_all_ranks_are_those_of_one_process(file):
    program = load_program(ROOT / file)
    source = program.data(program.settings(batch_size=6, device="cpu"))
    for size in (2, 3):
        whole, parts = source.batch(2), [source.part(2, rank, size) for rank in range(size)]
        assert all(torch.equal(whole[key], torch.cat([part[key] for part in parts])) for key in whole)


@pytest.mark.parametrize("file", ["tiny_openfold_v2.py", "companions/protein_mpnn.py"])
def test_a_loss_is_that_of_its_parts_by_their_counts(file):
    program = load_program(ROOT / file)
    settings = program.settings(batch_size=3, device="cpu")
    torch.manual_seed(0)
    model = program.model(settings.model, settings.fusion).eval().requires_grad_(False)
    for weight in model.parameters():
        weight += 0.1 * torch.randn_like(weight)  # heads begin at zero, where all losses are alike
    batch = program.data(settings).batch(0)
    next(batch[key] for key in ("coord_mask", "mask") if key in batch)[0, ::2] = 0
    parts = [{key: value[rank:rank + 1] for key, value in batch.items()} for rank in range(3)]
    whole, parts = model(**batch)["loss"].item(), [model(**part) for part in parts]
    counts = Counter()
    for part in parts:
        counts.update({name: loss.count.item() for name, loss in part["losses"].items()})
    found = sum((loss.weighted() * loss.count / counts[name]).item()
                for part in parts for name, loss in part["losses"].items())
    assert found == pytest.approx(whole, rel=1e-6)
    assert sum(part["loss"].item() for part in parts) / 3 != pytest.approx(whole, rel=1e-4)


def test_ranks_of_the_natural_world_repeat_no_sample():
    program, values = load_program(), dict(synthetic_world="natural", device="cpu", num_seqs=6, seq_len=16)
    natural = program.data(program.settings(batch_size=4, **values))
    found = [natural.part(step, rank, 2)["coords"] for step in range(2) for rank in range(2)]
    assert len({x.numpy().tobytes() for part in found for x in part}) == 8
    one = program.data(program.settings(batch_size=2, **values))
    assert all(torch.equal(one.batch(i)["coords"], x) for i, x in enumerate(found))
