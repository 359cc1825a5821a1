"""Model files, and --init-from: what a new run begins with."""
import dataclasses
import io
import zipfile

import pytest
import torch

import tiny_openfold_v2 as tof
from fusion_lab import commands
from fusion_lab.training import checkpoints, models
from fusion_lab.training.errors import UserError
from tests.tiny import model_of, save_model, trainer_of


@pytest.mark.parametrize("masters", [{}, dict(use_amp=True, enable_master_weights=True)])
def test_a_new_run_begins_with_averaged_weights(masters, tmp_path):
    """So does its own average, not with the random ones that the first evaluations would be of."""
    first, second = trainer_of(ema_decay=0.9), trainer_of(seed=7, ema_decay=0.99, **masters)
    source = tof.PROGRAM.data(first.settings)
    first.step(source.batch(0))
    first.trained_on, second.average.steps = {"a"}, 5
    checkpoints.save(first, tmp_path / "c.pt")
    models.load_weights(second, tmp_path / "c.pt", source)
    begun, given = checkpoints.snapshot(second), checkpoints.snapshot(first)["average"]
    assert (begun["step"], begun["averaged_steps"], begun["trained_on"]) == (0, 0, ["a"])
    assert second.average.decay == 0.99 and not any(w.any() for w in begun["moments"]["exp_avg"].values())
    for found in (begun["model"], begun["average"], second.model.state_dict()):
        assert all(torch.equal(weight, given[name].to(weight.dtype)) for name, weight in found.items())
    source.held_out = ["a"]
    with pytest.raises(UserError, match="--init-from .* was trained on a, held out now"):
        models.load_weights(second, tmp_path / "c.pt", source)


CARD, BIAS = dict(about="for tests", scores=[0.5, None]), "masked_msa_head.bias"


@pytest.fixture
def model_file(tmp_path):
    save_model(tmp_path / "m.pt", model_of(), CARD)
    return tmp_path / "m.pt"


def test_a_file_that_asks_for_far_more_memory_than_it_has_bytes_is_refused(model_file):
    """By a view of one number, or packed."""
    saved, plain = torch.load(model_file, weights_only=True), model_file.read_bytes()
    saved["model"][BIAS] = torch.zeros(1).expand(10 ** 9)
    torch.save(saved, model_file)
    with pytest.raises(UserError, match="damaged"):
        checkpoints.read_saved(model_file, "model", tof.PROGRAM, "model")
    with zipfile.ZipFile(io.BytesIO(plain)) as given, zipfile.ZipFile(model_file, "w") as packed:
        for entry in given.infolist():
            packed.writestr(entry.filename, given.read(entry), zipfile.ZIP_DEFLATED)
        packed.writestr("more", bytes(10 ** 6), zipfile.ZIP_DEFLATED)
    with pytest.raises(UserError, match="damaged"):
        checkpoints.read_saved(model_file, "model", tof.PROGRAM, "model")


def test_model_files_are_read_by_whatever_name_the_program_was_started(model_file, monkeypatch):
    monkeypatch.setitem(commands.TYPED, "tiny_openfold_v2.py", "tinyopenfold")
    assert tof.PROGRAM.name == "tinyopenfold" and models.read_model(model_file, tof.PROGRAM).card == CARD


def test_a_model_comes_back_under_unpacked_names(model_file):
    model, saved = model_of(), models.read_model(model_file, tof.PROGRAM)
    resized = dict(num_seqs=model.config.num_seqs, seq_len=model.config.seq_len)
    assert saved.card == CARD and dataclasses.replace(saved.config, **resized) == model.config
    assert all(torch.equal(saved.weights[name], weight.bfloat16().float())
               for name, weight in model.state_dict().items())
    save_model(model_file, model_of(enable_projection_fusion=True), CARD)
    assert models.read_model(model_file, tof.PROGRAM).weights.keys() == saved.weights.keys()


@pytest.mark.parametrize("change", [
    lambda saved: saved["model"].pop(BIAS), lambda saved: saved["model"].update(more=torch.zeros(1)),
    lambda saved: saved["model"].update({BIAS: torch.zeros(5)}),
    lambda saved: saved["model"].update({BIAS: torch.full((23,), float("nan"))}),
    lambda saved: saved.update(model=[1]), lambda saved: saved["model"].update(x=1),
    lambda saved: saved.update(config=None), lambda saved: saved["config"].update(x=1),
    lambda saved: saved["config"].update(coevolution="covariance"),
    lambda saved: saved["config"].update(msa_heads=3), lambda saved: saved["config"].update(num_blocks=3)])
def test_a_model_file_that_cannot_be_used_is_named(model_file, change):
    saved = torch.load(model_file, weights_only=True)
    change(saved)
    torch.save(saved, model_file)
    with pytest.raises(UserError, match=f"^model {model_file}: damaged, or of another version") as caught:
        models.read_model(model_file, tof.PROGRAM)
    assert "\n" not in str(caught.value)


def test_foreign_files_are_refused(tmp_path):
    for content in ([1], dict(format="second_program model 1"), dict()):
        torch.save(content, tmp_path / "c.pt")
        with pytest.raises(UserError, match="no checkpoint and no model of tiny_openfold_v2.py"):
            models.read_model(tmp_path / "c.pt", tof.PROGRAM)
