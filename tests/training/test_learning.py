"""What makes it learn real alignments: the recipe over steps, the world `natural`, coevolution features."""

import pytest
import torch
from torch import nn

import tiny_openfold_v2 as tof
from fusion_lab.training import recipe
from fusion_lab.training.checkpoints import save, snapshot
from fusion_lab.training.evaluations import evaluating
from fusion_lab.training.files import UserError
from fusion_lab.training.master_weights import MasterWeights, Weights
from fusion_lab.training.models import load_weights
from tests.support import save_model
from tiny_openfold.proteins import batches

SMALL = dict(num_blocks=1, msa_dim=8, pair_dim=8, msa_heads=2, pair_heads=2, outer_product_dim=4, num_seqs=4,
             seq_len=12, batch_size=2, extra_seqs=16)
COUPLINGS = dict(SMALL, coevolution="couplings")


def settings_of(**values):
    return tof.PROGRAM.settings(**{**SMALL, **values})


def trainer_of(**values):
    return tof.Trainer(tof.PROGRAM, settings_of(**values), torch.device("cpu"))


def trained(trainer, steps):
    source = batches.open_source(trainer.settings)
    for _ in range(steps):
        trainer.step(source.batch(trainer.step_number))
        trainer.step_number += 1
    return trainer


# --- Learning rate, averaged weights, the best evaluation -----------------------------------------------

@pytest.mark.parametrize(("schedule", "rates"), [
    ("constant", [0.25, 0.5, 0.75, 1, 1, 1, 1, 1]), ("linear", [0.25, 0.5, 0.75, 1, 1, 0.75, 0.5, 0.25]),
    ("cosine", [0.25, 0.5, 0.75, 1, 1, 0.5 + 2 ** -1.5, 0.5, 0.5 - 2 ** -1.5])])
def test_learning_rates_by_hand(schedule, rates):
    training = settings_of(num_steps=8, lr_warmup_steps=4, lr_schedule=schedule, learning_rate=1.0).training
    assert [recipe.learning_rate(training, step) for step in range(8)] == pytest.approx(rates)


def test_a_step_uses_the_rate_of_its_number():
    trainer = trainer_of(num_steps=4, lr_schedule="linear", learning_rate=1e-3)
    trainer.step_number = 3
    trained(trainer, 1)
    assert trainer.optimizer.param_groups[0]["lr"] == pytest.approx(0.25e-3)
    assert trainer_of(weight_decay=0.5).optimizer.param_groups[0]["weight_decay"] == 0.5


def test_average_of_weights_by_hand():
    model = nn.Linear(1, 1, bias=False)
    weight = model.weight
    weight.data.zero_()
    average = recipe.average(Weights(model), 0.5)
    expected = 0.0
    for step in range(1, 12):
        weight.data += 1
        average.update()
        decay = min(0.5, (1 + step) / (10 + step))
        expected = decay * expected + (1 - decay) * step
    assert average.tensors[0].item() == pytest.approx(expected, rel=1e-6)
    with average.swapped_in():
        assert weight.item() == pytest.approx(expected, rel=1e-6)
    assert weight.item() == 11 and recipe.average(Weights(model), 0.0) is None


def test_a_model_of_low_precision_sees_the_average_too():
    model = nn.Linear(1, 1, bias=False)
    model.weight.data.zero_()
    average = recipe.average(masters := MasterWeights(model, torch.bfloat16), 0.5)
    masters.put([masters.flat + 1])
    assert model.weight.item() == 1
    with average.swapped_in():
        assert model.weight.item() == 0
    assert model.weight.item() == 1


def test_a_new_run_begins_with_averaged_weights(tmp_path):
    first = trained(trainer_of(ema_decay=0.9), 3)
    first.trained_on = {"a"}
    save(first, tmp_path / "c.pt")
    second, source = trainer_of(seed=7), batches.open_source(settings_of())
    load_weights(second, tmp_path / "c.pt", source)
    assert second.step_number == 0 and second.trained_on == {"a"} and not second.optimizer.state
    named = snapshot(second)["model"]
    assert all(torch.equal(named[name], weight) for name, weight in snapshot(first)["average"].items())
    source.held_out = ["a"]
    with pytest.raises(UserError, match="--init-from .* was trained on a, held out now"):
        load_weights(second, tmp_path / "c.pt", source)
    first.trained_on, first.chosen_by = set(), {"b"}
    save(first, tmp_path / "d.pt")
    source.held_out = ["b"]
    with pytest.raises(UserError, match="was chosen by b, held out now"):
        load_weights(second, tmp_path / "d.pt", source)
    save_model(tmp_path / "m.pt", tof.PROGRAM, named, first.settings.model, dict(trained_on=["z"]))
    load_weights(second, tmp_path / "m.pt", source)
    assert second.trained_on == {"z"}
    with pytest.raises(UserError, match="made for another model; to use it, pass --pair-dim 8$"):
        load_weights(trainer_of(pair_dim=16), tmp_path / "m.pt", source)


def test_evaluations_are_without_dropout():
    model = nn.Sequential(nn.Dropout(0.5))
    for training in (True, False):
        model.train(training)
        with pytest.raises(KeyError), evaluating(model):
            assert not model[0].training and not torch.is_grad_enabled()
            raise KeyError
        assert model[0].training is training
