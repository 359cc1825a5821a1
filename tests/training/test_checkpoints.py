"""What of a run goes into a checkpoint and comes out of it, also under other switches; what is refused."""
import copy
import os
import random
from types import SimpleNamespace

import pytest
import torch

import tiny_openfold_v2 as tof
from fusion_lab.training.checkpoints import (
    load_run,
    optimizer_state,
    outputs,
    read_checkpoint,
    refuse_leaks,
    restore,
    save,
    snapshot,
)
from fusion_lab.training.distributed import World
from fusion_lab.training.errors import USAGE, UserError
from tests import tiny
from tests.training.test_resume import plain
from tiny_openfold.proteins.batches import SyntheticProteins

HALF = dict(use_amp=True, amp_dtype="float16")
MASTERS = dict(HALF, enable_master_weights=True)


def trainer_of(*world, **values):
    return tiny.trainer_of(*world, **dict(dropout=0.2, num_steps=9) | values)


def trained(steps=1, overflows=0, **values):
    """A trainer after some steps. The last ones overflow in float16, so that its scaler skips them."""
    trainer = trainer_of(**values)
    batch = SyntheticProteins(trainer.settings).batch(0)
    for step in range(steps):
        if step == steps - overflows:
            trainer.model.distogram_head.weight.register_hook(lambda gradient: gradient * float("inf"))
        trainer.step(batch)
        trainer.step_number += 1
    trainer.trained_on, trainer.chosen_by, trainer.sequences = {"b", "a"}, {"d", "c"}, dict(a=["AC"])
    trainer.best = dict(score=0.5, step=1, since=3)
    return trainer


def changed(path, trainer, **values):
    """A checkpoint with other values of these fields; None leaves one out."""
    saved = {key: value for key, value in {**snapshot(trainer), **values}.items() if value is not None}
    torch.save(saved, path)
    return path


# --- What comes back --------------------------------------------------------------------------------------


@pytest.mark.parametrize("source, target", [
    ({}, dict(enable_projection_fusion=True)), (HALF, HALF), (HALF, MASTERS), (MASTERS, HALF),
    (MASTERS, MASTERS)])
def test_everything_comes_back(source, target, tmp_path):
    second = trainer_of(seed=7, ema_decay=0.9, **target)
    first = trained(4, overflows=len(source) and 1, ema_decay=0.9, **source)
    expected = copy.deepcopy(snapshot(first))
    save(first, tmp_path / "c.pt")
    places = [weight.data_ptr() for weight in second.weights.tensors]  # which a captured graph knows
    torch.manual_seed(8)
    restore(second, tmp_path / "c.pt")
    assert plain(snapshot(second)) == plain(expected)
    assert places == [weight.data_ptr() for weight in second.weights.tensors]
    weights = second.model.state_dict()  # the model's own, which is what computes
    assert all(torch.equal(weights[name], value.to(weights[name].dtype))
               for name, value in expected["model"].items())
    assert all(state["step"] == expected["updates"] for state in second.optimizer.state.values())
    second.step(SyntheticProteins(first.settings).batch(9))
    assert second.scaler.get_scale() == (expected["scaler"] or {"scale": 1})["scale"]
    assert snapshot(second)["updates"] == expected["updates"] + 1


def test_older_checkpoints_lack_some_of_it(tmp_path):
    trainer, second = trained(), trainer_of(ema_decay=0.9, seed=7)
    path = changed(tmp_path / "c.pt", trainer, best=None, chosen_by=None, sequences=None, gradient_norm=None,
                   scaler={}, moments={})
    restore(second, path)
    assert all(map(torch.equal, second.average.tensors, trainer.weights.tensors))
    assert second.average.steps == 0
    assert second.best["score"] is None and second.chosen_by == set() and second.gradient_norm == 0
    assert not any(map(torch.any, optimizer_state(second, "exp_avg"))) and second.step_number == 1


def test_ranks_after_the_first_draw_random_numbers_of_their_own_after_each_step(tmp_path):
    drawn = []
    for rank, steps in ((0, 1), (0, 1), (1, 1), (2, 1), (1, 2)):
        save(trained(steps), tmp_path / "c.pt")
        restore(trainer_of(World(rank, 3)), tmp_path / "c.pt")
        drawn.append(torch.rand(1).item())
    assert drawn[0] == drawn[1] and len(set(drawn)) == 4


def test_ranks_begin_with_the_same_weights_and_random_numbers_of_their_own():
    (first, own), (second, others) = ((trainer_of(World(rank, 2)), torch.rand(1)) for rank in (0, 1))
    assert plain(first.model.state_dict()) == plain(second.model.state_dict()) and own != others


def test_of_several_ranks_the_first_one_writes(tmp_path):
    for rank in (1, 0):
        save(trainer_of(World(rank, 2)), tmp_path / "c.pt")
        assert (tmp_path / "c.pt").exists() == (rank == 0)


# --- What is refused --------------------------------------------------------------------------------------


def loaded(path, held_out=(), choosing=(), **values):
    trainer = trainer_of(**values)
    load_run(trainer, path, SimpleNamespace(held_out=held_out, choosing=choosing))
    return trainer


@pytest.mark.parametrize("how", ["flipped", "cut short"])
def test_a_damaged_file_is_refused_or_was_not_harmed(how, tmp_path):
    first, path, refused = trained(**HALF), tmp_path / "c.pt", 0
    save(first, path)
    whole = path.read_bytes()
    for number in range(40):
        rng, content = random.Random(number), bytearray(whole)
        at = rng.randrange(len(content))
        if how == "flipped":
            content[at] ^= 1 << rng.randrange(8)
        path.write_bytes(content[:at] if how == "cut short" else content)
        try:
            assert plain(snapshot(loaded(path, **HALF))) == plain(snapshot(first)), number
        except UserError as error:
            assert str(path) in str(error) and "\n" not in str(error)
            refused += 1
    assert refused > 20


def test_a_tensor_that_the_archive_calls_a_directory_is_refused(tmp_path):
    """torch.load() would take memory that nobody wrote."""
    save(trained(), path := tmp_path / "c.pt")
    content = bytearray(path.read_bytes())
    header = content.rindex(b"PK\1\2", 0, content.rindex(b"/data/0"))  # in the archive's directory
    content[header + 38] ^= 0x10  # the directory bit among the external attributes of a tensor
    path.write_bytes(content)
    with pytest.raises(UserError, match="damaged"):
        loaded(path)


@pytest.mark.parametrize("change", [
    lambda saved: saved.update(format="second_program checkpoint 1"), lambda saved: saved["model"].popitem(),
    lambda saved: saved.pop("rng"), lambda saved: saved.update(step="x"),
    lambda saved: saved["model"].update({"masked_msa_head.bias": torch.zeros(1)}),
    lambda saved: saved["model"].update({"masked_msa_head.bias": torch.full((23,), float("nan"))}),
    lambda saved: saved.update(moments=None)])
def test_a_checkpoint_with_other_content_is_refused_by_name(change, tmp_path):
    saved = snapshot(trained(**HALF))
    change(saved)
    torch.save(saved, tmp_path / "c.pt")
    with pytest.raises(UserError, match="c.pt") as caught:
        loaded(tmp_path / "c.pt", **HALF)
    assert "\n" not in str(caught.value)


def test_a_checkpoint_of_another_model_says_with_which_flags_it_fits(tmp_path):
    trainer = trained()
    config = trainer.settings.model

    def model(**values):
        return trainer.settings.having(**values).model
    path = changed(tmp_path / "c.pt", trainer)
    assert read_checkpoint(path, tof.PROGRAM, model(seq_len=5))["step"] == 1
    with pytest.raises(UserError, match=f"{path}.* --pair-dim=8$"):
        read_checkpoint(path, tof.PROGRAM, model(pair_dim=16))
    with pytest.raises(UserError, match="pass --orientations$"):  # a switch
        read_checkpoint(changed(path, trainer, config=vars(model(orientations=True))), tof.PROGRAM, config)
    for gone in (dict(vars(config), depth=60 * "b\n"), {1: 2}):  # which no flags bring back
        with pytest.raises(UserError, match="of another version") as caught:
            read_checkpoint(changed(path, trainer, config=gone), tof.PROGRAM, config)
        assert caught.value.code == USAGE and "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["performance_summary_v2.json", "metrics.jsonl", "learning_curve.png"])
def test_a_checkpoint_takes_no_name_of_other_results(name, tmp_path):
    trainer = trainer_of(save_checkpoint=str(tmp_path / name))
    with pytest.raises(UserError, match="--save-checkpoint .* names other results"):
        outputs(trainer)
    assert not list(tmp_path.iterdir())


class Evil:
    """Unpickled, it makes a directory."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


def test_loading_a_checkpoint_runs_no_code_of_it(tmp_path):
    trainer = trainer_of()
    path = changed(tmp_path / "evil.pt", trainer, trained_on=[Evil(tmp_path / "it ran")])
    with pytest.raises(UserError, match="damaged"):
        read_checkpoint(path, tof.PROGRAM, trainer.settings.model)
    assert not (tmp_path / "it ran").exists()


def test_what_a_continuation_says(tmp_path, capsys):
    trainer, path = trained(4), tmp_path / "c.pt"
    changed(path, trainer)
    for values, words in (({}, []), (dict(device="cuda", log_every=3), []),  # a session's own
                          (dict(learning_rate=0.25, num_steps=5), ["learning_rate 0.0003 -> 0.25"]),
                          (dict(world=World(0, 2)), ["ranks 1 -> 2"]),
                          (dict(num_steps=5, lr_schedule="linear"),  # by which the number of steps counts
                           ["num_steps 9 -> 5", "lr_schedule constant -> linear"])):
        loaded(path, **values)
        changes = capsys.readouterr().out.strip().removeprefix(f"Resumed from {path} at step 4")
        assert sorted(changes.removeprefix("; different now: ").split(", ")) == sorted(words or [""])
    with pytest.raises(UserError, match="--num-steps 4"):
        loaded(path, num_steps=4)
    loaded(changed(path, trainer, training=None), seed=7)  # older ones have none
    assert "different" not in capsys.readouterr().out


@pytest.mark.parametrize("held_out, choosing, words", [
    (["a", "x", "b"], [], "was trained on a, b, held out now"), (["c"], [], "was chosen by c, held out now"),
    ([], ["b"], "was trained on b, for validation now: other --seed?"), (["x"], ["c", "y"], None)])
def test_what_a_run_may_not_have_seen(held_out, choosing, words, tmp_path):
    path = changed(tmp_path / "c.pt", trained())
    if words is None:
        loaded(path, held_out, choosing)
    else:
        with pytest.raises(UserError) as caught:
            loaded(path, held_out, choosing)
        assert str(caught.value) == f"--resume {path}: {words}"
    refuse_leaks({}, SimpleNamespace(held_out=["a"], choosing=()), "--init-from")
