"""What of a run goes into a checkpoint and comes out of it, by a trainer of two numbers."""
import dataclasses
import os
from types import SimpleNamespace

import pytest
import torch

from fusion_lab.training import checkpoints, recipe
from fusion_lab.training.checkpoints import read_checkpoint, restore, save, snapshot
from fusion_lab.training.files import USAGE, UserError
from fusion_lab.training.master_weights import MasterWeights, Weights
from fusion_lab.training.options import option

CPU, GPU = torch.device("cpu"), torch.device("cuda", 3)


@dataclasses.dataclass(frozen=True)
class Config:
    width: int = option(2, "of the model")
    length: int = option(3, "of a sample", resized=True)


@dataclasses.dataclass
class Training:
    seed: int = 42
    num_steps: int = 9
    lr_schedule: str = "constant"
    learning_rate: float = 0.5
    early_stopping: int = None
    device: str = "cpu"


class World:
    """That of the first of several ranks, or of another one; its random numbers are noted."""
    size = 2

    def __init__(self, first=True):
        self.first, self.seeds = first, []

    def reseed(self, *numbers):
        self.seeds.append((*numbers, torch.get_rng_state()))


class Packing(torch.nn.Module):
    """Packed: its weight is saved as a half of it."""

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.tensor([2.0, 4.0]))

    def split_packed(self, tensors, prefix):
        tensors[f"{prefix}half"] = tensors.pop(f"{prefix}weight") / 2

    def adapt(self, tensors, prefix):
        tensors[f"{prefix}weight"] = tensors.pop(f"{prefix}half") * 2


@pytest.fixture
def trainer():
    """After a step, with an average of weights, a best evaluation and names."""
    return trainer_of()


def trainer_of(steps=1, average=True, device=CPU, first=True):
    model = torch.nn.Sequential(Packing())
    average = recipe.average(weights := Weights(model), 0.5 * average)
    found = SimpleNamespace(
        program=SimpleNamespace(name="toy.py", stem="toy"), settings=SimpleNamespace(model=Config()),
        training=Training(), gradient_norm=torch.tensor(0.25), model=model,
        device=device, world=World(first), weights=weights, average=average,
        optimizer=torch.optim.AdamW(model.parameters(), lr=0.5),
        scaler=torch.amp.GradScaler("cpu"),
        step_number=4, trained_on={"b", "a"}, sequences=dict(a=["AC"]), chosen_by={"d", "c"},
        best=dict(score=0.5, step=3, since=1))
    if average:
        average.tensors[0].copy_(torch.tensor([12.0, 14.0]))
        average.steps = 7
    for _ in range(steps):
        model[0].weight.grad = torch.ones(2)
        found.optimizer.step()
    return found


def whole(trainer, **values):
    """A snapshot with these fields; None leaves one out."""
    return {key: value for key, value in {**snapshot(trainer), **values}.items() if value is not None}


# --- What is saved ----------------------------------------------------------------------------------------

def test_a_snapshot_field_by_field(trainer):
    saved = snapshot(trainer)
    assert saved.pop("format") == "toy checkpoint 1" and saved.pop("config") == dict(width=2, length=3)
    assert saved.pop("training") == dict(dataclasses.asdict(Training()), ranks=2)
    assert (saved.pop("step"), saved.pop("updates"), saved.pop("averaged_steps")) == (4, 1.0, 7)
    assert saved.pop("trained_on") == ["a", "b"] and saved.pop("chosen_by") == ["c", "d"]
    assert saved.pop("sequences") == dict(a=["AC"])
    assert saved.pop("gradient_norm") == 0.25
    assert saved.pop("best") == dict(score=0.5, step=3, since=1) and saved.pop("rng").keys() == {"cpu"}
    assert saved.pop("scaler")["scale"] == 2 ** 16
    assert {key: [*tensors] for key, tensors in saved.pop("moments").items()} == dict(
        exp_avg=["0.half"], exp_avg_sq=["0.half"])
    assert saved.pop("average")["0.half"].tolist() == [6, 7]
    assert saved.pop("model")["0.half"].tolist() == pytest.approx([0.745, 1.74]) and saved == {}
    fresh = snapshot(trainer_of(steps=0, average=False))
    assert fresh["moments"] == {} and fresh["updates"] == 0 and "average" not in fresh
    assert fresh["model"]["0.half"].tolist() == [1, 2]


def test_of_several_ranks_the_first_one_writes(tmp_path):
    save(trainer_of(first=False), tmp_path / "c.pt")
    assert not (tmp_path / "c.pt").exists()
    save(trainer_of(), tmp_path / "c.pt")
    assert torch.load(tmp_path / "c.pt")["step"] == 4


def test_masters_are_saved_in_float32_under_the_names_of_their_weights():
    trainer = trainer_of(average=False)
    trainer.weights = masters = MasterWeights(trainer.model, torch.bfloat16)
    masters.put(checkpoints.packed(trainer, {"0.half": torch.tensor([5.0, 6.0 + 2 ** -20])}))
    assert trainer.model[0].weight.tolist() == [10, 12] and masters.flat[:2].tolist() == [10, 12 + 2 ** -19]
    trainer.optimizer = masters.optimizer(lr=0.5)
    masters.flat.grad = torch.ones(64)
    trainer.optimizer.step()
    saved = snapshot(trainer)
    assert saved["moments"]["exp_avg"]["0.half"].tolist() == pytest.approx([0.05, 0.05])
    assert saved["model"]["0.half"].tolist() == (masters.flat[:2] / 2).tolist()


@pytest.mark.parametrize("device, forked", [(CPU, []), (GPU, [GPU])])
def test_what_runs_aside_leaves_everything(device, forked, trainer, monkeypatch):
    """A state that the optimizer has only since is zero again; all stays where it is."""
    before, kept = trainer.model[0].weight.tolist(), trainer.model[0].weight.data_ptr()
    state, calls = trainer.optimizer.state[trainer.weights.tensors[0]], []
    moment, other = state["exp_avg"].clone(), torch.zeros(1)
    fork_rng = torch.random.fork_rng
    monkeypatch.setattr(torch.random, "fork_rng",
                        lambda devices: calls.append(devices) or fork_rng(devices=[]))
    trainer.device, random = device, torch.get_rng_state()
    with pytest.raises(KeyError), checkpoints.preserving(trainer):
        trainer.model[0].weight.data += 1
        trainer.average.tensors[0] += 1
        trainer.gradient_norm += 1
        trainer.average.steps, torch_state = 8, torch.rand(3)
        state["exp_avg"] += 1
        trainer.optimizer.state[other] = dict(exp_avg=torch.ones(1), step=torch.tensor(1.0))
        trainer.scaler.load_state_dict({**trainer.scaler.state_dict(), "scale": 8.0})
        raise KeyError
    assert trainer.model[0].weight.tolist() == before and trainer.model[0].weight.data_ptr() == kept
    assert trainer.average.steps == 7 and len(torch_state) == 3
    assert trainer.gradient_norm == 0.25
    assert trainer.average.tensors[0].tolist() == [12, 14] and torch.equal(state["exp_avg"], moment)
    assert trainer.optimizer.state.pop(other) == dict(exp_avg=0, step=0)
    assert trainer.scaler.state_dict()["scale"] == 2 ** 16 and calls == [forked]
    assert torch.equal(torch.get_rng_state(), random)


# --- What is refused --------------------------------------------------------------------------------------

NAN, INF, BEST = float("nan"), float("inf"), dict(score=0.5, step=3, since=1)
SCALER = torch.amp.GradScaler("cpu").state_dict()


def test_a_checkpoint_of_another_model_says_with_which_flags_it_fits(trainer, tmp_path):
    path = tmp_path / "c.pt"
    torch.save(snapshot(trainer), path)
    assert read_checkpoint(path, trainer.program, Config(length=5))["step"] == 4
    with pytest.raises(UserError) as caught:
        read_checkpoint(path, trainer.program, Config(width=5))
    assert str(path) in str(caught.value) and "--width 2" in str(caught.value)
    for gone in (dict(width=2, depth=60 * "b\n"), {1: 2}):  # which no flags bring back
        torch.save(whole(trainer, config=gone), path)
        with pytest.raises(UserError, match="of a model that this version lacks") as caught:
            read_checkpoint(path, trainer.program, Config())
        assert caught.value.code == USAGE and "\n" not in str(caught.value)


# --- What comes back --------------------------------------------------------------------------------------

def test_everything_is_put_in_its_place(trainer, tmp_path):
    torch.save(snapshot(trainer), tmp_path / "c.pt")
    random, second = torch.get_rng_state(), trainer_of(steps=0)
    second.trained_on, second.chosen_by, second.best = set(), set(), dict(score=None, step=None, since=0)
    second.sequences = {}
    second.gradient_norm = torch.zeros(())
    second.average.tensors[0].zero_()
    second.average.steps, second.step_number = 0, 0
    place = second.model[0].weight.data_ptr()
    second.scaler.load_state_dict({**SCALER, "scale": 8.0})
    torch.rand(3)
    assert restore(second, tmp_path / "c.pt")["step"] == 4
    assert torch.equal(second.model[0].weight, trainer.model[0].weight)
    assert second.model[0].weight.data_ptr() == place
    assert second.average.tensors[0].tolist() == [12, 14] and second.average.steps == 7
    (state,) = second.optimizer.state.values()
    assert state["step"] == 1 and state["exp_avg"].tolist() == pytest.approx([0.1, 0.1])
    assert second.scaler.state_dict()["scale"] == 2 ** 16 and second.step_number == 4
    assert (second.trained_on, second.chosen_by, second.best) == ({"a", "b"}, {"c", "d"}, BEST)
    assert second.sequences == dict(a=["AC"])
    assert second.gradient_norm == 0.25
    ((*numbers, seeded),) = second.world.seeds  # after the first rank's random numbers have come back
    assert numbers == [42, 4] and torch.equal(seeded, random)


def test_older_checkpoints_lack_some_of_it(trainer, tmp_path):
    torch.save(whole(trainer, average=None, averaged_steps=None, best=None, chosen_by=None, sequences=None,
                     scaler={}, moments={}, gradient_norm=None), tmp_path / "c.pt")
    second = trainer_of(steps=0)
    second.best = dict(score=1.0, step=2, since=3)
    restore(second, tmp_path / "c.pt")
    assert torch.equal(second.average.tensors[0], trainer.model[0].weight) and second.average.steps == 0
    assert second.best == dict(score=1.0, step=2, since=3) and second.chosen_by == set()
    assert second.gradient_norm == 0
    assert not second.optimizer.state and second.scaler.state_dict()["scale"] == 2 ** 16


def load(trainer, path, held_out=(), **source):
    known = dict(held_out=held_out, choosing=()) | source
    checkpoints.load_run(trainer, path, SimpleNamespace(**known))


def test_what_a_continuation_says(trainer, tmp_path, capsys):
    path = tmp_path / "c.pt"
    save(trainer, path)
    load(trainer_of(), path)
    assert capsys.readouterr().out == f"Resumed from {path} at step 4\n"
    other = trainer_of()  # paths, devices and limits are a session's own
    other.training, other.world.size = Training(num_steps=5, learning_rate=0.25, device="cuda",
                                                early_stopping=7), 1
    load(other, path)
    said = f"Resumed from {path} at step 4; different now: "
    assert capsys.readouterr().out == said + "learning_rate 0.5 -> 0.25, ranks 2 -> 1\n"
    other.training = Training(num_steps=5, lr_schedule="linear")  # by which the number of steps counts
    load(other, path)
    assert capsys.readouterr().out == said + ("num_steps 9 -> 5, lr_schedule constant -> linear, "
                                              "ranks 2 -> 1\n")
    torch.save(whole(trainer, training=None), path)  # older ones have none
    load(other, path)
    assert capsys.readouterr().out == f"Resumed from {path} at step 4\n"
    other.training = Training(num_steps=4)
    with pytest.raises(UserError) as caught:
        load(other, path)
    assert "--num-steps 4" in str(caught.value)


@pytest.mark.parametrize("held_out, source, words", [
    (["a", "x", "b"], {}, "was trained on a, b, held out now"), (["c"], {}, "was chosen by c, held out now"),
    ([], dict(choosing=["b"]), "was trained on b, for validation now: other --seed?"),
    ([], dict(choosing=["c"]), None), (["x"], dict(choosing=["y"]), None)])
def test_what_a_run_may_not_have_seen(held_out, source, words, trainer, tmp_path):
    path = tmp_path / "c.pt"
    torch.save(snapshot(trainer), path)
    if words is None:
        load(trainer_of(), path, held_out, **source)
    else:
        with pytest.raises(UserError) as caught:
            load(trainer_of(), path, held_out, **source)
        assert str(caught.value) == f"--resume {os.fspath(path)}: {words}"
    checkpoints.refuse_leaks({}, SimpleNamespace(held_out=["a"], choosing=()), "--init-from")
