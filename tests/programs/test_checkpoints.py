"""Checkpoints field by field: what is saved, refused and brought back; files that are whole or not there."""
import copy
import os
import stat

import pytest
import torch

import tiny_openfold_v2 as tof
from fusion_lab.training import files
from fusion_lab.training.checkpoints import load_run, read_checkpoint, restore, snapshot
from fusion_lab.training.files import FAILED, USAGE, UserError
from fusion_lab.training.saved import write_saved
from proteins.batches import SyntheticProteins

SMALL = dict(num_blocks=1, msa_dim=8, pair_dim=8, msa_heads=2, pair_heads=2, outer_product_dim=4, num_seqs=4,
             seq_len=8, batch_size=2)
HALF = dict(use_amp=True, amp_dtype="float16")
MASTERS = dict(HALF, enable_master_weights=True)


def trainer_of(**values):
    return tof.Trainer(tof.PROGRAM, tof.PROGRAM.settings(**{**SMALL, **values}), torch.device("cpu"))


def trained(steps=3, overflows=0, **values):
    """A trainer after some steps. The last ones overflow in float16, so that its scaler skips them."""
    trainer = trainer_of(dropout=0.2, **values)
    batch = SyntheticProteins(trainer.settings).batch(0)
    for step in range(steps):
        if step == steps - overflows:
            trainer.model.distogram_head.weight.register_hook(lambda gradient: gradient * float("inf"))
        trainer.step(batch)
        trainer.step_number += 1
    trainer.trained_on |= {"b", "a"}
    return trainer


def saved_to(path, trainer):
    write_saved(path, snapshot(trainer))
    return path


def same(a, b):
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    return torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b


def test_a_snapshot_holds_the_run():
    trainer = trained(4, overflows=2, **HALF)
    saved = snapshot(trainer)
    assert saved["format"] == "tiny_openfold_v2 checkpoint 1"
    assert (saved["step"], saved["updates"]) == (4, 2) and saved["trained_on"] == ["a", "b"]
    assert saved["config"]["msa_dim"] == 8 and saved["training"]["seed"] == 42
    assert saved["scaler"]["scale"] == trainer.scaler.get_scale() == 2 ** 16 / 4
    assert torch.equal(saved["rng"]["cpu"], torch.get_rng_state()) and "cuda" not in saved["rng"]
    assert same(saved["model"], trainer.model.state_dict())
    names = {*saved["config"], *saved["training"]}
    assert not any(name.startswith("enable_") for name in names)  # any switches can continue it
    state = trainer.optimizer.state[trainer.model.distogram_head.weight]
    for kind in ("exp_avg", "exp_avg_sq"):
        assert saved["moments"][kind].keys() == saved["model"].keys()
        assert torch.equal(saved["moments"][kind]["distogram_head.weight"], state[kind])
    fresh = snapshot(trainer_of())
    assert fresh["moments"] == {} and fresh["updates"] == 0


def test_moments_of_weights_without_a_gradient_are_zero():
    trainer = trainer_of()
    trainer.model.distogram_head.bias.requires_grad_(False)
    trainer.step(SyntheticProteins(trainer.settings).batch(0))
    moment = snapshot(trainer)["moments"]["exp_avg_sq"]
    assert moment["distogram_head.weight"].any()
    assert torch.equal(moment["distogram_head.bias"], torch.zeros(64))


@pytest.mark.parametrize("source, target", [
    ({}, dict(enable_projection_fusion=True)), (HALF, HALF), (HALF, MASTERS), (MASTERS, HALF),
    (MASTERS, MASTERS)])
def test_everything_comes_back(source, target, tmp_path):
    expected = copy.deepcopy(snapshot(first := trained(4, overflows=len(source) and 1, **source)))
    path = saved_to(tmp_path / "c.pt", first)
    second = trainer_of(dropout=0.2, seed=7, **target)
    torch.manual_seed(8)
    restore(second, path)
    assert second.step_number == 4 and second.trained_on == {"a", "b"}
    found = snapshot(second)
    for key in ("config", "step", "updates", "model", "moments", "scaler", "rng", "trained_on"):
        assert same(found[key], expected[key]), key
    weights = second.model.state_dict()  # the model's own, which is what computes
    assert all(torch.equal(weights[name], value.to(weights[name].dtype))
               for name, value in expected["model"].items())
    assert all(state["step"] == expected["updates"] for state in second.optimizer.state.values())
    batch = SyntheticProteins(first.settings).batch(9)
    second.step(batch)
    assert second.scaler.get_scale() == (expected["scaler"] or {"scale": 1})["scale"]
    assert same(snapshot(second)["updates"], expected["updates"] + 1)


def test_a_checkpoint_from_before_the_first_step_comes_back(tmp_path):
    path = saved_to(tmp_path / "c.pt", first := trainer_of())
    second = trainer_of(seed=3)
    restore(second, path)
    assert same(second.model.state_dict(), first.model.state_dict()) and not second.optimizer.state


def test_weights_that_are_not_finite_are_not_saved():
    for value in ("nan", "inf"):
        trainer = trainer_of()
        with torch.no_grad():
            trainer.model.masked_msa_head.bias[3] = float(value)
        with pytest.raises(UserError, match="weights are not finite at step 0: not saved") as caught:
            snapshot(trainer)
        assert caught.value.code == FAILED


def test_one_flipped_bit_of_a_weight_is_found(tmp_path):
    """The last bit of its mantissa, with which it is as finite and as plausible as before."""
    path = saved_to(tmp_path / "c.pt", trainer := trained(1))
    whole = bytearray(path.read_bytes())
    for name in ("blocks.0.pair_transition.linear1.weight", "left_embedding.weight"):
        place = whole.index(trainer.model.state_dict()[name].numpy().tobytes())
        whole[place] ^= 1
        path.write_bytes(whole)
        assert "damaged: the checksum of its part" in refused(path)
        whole[place] ^= 1
    path.write_bytes(whole)
    restore(trainer_of(), path)


class Evil:
    """Unpickled, it makes a directory."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


def test_loading_a_checkpoint_runs_no_code_of_it(tmp_path):
    whole = snapshot(trainer_of())
    torch.save({**whole, "trained_on": [Evil(tmp_path / "it ran")]}, tmp_path / "evil.pt")
    refused(tmp_path / "evil.pt")
    assert not (tmp_path / "it ran").exists()


def refused(path, **values):
    """The message with which this file is refused."""
    with pytest.raises(UserError) as caught:
        read_checkpoint(path, tof.PROGRAM, tof.PROGRAM.settings(**{**SMALL, **values}).model)
    message = str(caught.value)
    assert caught.value.code == USAGE and "\n" not in message and str(path) in message
    return message


def test_a_checkpoint_of_another_program_or_model_is_refused(tmp_path):
    whole = snapshot(trainer_of())

    def changed(**values):
        torch.save({key: value for key, value in {**whole, **values}.items() if value is not None},
                   tmp_path / "c.pt")
        return tmp_path / "c.pt"

    config = tof.PROGRAM.settings(**SMALL, dropout=0.1).having(seq_len=16, num_seqs=5).model
    assert same(read_checkpoint(changed(), tof.PROGRAM, config), whole)  # what may be resized
    assert read_checkpoint(changed(training=None), tof.PROGRAM, config)["step"] == 0  # older ones lack it
    assert "not a checkpoint of this program" in refused(changed(format="second_program checkpoint 1"))
    assert "not a checkpoint of this program" in refused(changed(format=None))
    for key in ("config", "step", "updates", "model", "moments", "scaler", "rng", "trained_on"):
        assert refused(changed(**{key: None})).endswith(f"it lacks {key}")
        assert refused(changed(**{key: "x"})).endswith(f"damaged: {key} is of the wrong type")
    assert refused(changed(step=True)).endswith("damaged: step is of the wrong type")
    assert read_checkpoint(changed(updates=1), tof.PROGRAM, config)["updates"] == 1
    message = refused(changed(), num_blocks=2, pair_dim=16)
    assert message.endswith("pass --pair-dim 8 --num-blocks 1")
    torch.save([1], tmp_path / "list.pt")
    refused(tmp_path / "list.pt")
    assert "No such file" in refused(tmp_path / "absent.pt")


def other(part, name, **values):
    """A change of one tensor."""
    def change(saved):
        tensors = saved[part] if part == "model" else saved["moments"][part]
        tensors[name] = values["value"] if "value" in values else tensors[name].to(values["dtype"])
    return change


BIAS, NAN = "masked_msa_head.bias", float("nan")
FAULTS = [
    ("model " + BIAS, other("model", BIAS, value=torch.zeros(5))),
    ("model " + BIAS, other("model", BIAS, value=torch.full((23,), NAN))),
    ("model " + BIAS, other("model", BIAS, dtype=torch.float64)),
    ("model " + BIAS, other("model", BIAS, value=23 * [0.0])),
    ("names of model", lambda saved: saved["model"].pop(BIAS)),
    ("names of model", other("model", "more", value=torch.zeros(23))),
    ("moments exp_avg_sq " + BIAS, other("exp_avg_sq", BIAS, value=torch.zeros(1, 23))),
    ("names of moments exp_avg", lambda saved: saved["moments"]["exp_avg"].pop(BIAS)),
    ("names of moments exp_avg_sq", lambda saved: saved["moments"].update(exp_avg_sq=[])),
    ("moments", lambda saved: saved["moments"].pop("exp_avg")),
    ("step", lambda saved: saved.update(step=-1)),
    *(("best", lambda saved, wrong=wrong: saved["best"].update(wrong)) for wrong in (
        dict(score="0.5"), dict(score=NAN), dict(score=True), dict(step=1.5), dict(since=None),
        dict(other=1))),
    ("step", lambda saved: saved.update(step=2 ** 53 + 1)),
    ("updates", lambda saved: saved.update(updates=-0.5)),
    ("updates", lambda saved: saved.update(updates=NAN)),
    ("scaler", lambda saved: saved["scaler"].pop("scale")),
    ("scaler", lambda saved: saved["scaler"].update(more=1)),
    ("scaler", lambda saved: saved["scaler"].update(scale=-1.0)),
    ("scaler", lambda saved: saved["scaler"].update(scale=float("inf"))),
    ("scaler", lambda saved: saved["scaler"].update(scale="1")),
    ("trained_on", lambda saved: saved["trained_on"].append(1)),
    ("training", lambda saved: saved.update(training=[])),
    ("rng cpu", lambda saved: saved["rng"].pop("cpu")),
    ("rng cpu", lambda saved: saved["rng"].update(cpu=torch.zeros(3, dtype=torch.uint8))),
    ("rng cpu", lambda saved: saved["rng"].update(cpu=[0]))]


@pytest.mark.parametrize("words, change", FAULTS)
def test_a_checkpoint_with_a_field_that_cannot_be_used_is_refused(words, change, tmp_path):
    saved = copy.deepcopy(snapshot(trained(1, **HALF)))
    change(saved)
    torch.save(saved, tmp_path / "c.pt")
    trainer = trainer_of(seed=3, **HALF)
    before = copy.deepcopy(snapshot(trainer))
    with pytest.raises(UserError) as caught:
        restore(trainer, tmp_path / "c.pt")
    assert f": {words} cannot be used" in str(caught.value) and "\n" not in str(caught.value)
    assert same(snapshot(trainer), before)  # nothing was taken over


def test_the_largest_step_and_fields_that_are_empty_can_be_used(tmp_path):
    saved = snapshot(trained(1, **HALF))
    torch.save({**saved, "step": 2 ** 53, "updates": 0, "scaler": {}, "moments": {}, "trained_on": []},
               tmp_path / "c.pt")
    trainer = trainer_of(**HALF)
    restore(trainer, tmp_path / "c.pt")
    assert trainer.step_number == 2 ** 53 and trainer.scaler.get_scale() == 2 ** 16


def test_resuming_says_what_differs_and_refuses_what_is_dishonest(tmp_path, capsys):
    path = saved_to(tmp_path / "c.pt", trained())
    source = SyntheticProteins(trainer_of().settings)
    load_run(trainer_of(dropout=0.2, num_steps=4), path, source)
    assert capsys.readouterr().out == f"Resumed from {path} at step 3\n"
    another = dict(learning_rate=0.5, seq_len=16, num_steps=9, log_every=3, warmup_steps=0)
    load_run(trainer_of(**another), path, source)
    assert capsys.readouterr().out == (f"Resumed from {path} at step 3; different now: seq_len 8 -> 16, "
                                       "dropout 0.2 -> 0.0, learning_rate 0.0003 -> 0.5\n")
    for steps, words in ((5, ""), (9, "; different now: num_steps 5 -> 9")):  # the rate depends on it
        path = saved_to(tmp_path / "l.pt", trained(num_steps=5, lr_schedule="linear"))
        capsys.readouterr()
        load_run(trainer_of(num_steps=steps, lr_schedule="linear", dropout=0.2), path, source)
        assert f"{path} at step 3{words}\n" in capsys.readouterr().out
    load_run(trainer_of(num_steps=3), path, source)  # its last evaluation is still to come
    with pytest.raises(UserError, match="--num-steps 2: .* is at step 3 already"):
        load_run(trainer_of(num_steps=2), path, source)
    source.held_out = ["c", "b", "a"]
    with pytest.raises(UserError, match="was trained on a, b, held out now"):
        load_run(trainer_of(num_steps=4), path, source)


# --- Files ----------------------------------------------------------------------------------------------


def test_a_file_is_on_the_disk_before_it_gets_its_name(tmp_path, monkeypatch):
    events, path = [], tmp_path / "deep" / "x.bin"
    sync, rename = os.fsync, os.replace
    monkeypatch.setattr(os, "fsync", lambda handle: (events.append(("sync", os.fstat(handle).st_size)),
                                                     sync(handle)))
    monkeypatch.setattr(os, "replace", lambda old, new: (events.append(("rename", new)), rename(old, new)))
    umask = os.umask(0o027)
    try:
        files.write_atomically(path, lambda file: file.write(b"12345"))
    finally:
        os.umask(umask)
    renamed = events.index(("rename", str(path)))
    assert events[:renamed] == [("sync", 5)] and path.read_bytes() == b"12345"
    assert stat.S_IMODE(path.stat().st_mode) == 0o640 and list(path.parent.iterdir()) == [path]
    link = tmp_path / "link"
    link.symlink_to(path)
    files.write_text(link, "é")
    assert link.is_symlink() and path.read_text(encoding="utf-8") == "é"


def test_a_write_that_fails_leaves_the_old_file_alone(tmp_path):
    (tmp_path / "x.json").write_text("old")
    for content, error in (({"a": float("nan")}, ValueError), ({"a": {1}}, TypeError)):
        with pytest.raises(error):
            files.write_json(tmp_path / "x.json", content)

    def stopped(file):
        file.write(b"half")
        raise KeyboardInterrupt
    with pytest.raises(KeyboardInterrupt):
        files.write_atomically(tmp_path / "x.json", stopped)
    assert [(p.name, p.read_text()) for p in tmp_path.iterdir()] == [("x.json", "old")]
