"""ProteinMPNN: against the authors' model in float64, its symmetries, what it learns from, designs."""
import itertools
import math
from dataclasses import replace
from types import SimpleNamespace
from unittest import mock

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from fusion_lab.measuring import accuracy
from fusion_lab.measuring.bounds.flops import flops_by_sublayer
from fusion_lab.measuring.counters import saved_activations
from fusion_lab.training import checkpoints
from fusion_lab.training.files import UserError
from fusion_lab.training.program import load_program
from proteins import backbones, designs
from proteins.files import AMINO_ACIDS, DataError
from tests.support import ROOT, require_shared

FILE = ROOT / "companions" / "protein_mpnn.py"
if not FILE.exists():
    pytest.skip("this companion was deleted", allow_module_level=True)
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


def test_every_layer_equals_the_authors(reference):
    model, found = model_of(reference, COMBINATIONS[7]), []
    for layer in (model.features, *model.encoder_layers, *model.decoder_layers):
        layer.register_forward_hook(lambda module, _, output: found.append(output))
    model(**inputs_of(reference), E_idx=reference["features/E_idx"])
    there = reference["input/mask"][:, :, None]
    features, first, second, *decoded = found
    expected = [reference["features/E"]]
    got = [features]
    for i, (h_V, h_E) in enumerate((first, second)):
        got += [h_V, h_E]
        expected += [reference[f"encoder/{i}/h_V"], reference[f"encoder/{i}/h_E"]]
    got, expected = got + decoded, expected + [reference[f"decoder/{i}/h_V"] for i in range(2)]
    assert len(got) == len(expected) == 7
    for mine, theirs in zip(got, expected, strict=True):
        mask = there if mine.dim() == 3 else there[..., None]
        assert ((mine - theirs) * mask).abs().max() < 1e-12


@pytest.mark.parametrize("name, broken", {
    "W3's bias once instead of once a neighbour": (
        "Messages.third_layer", lambda self, summed, graph: self.W3(summed) / mpnn.SCALE),
    "i and j exchanged": ("parts", lambda layer, h_V: [layer.weight.split(
        [h_V.shape[-1], h_V.shape[-1], layer.in_features - 2 * h_V.shape[-1]], 1)[i] for i in (1, 0, 2)]),
    "edges not updated": ("EncLayer.forward", lambda self, h_V, h_E, graph, mask: (self.update(
        h_V, self.message(h_V, h_E, h_V.flatten(0, 1), graph), mask), h_E)),
}.items(), ids=lambda value: value if isinstance(value, str) else "")
def test_mutants_are_caught(reference, name, broken):
    target, function = broken
    owner, _, attribute = target.rpartition(".")
    with mock.patch.object(getattr(mpnn, owner) if owner else mpnn, attribute, function):
        model = model_of(reference, COMBINATIONS[-2])
        difference = model(**inputs_of(reference))["loss"] - reference["loss"]
    assert difference.abs() > 1e-6, name


@pytest.fixture(scope="module")
def small():
    """(settings, model in float64, batch of two chains, the last one padded)."""
    settings = PROGRAM.settings(**SMALL)
    torch.manual_seed(0)
    model = PROGRAM.model(settings.model, settings.fusion).double()
    batch = designs.masked_batch(settings, CPU)
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
    first, second = (designs.defined(model(**b), batch) for b in (batch, changed))
    assert gone.any() and all(torch.equal(first[key], second[key]) for key in first)
    assert (batch["targets"][:, 1] == -1).all() and (batch["S"][:, 1] == 20).all()


@pytest.mark.slow
def test_a_default_step_has_about_half_the_arithmetic_and_three_fifths_of_the_memory():
    settings = PROGRAM.settings(batch_size=1, seq_len=48)  # as many as neighbours
    batch = PROGRAM.open_source(settings).batch(0)
    flops, saved = [], []
    for fusion in (PROGRAM.fusion_config.preset(False), settings.fusion):
        flops.append(sum(flops_by_sublayer(PROGRAM, replace(settings, fusion=fusion)).values()))
        trainer = PROGRAM.trainer(PROGRAM, replace(settings, fusion=fusion), CPU)
        found = saved_activations(trainer.model, [], lambda t=trainer: t.forward(batch)["loss"])
        saved.append(sum(found.values()))
    assert 0.4 < flops[1] / flops[0] <= 0.55 and 0.4 < saved[1] / saved[0] <= 0.65


def test_bounds_are_of_the_arithmetic_that_is_done():
    """By hand, backward twice as much as forward: a decoder layer's W1 works on [own; edge; letter; state] of
    every edge, then W2, W3. With edges projected for all layers at once, W1's share of it moves there."""
    rows, D = 2 * 16 * 5, 16
    plain = PROGRAM.settings(**SMALL).having(
        enable_split_fusion=False, enable_aggregate_fusion=False, enable_edge_fusion=False)
    found = flops_by_sublayer(PROGRAM, plain)
    layers = 3 * PROGRAM.blocks(plain)
    products, dense = 2 * rows * D * D, 2 * 2 * 16 * 8 * D * D
    assert (found["decoder_edges"], found["decoder"]) == (0, layers * (6 * products + dense))
    edges = flops_by_sublayer(PROGRAM, plain.having(enable_edge_fusion=True))
    assert (edges["decoder_edges"], edges["decoder"]) == (layers * products, layers * (5 * products + dense))
    compiled = plain.having(enable_torch_compile=True, activation_memory_budget=0.5)
    assert flops_by_sublayer(PROGRAM, compiled) == found


def test_buckets_pad_less_and_change_nothing(tmp_path):
    write_chains(tmp_path, {"A": 20, "B": 70, "C": 30})
    settings = PROGRAM.settings(**{**SMALL, "seq_len": 80, "batch_size": 1}, data=str(tmp_path))
    source = PROGRAM.open_source(settings)
    batches = [source.batch(step) for step in range(8)]
    assert {batch["S"].shape[1] for batch in batches} == {64, 80}
    losses = {}
    for on in (False, True):
        trainer = PROGRAM.trainer(PROGRAM, settings.having(enable_bucketing=on), CPU)
        losses[on] = [trainer.step(batch).item() for batch in batches[:3]]
        assert trainer.padded(batches[0])["S"].shape[1] == (80 if not on else batches[0]["S"].shape[1])
        assert set(trainer.graphs) == ({80} if not on else {b["S"].shape[1] for b in batches[:3]})
    assert losses[True] == pytest.approx(losses[False], rel=1e-5)


NAMES = "ALA CYS ASP GLU PHE GLY HIS ILE LYS LEU MET ASN PRO GLN ARG SER THR VAL TRP TYR".split()


def write_chains(directory, lengths):
    """PDB files of built-in backbones, named by their keys."""
    for number, (name, length) in enumerate(lengths.items()):
        b, lines, serial = backbones.built_in(1, number, length), [], 0
        for i, atoms in enumerate(b.atoms):
            for atom, (x, y, z) in zip(("N", "CA", "C", "O"), atoms, strict=True):
                serial += 1
                lines.append(f"ATOM  {serial:5d}  {atom:<3s} {NAMES[b.tokens[i]]} A{i + 1:4d}    "
                             f"{x:8.3f}{y:8.3f}{z:8.3f}  1.00  0.00           {atom[0]}")
        (directory / f"{name}.pdb").write_text("\n".join([*lines, "END", ""]))


def test_a_backbone_is_read_as_it_was_written(tmp_path):
    write_chains(tmp_path, {"A": 12})
    [read], made = backbones.load_backbones(tmp_path), backbones.built_in(1, 0, 12)
    assert read.name == "A" and (read.tokens == made.tokens).all()
    assert np.abs(read.atoms - made.atoms).max() < 1e-3
    assert read.labels[:2] == ("A1", "A2") and (read.positions == np.arange(12)).all()
    assert backbones.fixed_residues(read, "A2-3,A12").nonzero()[0].tolist() == [1, 2, 11]
    for wrong in ("B1", "A3-2", "A13", "x"):
        with pytest.raises(DataError, match="no such residues"):
            backbones.fixed_residues(read, wrong)
    letters = "".join(AMINO_ACIDS[token] for token in made.tokens)
    read.chains[4:] = 1
    assert backbones.fasta("t", read, read.tokens) == f">t\n{letters[:4]}/{letters[4:]}"


def test_residues_without_a_whole_backbone_are_left_out(tmp_path):
    write_chains(tmp_path, {"A": 12})
    path = tmp_path / "A.pdb"
    lines = [line for line in path.read_text().splitlines() if not line.startswith("ATOM     17 ")]  # N of 5
    path.write_text("\n".join(lines))
    read = backbones.read_backbone(path)
    assert len(read) == 11 and read.labels[4] == "A6" and read.positions[4] == 5


def test_a_missing_oxygen_is_put_where_it_was(families_dir):
    whole = backbones.read_backbone(families_dir / "1UCS_A.pdb").atoms
    without = whole.copy()
    without[3:9, 3] = np.nan
    placed = backbones.with_oxygen(without)
    assert np.linalg.norm(placed - whole, axis=2).max() < 0.15  # Å
    without[5, :] = np.nan  # then there is no bond to it
    assert np.isnan(backbones.with_oxygen(without)[4, 3]).all() and np.isnan(without[6, 3]).all()


def test_held_out_families_are_never_trained_on(families_dir, tmp_path):
    some = ("1CTF_A", "1GUU_A", "1PTF_A", "1TEN_A", "1UCS_A")
    for file in (file for name in some for file in families_dir.glob(f"{name}.*")):
        (tmp_path / file.name).symlink_to(file)
    settings = PROGRAM.settings(data=str(tmp_path), holdout="1PTF_A,1TEN_A", batch_size=4, neighbors=8)
    source = PROGRAM.open_source(settings)
    names = [name for name, _ in source.evaluation()["held_out"]]
    assert names == ["1PTF_A", "1TEN_A"] == sorted(source.held_out) and len(source.names) == 3
    hidden = {b.atoms[:4].tobytes() for b in source.unseen}
    plain = settings.having(backbone_noise=0.0)
    source.training = plain.training
    for step in range(10):
        assert not hidden & {x[:4].numpy().tobytes() for x in source.batch(step)["X"]}
    assert min(len(b.rows) for b in source.trained) > 100  # sequences of the alignment are targets too
    first = source.batch(5)
    assert all(torch.equal(first[key], x) for key, x in source.batch(5).items())


def test_the_same_backbones_in_other_settings(tmp_path):
    write_chains(tmp_path, {name: 20 for name in "ABCD"})
    settings = PROGRAM.settings(data=str(tmp_path), holdout="B", batch_size=3, neighbors=8, seq_len=24,
                                backbone_noise=0.0)
    source = PROGRAM.open_source(settings)
    exact = {b.atoms[:4].astype(np.float32).tobytes() for b in source.trained}
    other = source.under(settings.having(neighbors=5, backbone_noise=0.5, batch_size=2))
    here, there = source.batch(0), other.batch(0)
    assert here["E_idx"].shape == (3, 24, 8) and there["E_idx"].shape == (2, 24, 5)
    found = [{x[:4].numpy().tobytes() for x in batch["X"]} for batch in (here, there)]
    assert found[0] <= exact and not found[1] & exact
    assert other.trained is source.trained and other.held_out == {"B"}


def test_settings_of_the_recovery_protocol_are_those_that_run(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import mpnn_recovery
    write_chains(tmp_path, {name: 20 for name in "ABCD"})
    base = PROGRAM.settings(**{**SMALL, "data": str(tmp_path), "holdout": "B", "seq_len": 24})
    source = PROGRAM.open_source(base)
    made = base.having(backbone_noise=0.4, neighbors=3, num_steps=2)
    trainer, own = mpnn_recovery.trained(PROGRAM, made, torch.device("cpu"), source)
    assert (own.training.backbone_noise, own.config.neighbors, trainer.step_number) == (0.4, 3, 2)
    assert (source.training.backbone_noise, source.config.neighbors) != (0.4, 3)


def test_recovery_and_yardsticks_by_hand():
    log_probs = torch.tensor([[[0.5, 0.3, 0.2], [0.1, 0.8, 0.1], [0.2, 0.2, 0.6]]]).log()
    found = designs.recovery(log_probs, torch.tensor([[0, 2, -1]]))
    assert found == dict(recovery=0.5, nll=pytest.approx(-(math.log(0.5) + math.log(0.1)) / 2), residues=2)
    both = dict(a=dict(recovery=1.0, nll=1.0, residues=1), b=dict(recovery=0.0, nll=2.0, residues=3))
    assert designs.pooled(both) == (0.25, pytest.approx(math.exp(1.75)), 4)
    assert designs.evaluation_line(dict(training={}, held_out=both, yardsticks=None)) == (
        "Sequences: held-out recovery 0.250 perplexity 5.75 (2 proteins, 4 residues)")
    source = PROGRAM.open_source(PROGRAM.settings(**SMALL))
    for b, tokens in (*((b, [1] * 3) for b in source.trained), *((b, [1, 2]) for b in source.unseen)):
        b.tokens = np.array(tokens)
    share = 49 / 68  # 16 times three residues, and one for every kind
    assert source.yardsticks() == dict(constant="C", recovery=0.5, perplexity=pytest.approx(
        (share / 68) ** -0.5))


def test_one_letter_after_the_other_is_what_the_whole_model_says(small):
    """At a low temperature every sampled residue is the whole model's choice, given those before it."""
    settings, model, batch = small
    fixed = torch.zeros(16, dtype=torch.bool)
    fixed[[2, 7]] = True
    order = (torch.rand(2, 16) - fixed.float()).argsort(1)
    inputs = {key: batch[key] for key in ("X", "S", "mask", "residue_idx", "chain")}
    drawn = model.sample(**inputs, decoding_order=order, fixed=fixed, temperature=1e-4,
                         generator=torch.Generator().manual_seed(0))
    log_probs = model(**{**inputs, "S": drawn}, decoding_order=order)["log_probs"][..., :20]
    there = batch["mask"].bool() & ~fixed
    assert torch.equal(log_probs.argmax(-1)[there], drawn[there])
    assert torch.equal(drawn[:, fixed], batch["S"][:, fixed])


class Known(torch.nn.Module):
    """A model that samples and says what it is told to."""

    def __init__(self, drawn, log_probs):
        super().__init__()
        self.drawn, self.log_probs, self.given = drawn, log_probs, None

    def sample(self, **given):
        self.given = given
        return self.drawn

    def forward(self, **batch):
        assert self.drawn is None or torch.equal(batch["S"], self.drawn)
        return dict(log_probs=self.log_probs(batch["S"]))


@pytest.mark.parametrize("fixed, free", [("A1-3", 9), (None, 12), ("A1-12", 0)])
def test_designs_by_hand(fixed, free, tmp_path, monkeypatch, capsys):
    """Two samples, of which the second differs from the native sequence in its last three residues. Letters
    that are not fixed have probability 1/2, fixed ones 1/8."""
    write_chains(tmp_path, {"A": 12})
    native = torch.from_numpy(backbones.built_in(1, 0, 12).tokens).long()
    drawn = native.repeat(2, 1)
    drawn[1, -3:] = (drawn[1, -3:] + 1) % 20
    share = torch.where(torch.arange(12) < 12 - free, 0.125, 0.5)
    model = Known(drawn, lambda S: share.log()[None, :, None] * F.one_hot(S, 21))
    monkeypatch.setattr(designs, "load_weights", lambda *given: loaded.append(given))
    loaded, program = [], replace(PROGRAM, model=lambda config, fusion: model)
    settings = PROGRAM.settings(**SMALL, design=str(tmp_path / "A.pdb"), weights="w.pt", samples=2,
                                fixed=fixed, temperature=0.5, device="cpu")
    assert designs.design(PROGRAM, PROGRAM.settings(**SMALL)) is None
    assert designs.design(program, settings) == 0 and loaded == [(model, "w.pt")]
    lines = capsys.readouterr().out.splitlines()
    score = f"{math.log(2) if free else math.nan:.4f}"
    recoveries = [f"{right / free if free else math.nan:.3f}" for right in (free, free - 3)]
    assert lines[::2] == [f">A native, 12 residues, {12 - free} fixed", *(
        f">A sample {i}, T 0.5, score {score}, recovery {recovery}"
        for i, recovery in enumerate(recoveries, 1))]
    assert lines[1::2] == ["".join(AMINO_ACIDS[token] for token in tokens) for tokens in (native, *drawn)]
    given = model.given
    assert given["temperature"] == 0.5 and given["fixed"].tolist() == [i < 12 - free for i in range(12)]
    order = given["decoding_order"]
    assert (order[:, :12 - free].sort(1).values == torch.arange(12 - free)).all()  # what is fixed comes first
    assert (order.sort(1).values == torch.arange(12)).all() and (free < 2 or not torch.equal(*order))
    assert given.keys() == {"X", "S", "mask", "residue_idx", "chain", "decoding_order", "fixed",
                            "temperature", "generator"} and torch.equal(given["S"], native.repeat(2, 1))


def test_design_from_published_weights(tmp_path, capsys):
    write_chains(tmp_path, {"A": 12})
    settings = PROGRAM.settings(**SMALL)
    model = PROGRAM.model(settings.model, settings.fusion)
    torch.save(dict(model_state_dict=model.state_dict(), num_edges=5), tmp_path / "w.pt")
    command = ["--design", tmp_path / "A.pdb", "--weights", tmp_path / "w.pt", "--samples", 2, "--fixed",
               "A1-3", "--device", "cpu"]
    sizes = ["--hidden-dim", 16, "--num-layers", 2, "--neighbors", 5]
    assert mpnn.main([*map(str, command + sizes)], program=PROGRAM) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 6 and len({line[:3] for line in lines[1::2]}) == 1
    assert mpnn.main([*map(str, command)], program=PROGRAM) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and "another model" in said


def test_an_evaluation_is_of_every_residue_of_whole_proteins(capsys):
    """By a model that is right of even tokens, with probability 1/2, and else says the next one, with 1/4."""
    def log_probs(S):
        odd = S[..., None] % 2
        return torch.where(F.one_hot(S, 21) == 1, -(1 + odd) * math.log(2),
                           torch.where(F.one_hot((S + odd[..., 0]) % 21, 21) == 1, 0.0, -9.0))
    source, model = PROGRAM.open_source(PROGRAM.settings(**SMALL)), Known(None, log_probs)
    trainer = SimpleNamespace(model=model, device=CPU, step_number=7)
    found = designs.evaluate(trainer, source)
    assert {group: len(found[group]) for group in ("training", "held_out")} == dict(training=8, held_out=16)
    assert found["yardsticks"] == source.yardsticks()
    b = source.unseen[3]
    even = (b.tokens % 2 == 0).sum()
    expected = dict(recovery=even / len(b), residues=len(b),
                    nll=(even * math.log(2) + (len(b) - even) * math.log(4)) / len(b))
    assert found["held_out"][b.name] == pytest.approx(expected)
    stopped = designs.evaluate(trainer, source, SimpleNamespace(signal=2))
    assert stopped["training"] == stopped["held_out"] == {}
    one = dict(a=dict(recovery=0.5, nll=1.0, residues=4))
    yardsticks = dict(constant="L", recovery=0.25, perplexity=17.5)
    assert designs.scores(dict(training=one, held_out={})) == {
        "training recovery": 0.5, "training perplexity": pytest.approx(math.e)}
    assert {*designs.scores(dict(training={}, held_out=one))} == {"held-out recovery", "held-out perplexity"}
    for real, best in ((False, f", {100 * designs.BEST_RECOVERY:.0f}% could be"), (True, "")):
        final = dict(held_out=one, yardsticks=yardsticks)
        designs.closing(trainer, SimpleNamespace(real=real), dict(final=final))
        assert capsys.readouterr().out == (
            "In words: after step 7 it names 50% of 4 residues of 1 protein it never saw, by backbone and "
            f"residues before; always L would be 25%{best}.\n")
    for nothing in ({}, dict(final=dict(held_out={}))):
        designs.closing(trainer, source, nothing)
    assert capsys.readouterr().out == ""


def test_samples_by_hand():
    """Some residues of five; the graph and the order leave padding last."""
    b = backbones.built_in(0, 0, 5)
    X, S, mask, positions, chains = designs.sample_of(b, b.tokens, 3, 1)
    assert np.array_equal(X, b.atoms[1:4]) and np.array_equal(S, b.tokens[1:4]) and mask.tolist() == [1, 1, 1]
    assert positions.tolist() == [1, 2, 3] and chains.tolist() == [0, 0, 0]
    short = designs.sample_of(b, b.tokens, 7)
    assert [len(array) for array in short] == [7] * 5 and short[2].tolist() == [1] * 5 + [0, 0]
    tokens = np.where(np.arange(5) == 2, 20, b.tokens)
    batch = designs.assemble([designs.sample_of(b, tokens, 7)] * 3, np.random.default_rng(0), 4)
    assert batch["targets"][0].tolist() == [*tokens[:2], -1, *tokens[3:], -1, -1]
    assert (batch["decoding_order"][:, 5:].sort(1).values == torch.tensor([5, 6])).all()
    assert len({tuple(order) for order in batch["decoding_order"].tolist()}) == 3
    assert batch["E_idx"].shape == (3, 7, 4) and (batch["E_idx"][:, :5] < 5).all()
    assert (batch["E_idx"][:, :5, 0] == torch.arange(5)).all()
    ca = b.atoms[:, 1]
    apart = np.linalg.norm(ca[:, None] - ca, axis=-1).argsort(1)[:, :4]
    assert np.array_equal(batch["E_idx"][0, :5], apart)


def test_designs_come_as_fasta_and_not_as_json(capsys):
    flags = ["--design", "x.pdb", "--weights", "x.pt"]
    with pytest.raises(SystemExit) as ended:
        mpnn.main([*flags, "--json"], program=PROGRAM)
    said = capsys.readouterr()
    assert ended.value.code == 2 and said.out == "" and said.err.count("\n") == 1
    assert "argument --json: not with --design, which prints" in said.err
    for others in (["--json"], flags):  # each by itself is taken
        assert mpnn.main([*others, "--check-flags"], program=PROGRAM) == 0


def test_weights_that_cannot_be_used_are_one_line(tmp_path):
    model = PROGRAM.model(PROGRAM.settings(**SMALL).model, PROGRAM.fusion_config())
    torch.save(dict(model=[1, 2]), tmp_path / "within")
    for name, words in (("absent", "No such file"), ("within", "another model")):
        with pytest.raises(UserError, match=words):
            designs.load_weights(model, tmp_path / name)


def test_averaged_weights_are_those_to_design_with(tmp_path):
    settings = PROGRAM.settings(**SMALL, ema_decay=0.5)
    trainer = PROGRAM.trainer(PROGRAM, settings, CPU)
    trainer.step(PROGRAM.check_batch(settings, CPU))
    trainer.step(PROGRAM.check_batch(settings, CPU))
    checkpoints.save(trainer, tmp_path / "run.pt")
    loaded = PROGRAM.model(settings.model, settings.fusion)
    designs.load_weights(loaded, tmp_path / "run.pt")
    with trainer.averaged():
        expected = {name: p.clone() for name, p in trainer.model.state_dict().items()}
    assert all(torch.equal(expected[name], p) for name, p in loaded.state_dict().items())
    assert not torch.equal(expected["W_e.weight"], trainer.model.W_e.weight)
    other = PROGRAM.model(settings.having(neighbors=7, dropout=0.2, seq_len=99).model, settings.fusion)
    with pytest.raises(UserError, match="for another model; to use it, pass --neighbors 5$"):  # in no shape
        designs.load_weights(other, tmp_path / "run.pt")


@pytest.mark.interpreted
@pytest.mark.slow
def test_the_message_kernel_changes_nothing(monkeypatch):
    """Encoder and decoder, forward and all gradients, edges projected together and each by itself."""
    kernels = pytest.importorskip("companions.kernels.dispatch", reason="this companion was deleted")
    monkeypatch.setattr(kernels, "hears", lambda edges: True)  # on the CPU, in the interpreter
    plain = PROGRAM.settings(**{**SMALL, "seq_len": 8})
    kernel = plain.having(enable_message_kernel=True)
    batch, found = PROGRAM.check_batch(plain, CPU), []
    for settings in (plain, kernel, kernel.having(enable_edge_fusion=False, enable_split_fusion=False)):
        trainer = PROGRAM.trainer(PROGRAM, settings, CPU)
        accuracy.shake(PROGRAM, trainer.model)
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
    source, trainer = PROGRAM.open_source(settings), PROGRAM.trainer(PROGRAM, settings, CPU)
    for step in range(80):
        trainer.step(source.batch(step))
    found = designs.evaluate(trainer, source)
    assert designs.pooled(found["held_out"])[0] > 3 * found["yardsticks"]["recovery"]
