"""What makes it learn real alignments: the recipe over steps, the world `natural`, coevolution features."""
import math
import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.functional import one_hot

import tiny_openfold_v2 as tof
from fusion_lab.training import recipe
from fusion_lab.training.checkpoints import save, snapshot
from fusion_lab.training.evaluations import evaluating
from fusion_lab.training.files import UserError
from fusion_lab.training.models import load_weights, save_model
from tests.support import ROOT, require_shared
from tiny_openfold.proteins import batches, coevolution, files

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


def test_the_optimizer_of_a_run_and_of_a_graph():
    """A graph reads the rate from a tensor, which stays the same one."""
    weight = torch.nn.Parameter(torch.zeros(2))
    training = settings_of(learning_rate=0.5, weight_decay=0.25).training
    plain = recipe.optimizer([weight], training, None, False)
    assert isinstance(plain, torch.optim.AdamW) and plain.param_groups[0]["params"] == [weight]
    assert plain.defaults.items() >= dict(lr=0.5, weight_decay=0.25, fused=True, capturable=False).items()
    graphed = recipe.optimizer([weight], training, SimpleNamespace(optimizer=dict), True)
    rate = graphed["lr"]
    assert graphed == dict(lr=torch.tensor(0.5), weight_decay=0.25, fused=True, capturable=True)
    recipe.set_learning_rate(SimpleNamespace(param_groups=[graphed]), 0.125)
    assert graphed["lr"] is rate and rate.item() == 0.125


def test_average_of_weights_by_hand():
    weight = torch.nn.Parameter(torch.zeros(1))
    average = recipe.average([weight], 0.5)
    expected = 0.0
    for step in range(1, 12):
        weight.data += 1
        average.update()
        decay = min(0.5, (1 + step) / (10 + step))
        expected = decay * expected + (1 - decay) * step
    assert average.weights[0].item() == pytest.approx(expected, rel=1e-6)
    published = []
    with average.swapped_in(lambda: published.append(weight.item())):
        assert weight.item() == pytest.approx(expected, rel=1e-6)
    assert weight.item() == 11 and published == pytest.approx([expected, 11])
    assert recipe.average([weight], 0.0) is None


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


@pytest.mark.slow
def test_a_program_without_a_score_cannot_choose(tmp_path):
    run = subprocess.run([sys.executable, ROOT / "tests" / "second_program.py", "--early-stopping", "2",
                          "--profile-dir", tmp_path], capture_output=True, text=True, check=False)
    assert run.returncode == 2
    assert "--early-stopping: second_program.py does not say which evaluation is better" in run.stderr


# --- Families for validation, synthetic batches among real ones ------------------------------------------

def test_validation_families_are_neither_trained_on_nor_held_out():
    source = batches.open_source(settings_of(
        data=str(require_shared("data", "families")), holdout="1PTF_A", validate_fraction=0.25,
        **{"coevolution": "couplings"}))
    validation = {family.name for family in source.validation}
    assert len(validation) == 8 and "1PTF_A" not in validation and not validation & set(source.names)
    assert len(source.names) == 23
    groups = source.evaluation()
    assert list(groups) == ["training", "validation", "held_out"]
    assert {name for name, _ in groups["validation"]} == validation
    name, batch = next(iter(source.evaluation()["held_out"]))
    family = source.structure(name)
    assert batch["extra_msa"].shape == (1, min(len(family.msa), 4096), family.length)
    extra = {row.tobytes() for row in batch["extra_msa"][0].numpy()}
    assert {row.astype(np.uint8).tobytes() for row in batch["msa_tokens"][0].numpy()} <= extra


# --- Batches of the world `natural` -----------------------------------------------------------------------

def test_natural_batches_are_a_function_of_their_step():
    settings = settings_of(**COUPLINGS, synthetic_world="natural")
    source = batches.open_source(settings)
    first, again = source.batch(3), batches.open_source(settings).batch(3)
    assert all(torch.equal(first[key], again[key]) for key in first)
    assert first["extra_msa"].shape == (2, 16, 12) and first["extra_msa"].dtype == torch.uint8
    assert not torch.equal(first["coords"], source.batch(4)["coords"])
    depths = {int((batch["extra_msa"] != files.GAP).any(2).sum(1).max())
              for batch in map(source.batch, range(20))}
    assert depths == {4, 8, 16}  # never fewer rows than the MSA representation has
    held_out = dict(source.evaluation()["held_out"])
    assert list(held_out) == [f"synthetic-{i}" for i in range(16)]
    held_out["synthetic-0"].pop("coords")  # as an evaluation does
    assert "coords" in dict(source.evaluation()["held_out"])["synthetic-0"]


# --- Coevolution features --------------------------------------------------------------------------------

def test_padding_changes_no_feature():
    msa = torch.randint(0, 22, (1, 30, 9), generator=torch.Generator().manual_seed(0))
    padded = torch.full((1, 34, 12), files.GAP)
    padded[:, :30, :9] = msa
    mask = (torch.arange(12) < 9).float()[None]
    plain, more = coevolution.pair_features(msa), coevolution.pair_features(padded, mask)
    assert torch.allclose(plain, more[:, :9, :9], atol=2e-3)
    assert not more[:, 9:].any() and not more[:, :, 9:].any()


def test_the_model_reads_them_and_alone_is_what_it_was():
    plain, reading = trainer_of(), trainer_of(**COUPLINGS)
    batch = batches.open_source(reading.settings).batch(0)
    rows = batch["extra_msa"].clone()
    first = reading.model(**batch)["pair_repr"]
    batch["extra_msa"] = rows.flip(1)  # the order of rows does not matter
    assert torch.allclose(reading.model(**batch)["pair_repr"], first, atol=1e-3)
    batch["extra_msa"] = rows.roll(1, 2)
    assert not torch.allclose(reading.model(**batch)["pair_repr"], first, atol=1e-2)
    with pytest.raises(KeyError):
        plain.model.state_dict()["coevolution_embedding.weight"]
    reading.step(batch), reading.step(batch)  # heads begin with zeros
    weight = reading.model.coevolution_embedding.weight
    assert reading.optimizer.state[weight]["exp_avg"].abs().sum() > 0


def test_inverse_by_newton_is_the_inverse():
    """The GPU's way, on a CPU: matrix products alone."""
    class Elsewhere(torch.Tensor):
        is_cuda = True

    letters = torch.randint(0, 21, (200, 8), generator=torch.Generator().manual_seed(0))
    matrix = 0.5 * torch.cov(one_hot(letters, 21).flatten(1).float().T) + 0.02 * torch.eye(168)
    found = coevolution.inverse(matrix[None].as_subclass(Elsewhere)).as_subclass(torch.Tensor)[0]
    assert (found @ matrix - torch.eye(168)).abs().max() < 1e-3
    assert math.isclose(found.trace().item(), torch.linalg.inv(matrix).trace().item(), rel_tol=1e-4)


@pytest.mark.gpu
def test_statistics_on_a_gpu_are_those_of_a_cpu():
    rows = torch.randint(0, 21, (2, 64, 24), generator=torch.Generator().manual_seed(0))
    before = torch.backends.cuda.matmul.allow_tf32
    there = coevolution.pair_features(rows.cuda()).cpu()
    assert torch.allclose(there, coevolution.pair_features(rows), atol=5e-3, rtol=1e-3)
    assert torch.backends.cuda.matmul.allow_tf32 is before
