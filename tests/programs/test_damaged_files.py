"""Files that were damaged, or are something else: what was saved, or one line that names the file."""
import functools
import json
import random
import tempfile

import pytest
import torch

import tiny_openfold_v2 as tof
from fusion_lab.measuring.metrics import read_metrics
from fusion_lab.training.checkpoints import load_run, snapshot
from fusion_lab.training.files import UserError

SETTINGS = tof.PROGRAM.settings(
    num_blocks=1, msa_dim=4, pair_dim=4, msa_heads=1, pair_heads=1, outer_product_dim=2, num_seqs=3,
    seq_len=6, batch_size=1, use_amp=True, amp_dtype="float16")


@functools.cache
def trained():
    """(Trainer, what a checkpoint of it holds, its bytes)"""
    trainer = tof.Trainer(tof.PROGRAM, SETTINGS, torch.device("cpu"))
    trainer.step(tof.PROGRAM.data(SETTINGS).batch(0))
    trainer.step_number, trainer.trained_on = 1, {"a"}
    with tempfile.TemporaryFile() as file:
        torch.save(snapshot(trainer), file)
        file.seek(0)
        whole = file.read()
        file.seek(0)
        return trainer, torch.load(file), whole


def same(a, b):
    if isinstance(a, dict):
        return isinstance(b, dict) and a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    return torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b


def restored(path):
    trainer, saved, _ = trained()
    load_run(trainer, path, tof.PROGRAM.data(SETTINGS))
    return same(snapshot(trainer), saved)


@pytest.mark.parametrize("how", ["flipped", "cut short"])
def test_a_damaged_file_is_refused_or_was_not_harmed(how, tmp_path):
    path, refused = tmp_path / "c.pt", 0
    for number in range(40):
        rng, content = random.Random(number), bytearray(trained()[2])
        at = rng.randrange(len(content))
        if how == "flipped":
            content[at] ^= 1 << rng.randrange(8)
        path.write_bytes(content[:at] if how == "cut short" else content)
        try:
            assert restored(path), number
        except UserError as error:
            assert str(path) in str(error) and "\n" not in str(error)
            refused += 1
    assert refused > 20


def test_a_tensor_that_the_archive_calls_a_directory_is_refused(tmp_path):
    """torch.load() would take memory that nobody wrote."""
    path, content = tmp_path / "c.pt", bytearray(trained()[2])
    header = content.rindex(b"PK\1\2", 0, content.rindex(b"/data/0"))  # in the archive's directory
    content[header + 38] ^= 0x10  # the directory bit among the external attributes of a tensor
    path.write_bytes(content)
    with pytest.raises(UserError, match="damaged"):
        restored(path)


@pytest.mark.parametrize("change", [
    lambda saved: saved.update(format="second_program checkpoint 1"), lambda saved: saved["model"].popitem(),
    lambda saved: saved.pop("rng"), lambda saved: saved["config"].update(msa_dim=8),
    lambda saved: saved["model"].update({"masked_msa_head.bias": torch.zeros(1)}),
    lambda saved: saved["model"].update({"masked_msa_head.bias": torch.full((23,), float("nan"))}),
    lambda saved: saved.update(step="x"), lambda saved: saved.update(moments=None),
    lambda saved: saved["scaler"].update(scale="x")])
def test_a_checkpoint_with_other_content_is_refused_by_name(change, tmp_path):
    torch.save(saved := trained()[1], tmp_path / "whole.pt")
    saved = torch.load(tmp_path / "whole.pt")
    change(saved)
    torch.save(saved, tmp_path / "c.pt")
    with pytest.raises(UserError, match="c.pt") as caught:
        restored(tmp_path / "c.pt")
    assert "\n" not in str(caught.value)


def test_a_torn_last_line_of_metrics_is_left_out_and_other_lines_are_not(tmp_path):
    path, line = tmp_path / "metrics.jsonl", dict(step=1, loss=1.0, learning_rate=0.1, gradient_norm=1.0)
    path.write_text(json.dumps(line) + "\n" + json.dumps(line)[:9])
    assert read_metrics(path) == ([line], [])
    path.write_text("x\n" + json.dumps(line) + "\n")
    with pytest.raises(UserError, match="line 1"):
        read_metrics(path)
