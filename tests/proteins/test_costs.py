"""What a training step needs at least, beside what steps take."""
import os

import pytest
import torch

import tiny_openfold_v2 as tof
from fusion_lab.measuring.probe import probe
from fusion_lab.training import machine


@pytest.mark.parametrize("sizes", [
    dict(num_blocks=1), dict(num_blocks=2, num_seqs=64),
    dict(num_blocks=3, enable_activation_checkpointing=True),
    dict(num_blocks=3, enable_selective_checkpointing=True)], ids=str)
def test_a_step_takes_more_than_its_least_memory_and_fits_where_one_says_so(sizes):
    settings = tof.PROGRAM.settings(device="cpu", seq_len=32, batch_size=1, **sizes)
    trainer = tof.Trainer(tof.PROGRAM, settings, torch.device("cpu"))
    peak = probe(trainer, tof.PROGRAM.data(settings).batch(0)).peak
    least = tof.TinyOpenFoldV2.least_bytes(settings)
    assert least < peak < machine.ROOM * least


@pytest.mark.parametrize("size, mode", [
    ("--seq-len", []), ("--pair-dim", []), ("--num-blocks", ["--compare-fusion"]),
    ("--batch-size", ["--verify-accuracy"])])
def test_what_cannot_fit_is_refused_before_anything_is_made_or_moved(size, mode, capsys, tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "earlier").touch()
    where = ["--device", "cpu", "--profile-dir", str(tmp_path / "out"), "--force"]
    assert tof.main([size, "100000000", *mode, *where]) == 2
    assert os.listdir(tmp_path) == ["out"] and os.listdir(tmp_path / "out") == ["earlier"]
    line = capsys.readouterr().err
    assert line.count("\n") == 1 and line.count(size) == 2
    fitting = line.rpartition(f"{size} ")[2].split()[0]
    settings = tof.PROGRAM.settings(**{size[2:].replace("-", "_"): int(fitting)})
    machine.require_memory(tof.PROGRAM, torch.device("cpu"), settings)
