"""ProteinMPNN: against the authors' model in float64, its symmetries, what it learns from, recovery."""
import itertools
import math
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from companions import backbones
from fusion_lab.measuring import accuracy
from fusion_lab.measuring.counters import saved_activations
from fusion_lab.measuring.flops import counts_by_sublayer
from fusion_lab.measuring.roofline import total_bytes
from fusion_lab.training import cuda_graphs
from fusion_lab.training.errors import UserError
from fusion_lab.training.program import load_program
from tests.support import GOING_ON, ROOT, require_shared
from tiny_openfold.proteins.files import AMINO_ACIDS

FILE = ROOT / "companions" / "protein_mpnn.py"
PROGRAM = load_program(FILE)
mpnn = __import__("protein_mpnn")

CPU = torch.device("cpu")
SWITCHES = ("enable_split_fusion", "enable_aggregate_fusion", "enable_edge_fusion",
            "enable_activation_checkpointing")
COMBINATIONS = [mpnn.MpnnSwitches(**dict(zip(SWITCHES, on, strict=True)))
                for on in itertools.product((False, True), repeat=len(SWITCHES))]
SMALL = dict(hidden_dim=16, num_layers=2, neighbors=5, seq_len=16, dropout=0.0, batch_size=2)


@pytest.fixture(scope="module")
def reference():
    """{key: tensor} of the authors' model; its own sizes."""
    with np.load(require_shared("reference", "companions", "protein_mpnn.npz")) as file:
        return {key: torch.from_numpy(file[key]) for key in file}


def model_of(reference, fusion):
    config = mpnn.MpnnConfig(hidden_dim=32, num_layers=2, neighbors=6, seq_len=14, dropout=0.0)
    model = mpnn.ProteinMPNN(config, fusion).double()
    model.load_state_dict({key[6:]: x for key, x in reference.items() if key.startswith("param/")})
    return model


def inputs_of(reference):
    names = ("X", "S", "mask", "residue_idx", "chain", "decoding_order")
    return {name: reference[f"input/{name}"] for name in names}


def errors(reference, fusion):
    """Largest differences from the reference: (log_probs, loss, gradients)."""
    model, inputs = model_of(reference, fusion), inputs_of(reference)
    output = model(**inputs)
    output["loss"].backward()
    there = inputs["mask"][:, :, None]
    gradients = [(p.grad - reference[f"grad/{name}"]).abs().max() for name, p in model.named_parameters()]
    return [x.item() for x in (((output["log_probs"] - reference["log_probs"]) * there).abs().max(),
                               (output["loss"] - reference["loss"]).abs(), torch.stack(gradients).max())]


def test_equals_the_authors_model_under_all_switches(reference):
    for fusion in COMBINATIONS:
        assert max(errors(reference, fusion)) < 1e-12, fusion


@pytest.fixture(scope="module")
def small():
    """(settings, model in float64, batch of two chains, the last one padded)."""
    settings = PROGRAM.settings(**SMALL)
    torch.manual_seed(0)
    model = PROGRAM.model(settings.model, settings.fusion).double()
    batch = backbones.Backbones(settings).check_batch()
    return settings, model, {k: x.double() if x.is_floating_point() else x for k, x in batch.items()}


def test_turning_and_moving_changes_nothing(small):
    _, model, batch = small
    turn = torch.linalg.qr(torch.randn(3, 3, dtype=torch.float64))[0]
    turn *= torch.linalg.det(turn).sign()
    moved = dict(batch, X=batch["X"] @ turn + 7)
    assert (model(**moved)["log_probs"] - model(**batch)["log_probs"]).abs().max() < 1e-9
    mirrored = dict(batch, X=-batch["X"])  # a virtual CB tells left from right
    assert (model(**mirrored)["log_probs"] - model(**batch)["log_probs"]).abs().max() > 1e-6


def test_padding_changes_nothing_even_where_neighbours_are_few(small):
    _, model, batch = small
    for keep in (9, 3):  # more and fewer residues than neighbours
        alone = {key: x[:1, :keep] for key, x in batch.items() if key not in ("E_idx", "decoding_order")}
        alone["decoding_order"] = torch.randperm(keep)[None]
        wide = {key: F.pad(x, (0, 0) * (x.dim() - 2) + (0, 7)) for key, x in alone.items()}
        wide["decoding_order"] = torch.cat([alone["decoding_order"], torch.arange(keep, keep + 7)[None]], 1)
        wide["X"][:, keep:] = torch.randn(1, 7, 4, 3, dtype=torch.float64)
        one, other = model(**alone), model(**wide)
        assert (one["log_probs"] - other["log_probs"][:, :keep]).abs().max() < 1e-12
        assert (one["loss"] - other["loss"]).abs() < 1e-12


def test_a_residue_hears_nothing_of_those_decoded_later(small):
    _, model, batch = small
    order, later = batch["decoding_order"][0], 0.0
    for place in (0, 3, 8):
        changed = dict(batch, S=batch["S"].clone())
        changed["S"][0, order[place]] = (changed["S"][0, order[place]] + 1) % 20
        difference = (model(**changed)["log_probs"] - model(**batch)["log_probs"])[0].abs().amax(-1)
        assert difference[order[:place + 1]].max() == 0
        later += difference[order[place + 1:]].max()
    assert later > 1e-6


def test_missing_neighbours_and_unknown_residues_do_not_count(small):
    _, model, batch = small
    changed = {key: x.clone() for key, x in batch.items()}
    gone = batch["mask"][-1] == 0
    changed["X"][-1, gone] += 100.0
    changed["S"][-1, gone] = 3
    first, second = (model.defined(model(**b), batch) for b in (batch, changed))
    assert gone.any() and all(torch.equal(first[key], second[key]) for key in first)
    assert (batch["targets"][:, 1] == -1).all() and (batch["S"][:, 1] == 20).all()


@pytest.mark.slow
def test_a_default_step_has_about_half_the_arithmetic_and_three_fifths_of_the_memory():
    settings = PROGRAM.settings(batch_size=1, seq_len=48)  # as many as neighbours
    batch = PROGRAM.data(settings).batch(0)
    flops, saved = [], []
    for fusion in (PROGRAM.fusion_config.baseline(), settings.fusion):
        flops.append(sum(counts_by_sublayer(PROGRAM, replace(settings, fusion=fusion), False).values()))
        trainer = PROGRAM.trainer(PROGRAM, replace(settings, fusion=fusion), CPU)
        found = saved_activations(trainer.model, [], lambda t=trainer: t.forward(batch)["loss"])
        saved.append(sum(found.values()))
    assert 0.4 < flops[1] / flops[0] <= 0.55 and 0.4 < saved[1] / saved[0] <= 0.65


def test_bytes_and_flops_of_each_part_by_hand():
    """32 residues of 16 channels, 2,048 bytes; 160 edges, 10,240 bytes; two layers of each kind."""
    settings = PROGRAM.settings(**SMALL)
    node, edge, index, atoms = 2048, 10240, 160 * 8, 32 * 48
    cost = PROGRAM.model(settings.model, settings.fusion).costs(settings.training)
    features, encoder, decoder = 31040, 19520, 15104  # bytes of weights
    assert {name: total_bytes(c) for name, c in cost.items()} == dict(
        features=2 * (edge + index + atoms) + 3 * features, W_e=5 * edge + 3 * 1088,
        encoder=2 * (9 * edge + 12 * node + 4 * index + 3 * encoder), decoder_edges=7 * edge,
        decoder=2 * (3 * edge + 18 * node + 2 * index + 3 * decoder))
    flops = counts_by_sublayer(PROGRAM, settings, on_gpu=False)
    of_node, of_edge, dense = 2 * 32 * 16 * 16, 2 * 160 * 16 * 16, 2 * 2 * 32 * 16 * 64
    # twice five products; the first residues are zeros, which want no gradient
    assert flops["encoder"] == 3 * 2 * (5 * of_node + 5 * of_edge + dense) - 2 * of_node
    assert flops["decoder"] == 3 * 2 * (6 * of_node + of_edge + dense)
    assert flops["decoder_edges"] == 3 * 2 * of_edge and flops["W_e"] == 3 * of_edge
    alone = PROGRAM.model(settings.model, settings.fusion.baseline()).costs(settings.training)
    assert total_bytes(alone["decoder_edges"]) == 0


# What it learns from, and which share of it the model recovers


def test_a_batch_by_hand():
    """Graph and order leave padding last; what is unknown or not there is not asked for."""
    tokens, atoms = backbones.backbone(0, 0, 7)
    tokens[2], present = 20, np.arange(7) < np.array([[5], [5], [7]])
    chains = backbones.padded([(tokens, atoms, np.arange(7))] * 3, 7)._replace(present=present)
    batch = backbones.batch_of(np.random.default_rng(0), chains, 4)
    assert batch["targets"][0].tolist() == [*tokens[:2], -1, *tokens[3:5], -1, -1]
    assert batch["mask"].sum(1).tolist() == [5, 5, 7] and not batch["X"][:2, 5:].any()
    assert (batch["decoding_order"][:2, 5:].sort(1).values == torch.tensor([5, 6])).all()
    assert len({tuple(order) for order in batch["decoding_order"].tolist()}) == 3
    assert batch["E_idx"].shape == (3, 7, 4) and (batch["E_idx"][:2, :5] < 5).all()
    ca = atoms[:, 1]
    assert np.array_equal(batch["E_idx"][2], np.linalg.norm(ca[:, None] - ca, axis=-1).argsort(1)[:, :4])


def test_held_out_backbones_are_never_trained_on():
    source = PROGRAM.data(PROGRAM.settings(**SMALL))
    held_out = {batch["X"].numpy().tobytes() for batch in source.evaluation()}
    assert len(held_out) == len(source.held_out) == 16
    for step in range(20):
        assert not held_out & {x.numpy().tobytes() for x in source.batch(step)["X"]}


def test_bucketing_uses_every_chain_once_in_batches_of_like_lengths():
    values = dict(SMALL, seq_len=100, shortest=20)
    plain, alike = ([PROGRAM.data(PROGRAM.settings(**values, enable_bucketing=on)).batch(step)
                     for step in range(backbones.BLOCK)] for on in (False, True))
    lengths = [sorted(batch["mask"].sum(1).tolist()) for batch in alike]
    assert sorted(sum(lengths, [])) == sorted(n for batch in plain for n in batch["mask"].sum(1).tolist())
    assert sum(long - short for short, long in lengths) <= 80 and lengths != sorted(lengths)
    assert [batch["S"].shape[1] for batch in alike] == [backbones.bucket(int(n), 100) for _, n in lengths]
    assert {batch["S"].shape[1] for batch in plain} == {100}
    assert [backbones.bucket(n, 100) for n in (2, 32, 33, 64, 65, 100)] == [32, 32, 64, 64, 100, 100]


def test_a_step_of_each_length_is_captured_once_and_trains_one_model(monkeypatch):
    captured = []

    class Captured:  # as GraphedStep, which needs a GPU
        def __init__(self, run, batch, device):
            self.run, self.shape = run, batch["S"].shape
            captured.append(self.shape)

        def __call__(self, batch):
            assert batch["S"].shape == self.shape
            return self.run(batch)
    monkeypatch.setattr(cuda_graphs, "GraphedStep", Captured)
    settings = PROGRAM.settings(**dict(SMALL, seq_len=64, shortest=20), enable_bucketing=True)
    source, losses = PROGRAM.data(settings), []
    for graphed in (False, True):
        trainer = PROGRAM.trainer(PROGRAM, settings, CPU)
        trainer.use_graph = graphed
        losses.append([trainer.step(source.batch(step)).item() for step in range(12)])
    assert losses[0] == losses[1] and sorted(captured) == [(2, 32), (2, 64)]


def test_real_backbones_are_read_and_held_out_by_name(tmp_path):
    families = require_shared("data", "families")
    settings = PROGRAM.settings(**dict(SMALL, seq_len=48), data=str(families), enable_bucketing=True)
    source = PROGRAM.data(settings)
    assert len(source.names) + len(source.held_out) == 32 and 3 < len(source.held_out) < 15
    assert not {*source.names} & {*source.held_out}
    batch = source.batch(0)
    bonds = (batch["X"][:, :, 1] - batch["X"][:, :, 0]).norm(dim=-1)[batch["mask"] > 0]  # N to CA
    assert (bonds - 1.46).abs().max() < 0.1 and (batch["S"] < 20).float().mean() > 0.9
    assert (batch["residue_idx"].diff() >= 0)[batch["mask"][:, 1:] > 0].all()
    unseen = {batch["S"].numpy().tobytes() for batch in source.evaluation()}
    assert len(unseen) == len(source.others) >= len(source.held_out)
    (tmp_path / "one.pdb").write_bytes(next(families.glob("*.pdb")).read_bytes())
    for place in (tmp_path, tmp_path / "absent"):
        with pytest.raises(UserError, match="--data"):
            PROGRAM.data(settings.having(data=str(place)))


def test_an_evaluation_is_of_every_residue_held_out():
    """By a model that is right of even tokens, with probability 1/2, and else says the next one, with 1/4."""
    class Known(torch.nn.Module):
        def forward(self, S, **batch):
            assert not torch.is_grad_enabled()
            odd = S[..., None] % 2
            return dict(log_probs=torch.where(F.one_hot(S, 21) == 1, -(1 + odd) * math.log(2), torch.where(
                F.one_hot((S + odd[..., 0]) % 21, 21) == 1, 0.0, -9.0)))
    source = PROGRAM.data(PROGRAM.settings(**SMALL))
    tokens = np.concatenate([tokens for tokens, *_ in source.made(backbones.HELD_OUT)])
    even = (tokens % 2 == 0).mean()
    found = source.evaluate(SimpleNamespace(model=Known(), device=CPU), GOING_ON).details
    letter, share = source.constant()
    assert found == dict(recovery=pytest.approx(even), residues=len(tokens), constant=letter,
                         perplexity=pytest.approx(2 ** (2 - even)), constant_recovery=share)
    assert share == pytest.approx((tokens == AMINO_ACIDS.index(letter)).mean())


@pytest.mark.interpreted
@pytest.mark.slow
def test_the_message_kernel_changes_nothing(monkeypatch):
    """Encoder and decoder, forward and all gradients, edges projected together and each by itself."""
    monkeypatch.setattr(mpnn, "runs", lambda edges: True)  # on the CPU, in the interpreter
    plain = PROGRAM.settings(**{**SMALL, "seq_len": 8})
    kernel = plain.having(enable_message_kernel=True)
    batch, found = PROGRAM.data(plain).check_batch(), []
    for settings in (plain, kernel, kernel.having(enable_edge_fusion=False, enable_split_fusion=False)):
        trainer = PROGRAM.trainer(PROGRAM, settings, CPU)
        accuracy.shake(trainer.model)
        found.append(accuracy.results_and_gradients(trainer, batch))
    for name, expected in found[0].items():
        scale = max(expected.abs().max().item(), 1e-2)
        for other in found[1:]:
            assert (other[name] - expected).abs().max() < 2e-5 * scale, name
    assert not torch.equal(found[0]["log_probs"], found[1]["log_probs"])  # another order of sums


@pytest.mark.slow
def test_it_learns():
    small = dict(hidden_dim=32, num_layers=1, batch_size=4)
    settings = PROGRAM.settings(**{**PROGRAM.demo, **small}, device="cpu")
    source, trainer = PROGRAM.data(settings), PROGRAM.trainer(PROGRAM, settings, CPU)
    for step in range(80):
        trainer.step(source.batch(step))
    found = source.evaluate(trainer, GOING_ON).details
    assert found["recovery"] > 3 * found["constant_recovery"]
