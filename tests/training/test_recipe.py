"""The recipe over steps: learning rates, averaged weights."""
import pytest
import torch
from torch import nn

import tiny_openfold_v2 as tof
from fusion_lab.training import recipe
from fusion_lab.training.master_weights import MasterWeights, ModelWeights
from tests.tiny import trainer_of
from tiny_openfold.proteins.batches import SyntheticProteins


@pytest.mark.parametrize(("schedule", "rates"), [
    ("constant", [0.25, 0.5, 0.75, 1, 1, 1, 1, 1, 1, 1]),
    ("linear", [0.25, 0.5, 0.75, 1, 1, 0.75, 0.5, 0.25, 0, 0]),
    ("cosine", [0.25, 0.5, 0.75, 1, 1, 0.5 + 2 ** -1.5, 0.5, 0.5 - 2 ** -1.5, 0, 0])])
def test_learning_rates_by_hand(schedule, rates):
    training = tof.PROGRAM.settings(num_steps=8, lr_warmup_steps=4, lr_schedule=schedule,
                                    learning_rate=1.0).training
    assert [recipe.learning_rate(training, step) for step in range(10)] == pytest.approx(rates)


def test_a_step_uses_the_rate_of_its_number():
    trainer = trainer_of(num_steps=4, lr_schedule="linear", learning_rate=1e-3, weight_decay=0.5)
    trainer.step_number = 3
    trainer.step(SyntheticProteins(trainer.settings).batch(3))
    (group,) = trainer.optimizer.param_groups
    assert group["lr"] == pytest.approx(0.25e-3) and group["weight_decay"] == 0.5


def test_average_of_weights_by_hand():
    model = nn.Linear(1, 1, bias=False)
    weight = model.weight
    weight.data.zero_()
    average = recipe.Average(ModelWeights(model), 0.5)
    expected = 0.0
    for step in range(1, 12):
        weight.data += 1
        average.update()
        decay = min(0.5, (1 + step) / (10 + step))
        expected = decay * expected + (1 - decay) * step
    assert average.tensors[0].item() == pytest.approx(expected, rel=1e-6)
    with average.swapped_in():
        assert weight.item() == pytest.approx(expected, rel=1e-6)
    assert weight.item() == 11


def test_a_model_of_low_precision_sees_the_average_too():
    model = nn.Linear(1, 1, bias=False)
    model.weight.data.zero_()
    average = recipe.Average(masters := MasterWeights(model, torch.bfloat16), 0.5)
    masters.put([masters.flat + 1])
    assert model.weight.item() == 1
    with average.swapped_in():
        assert model.weight.item() == 0
    assert model.weight.item() == 1
