"""Batches and synthetic proteins against cases worked out by hand: what is drawn, cropped, padded, masked."""
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from fusion_lab.training.errors import UserError
from tests.support import GOING_ON
from tests.tiny import settings_of, trainer_of
from tiny_openfold.proteins import batches, contacts, structure_metrics
from tiny_openfold.proteins.files import GAP, MASK, Protein
from tiny_openfold.proteins.synthetic import match_contacts, synthetic_proteins

# --- Corruption and targets ----------------------------------------------------------------------------

def test_corruption_has_the_shares_of_the_paper():
    """Of 15% of the positions 70% are masked, 10% have another row's letter, 10% any, 10% their own. The
    third row is missing: it is neither drawn from nor asked for."""
    msa = np.repeat(np.array([[[0], [1], [9]]]), 40_000, axis=2)
    msa[0, 0, :100] = MASK
    rest = np.zeros((1, 40_000, 3)), np.ones((1, 40_000)), np.ones((1, 40_000)), np.array([[1.0, 1, 0]])
    batch = batches.assemble(np.random.default_rng(0), msa, *rest)
    found, targets = batch["msa_tokens"][0].numpy(), batch["msa_targets"][0].numpy()
    assert (targets[2] == -100).all() and (targets[0, :100] == -100).all()
    asked = targets != -100
    assert (found == msa[0])[:2][~asked[:2]].all() and (targets == msa[0])[asked].all()
    assert asked[:2].mean() == pytest.approx(0.15, abs=0.005)
    first = found[0][asked[0]]  # whose own letter is 0, and that of the other row 1
    shares = [(first == token).mean() for token in (MASK, 0, 1, 5, 9)]
    assert shares == pytest.approx([0.7, 0.155, 0.055, 0.005, 0.005], abs=0.02)
    assert batch["target_tokens"][0, 100:].tolist() == [0] * 39_900
    clean = batches.assemble(None, msa, *rest, clean=True)
    assert np.array_equal(clean["msa_tokens"], msa) and "msa_targets" not in clean


# --- Synthetic batches ---------------------------------------------------------------------------------

def test_synthetic_batches_are_proteins_from_16_on():
    source = batches.SyntheticProteins(settings_of(seed=5))
    for step, numbers in ((0, [16, 17]), (3, [22, 23])):
        msa, coords = synthetic_proteins(5, numbers, 4, 8)
        corrupted, targets = batches.corrupt(np.random.default_rng((5, step, 1)), msa)
        batch = source.batch(step)
        expected = dict(coords=coords, msa_tokens=corrupted, msa_targets=targets, target_tokens=msa[:, 0],
                        coord_mask=np.ones((2, 8), np.float32))
        assert batch.keys() == expected.keys()
        assert all(np.array_equal(batch[key], expected[key]) for key in batch)
    held_out = list(source.evaluation()["held_out"])
    assert [protein.name for protein, _ in held_out] == source.held_out
    assert source.held_out == [f"synthetic-{i}" for i in range(16)]
    assert np.array_equal(held_out[15][1]["msa_tokens"], synthetic_proteins(5, [15], 4, 8)[0])


def test_partners_are_as_far_apart_as_contacts_that_count():
    """Of two chains without other contacts, residues 0 and 6 meet in the first, 0 and 5 in the second."""
    coords = np.tile(100.0 * np.arange(8)[:, None], (2, 1, 3))
    coords[0, 6], coords[1, 5] = coords[0, 0], coords[1, 0]
    partner = match_contacts(coords, np.ones((2, 8, 8)))
    assert partner.tolist() == [[6, 1, 2, 3, 4, 5, 0, 7], [*range(8)]]


def test_masked_batch_lacks_the_last_quarter_of_the_last_sample():
    settings = settings_of(num_seqs=9, seq_len=8)
    plain = batches.SyntheticProteins(settings).batch(0)
    batch = batches.open_source(settings).check_batch()
    assert batch["seq_mask"].tolist() == [8 * [1], 6 * [1] + 2 * [0]] == batch["coord_mask"].tolist()
    assert batch["row_mask"].tolist() == [9 * [1], 7 * [1] + 2 * [0]]
    assert (batch["msa_targets"][1, 7:] == -100).all() and (batch["msa_targets"][1, :, 6:] == -100).all()
    assert torch.equal(batch["msa_targets"][0], plain["msa_targets"][0])
    assert torch.equal(batch["msa_targets"][1, :7, :6], plain["msa_targets"][1, :7, :6])
    assert (batch["msa_targets"] >= 0).any() and torch.equal(batch["msa_tokens"], plain["msa_tokens"])


# --- Real batches --------------------------------------------------------------------------------------

def family(name="f", rows=3, length=20, unseen=()):
    """Row r, residue s holds token (r + s) % 20; residue s stands at (s, 10 s, 0)."""
    place = np.arange(length)
    coords = np.stack([place, 10 * place, 0 * place], 1).astype(np.float32)
    coords[list(unseen)] = np.nan
    return SimpleNamespace(name=name, msa=((np.arange(rows)[:, None] + place) % 20).astype(np.uint8),
                           coords=coords, length=length, sequence="A" * length)


def real(families=(), unseen=(), **values):
    source = object.__new__(batches.RealProteins)  # without files
    source.config = settings_of(**values).model
    source.training = settings_of(**values).training
    source.families, source.unseen, source.validation = list(families), list(unseen), []
    source.extra, source.world = 0, None
    return source


def test_crops_hold_a_residue_with_coordinates_and_reach_both_ends():
    protein, starts = family(rows=6, unseen=[*range(9), 12]), set()
    for seed in range(200):
        rng = np.random.default_rng(seed)
        msa, coords, seen, seq_mask, row_mask = real().take(rng, protein, 8, 4).values()
        start, rows = int(msa[0, 0]), (msa[:, 0] - msa[0, 0]) % 20
        starts.add(start)
        assert rows[0] == 0 and len({*rows}) == 4  # the query comes first and once
        assert msa.tolist() == [[(row + s) % 20 for s in range(start, start + 8)] for row in rows]
        located = [s > 8 and s != 12 for s in range(start, start + 8)]
        assert seen.tolist() == located and any(located)
        assert coords[:, 1].tolist() == [10 * s * there for s, there in zip(
            range(start, start + 8), located, strict=True)]  # at the origin: absent
        assert seq_mask.all() and row_mask.all()
    assert {min(starts), max(starts)} == {2, 12}


def test_padding_is_marked_and_extra_rows_hold_the_others():
    protein = family(rows=4, length=5, unseen=[1])
    sample = real().take(np.random.default_rng(0), protein, 7, 6, 5)
    assert (sample["msa"][4:] == GAP).all() and (sample["msa"][:, 5:] == GAP).all()
    assert sorted(sample["msa"][:4, :5].tolist()) == protein.msa.tolist() and sample["msa"][0, 0] == 0
    assert sample["coords"][:, 1].tolist() == [0, 0, 20, 30, 40, 0, 0]
    assert sample["coord_mask"].tolist() == [1, 0, 1, 1, 1, 0, 0]
    assert sample["seq_mask"].tolist() == [1] * 5 + [0] * 2
    assert sample["row_mask"].tolist() == [1] * 4 + [0] * 2
    assert sample["extra"].tolist() == sample["msa"][:5].tolist()


def test_every_step_draws_other_families_crops_and_rows():
    source = real([family(f"f{i}", rows=9, length=30 + i) for i in range(3)], batch_size=3, seed=7)
    steps = [source.batch(step) for step in range(4)]
    for key in ("msa_tokens", "coords", "msa_targets"):
        assert not torch.equal(steps[0][key], steps[1][key])
    assert all(torch.equal(steps[2][key], source.batch(2)[key]) for key in steps[2])
    assert not torch.equal(real(source.families, batch_size=3, seed=8).batch(0)["coords"], steps[0]["coords"])
    assert steps[0]["msa_tokens"].shape == (3, 4, 8) and steps[0]["coords"].shape == (3, 8, 3)
    source.extra = 6  # of a model that reads them
    assert source.batch(0)["extra_msa"].shape == (3, 6, 8) and "extra_msa" not in steps[0]


def test_evaluation_of_real_proteins_is_whole_clean_and_always_the_same():
    families = [family("a", rows=9, length=30), family("b", rows=2)]
    unseen = [family("c", rows=9, unseen=[3])]
    for eval_seqs, expected in ((None, [4, 2, 4]), (6, [6, 2, 6])):
        source = real(families, unseen, eval_seqs=eval_seqs, seed=7)
        groups = [[(key, protein.name, batch) for protein, batch in group]
                  for key, group in source.evaluation().items()]
        found = [entry for group in groups for entry in group]
        assert [entry[:2] for entry in found] == [("training", "a"), ("training", "b"), ("held_out", "c")]
        assert [batch["msa_tokens"].shape for *_, batch in found] == [
            (1, rows, length) for rows, length in zip(expected, (30, 20, 20), strict=True)]
        again = [batch for group in source.evaluation().values() for _, batch in group]
        for (*_, batch), other in zip(found, again, strict=True):
            assert all(torch.equal(batch[key], other[key]) for key in batch) and "msa_targets" not in batch
            assert not (batch["msa_tokens"] == MASK).any()
        assert found[2][2]["coord_mask"][0].tolist() == [s != 3 for s in range(20)]


def test_an_evaluation_has_the_families_for_validation_and_as_many_of_training(monkeypatch):
    """At least FEW of these; where none validate, all."""
    monkeypatch.setattr(batches, "FEW", 2)
    source = real([family(f"t{i}") for i in range(6)], [family("u")])

    def names():
        return {key: [protein.name for protein, _ in group] for key, group in source.evaluation().items()}
    assert names() == dict(training=[f"t{i}" for i in range(6)], held_out=["u"])
    for validating in (1, 3):
        source.validation = [family(f"v{i}") for i in range(validating)]
        assert names() == dict(training=[f"t{i}" for i in range(validating + 1)],
                               validation=[f"v{i}" for i in range(validating)], held_out=["u"])


def test_held_out_families_are_named_or_a_share_of_them_rounded_up():
    names = [f"f{i}" for i in range(10)]

    def held_out(names=names, **values):
        return batches.held_out_of(names, settings_of(data="x", **values).training)
    assert held_out(holdout="f3,f7") == {"f3", "f7"} and held_out() == set()
    assert held_out(holdout_fraction=0.2, seed=1) == {"f5", "f8"}  # a seed's choice stands, for --resume
    assert held_out(holdout_fraction=0.21, seed=1) == {"f5", "f6", "f8"}
    assert held_out(holdout_fraction=0.2, seed=2) != {"f5", "f8"}
    for holdout, words in (("f3,g", "--holdout g: no such family in x; there are f0, .*f7, ..."),
                           (",".join(names), "every family is held out")):
        with pytest.raises(UserError, match=words):
            held_out(holdout=holdout)


def test_the_seed_draws_the_families_for_validation(monkeypatch):
    families = [Protein(f"f{i}", np.zeros((3, 16), np.uint8), np.zeros((16, 3), np.float32))
                for i in range(12)]
    monkeypatch.setattr(batches.files, "load_families", lambda path: (families, []))

    def source_of(**values):
        return batches.RealProteins(settings_of(data="x", validate_fraction=0.25, **values))
    drawn = {tuple(family.name for family in source_of(seed=seed).validation) for seed in range(8)}
    assert len(drawn) > 4 and all(len(names) == 3 for names in drawn)
    assert tuple(family.name for family in source_of(seed=3).validation) in drawn
    source = source_of(holdout_fraction=0.2, seed=3)
    uses = [[family.name for family in each] for each in (source.families, source.validation, source.unseen)]
    assert all(uses) and sorted(sum(uses, [])) == sorted(source.by_name)  # each family has one
    assert (source.names, source.choosing) == (uses[0], {*uses[1]})  # which a model's file will say


def test_few_coordinates_are_one_warning_and_next_to_none_are_refused(capsys, monkeypatch):
    families = [Protein(name, np.zeros((3, 20), np.uint8), np.full((20, 3), np.nan, np.float32))
                for name in ("a", "bare", "c")]
    for family, known in zip(families, (20, 2, 9), strict=True):
        family.coords[:known] = 1
    batches.require_coordinates(families[:1], 0.1)
    assert capsys.readouterr().err == ""
    batches.require_coordinates(families, 0.1)
    warning = capsys.readouterr().err
    assert warning.count("\n") == 1 and "bare (2 of 20 residues), c (9 of 20 residues)" in warning
    monkeypatch.setattr(batches.files, "load_families", lambda path: (families, []))
    with pytest.raises(UserError, match=r"bare \(2 of 20 residues\).*--min-coordinates 0.2"):
        batches.open_source(settings_of(data="x", min_coordinates=0.2))
    assert "31 of 60 residues" in batches.open_source(settings_of(data="x", holdout="c")).describe()


# --- Evaluation ----------------------------------------------------------------------------------------

def test_evaluation_turns_dropout_off_and_on_again():
    trainer = trainer_of(dropout=0.5)
    source, modes = batches.SyntheticProteins(trainer.settings), []
    trainer.model.register_forward_pre_hook(
        lambda model, _: modes.append((model.training, torch.is_grad_enabled())))
    found = source.evaluate(trainer, GOING_ON).details
    assert trainer.model.training and set(modes) == {(False, False)} and len(modes) == 32
    assert [len(group) for group in found.values()] == [16, 16]
    trainer.model.eval()
    source.evaluate(trainer, GOING_ON)
    assert not trainer.model.training
    stopped = source.evaluate(trainer, SimpleNamespace(signal=2))
    assert stopped.details == dict(training={}, held_out={}) and stopped.score is None


def test_precision_counts_the_surest_pairs_below_8_angstrom():
    """Residues i and 6 + i stand 7.9 Å apart, 5 and 11 exactly 8; of the 21 pairs that count, five touch."""
    coords = torch.zeros(12, 3)
    coords[:, 0] = 1000 * (torch.arange(12) % 6)
    coords[6:, 1] = torch.tensor(5 * [7.9] + [8.0])
    probability = torch.zeros(12, 12)
    for rank, pair in enumerate([(0, 6), (1, 7), (5, 11), (0, 7), (0, 8), (2, 8), (3, 9), (0, 9), (0, 10),
                                 (0, 11), (1, 8), (1, 9), (4, 10)]):
        probability[pair] = 1 - 0.05 * rank
    probability[0, 5], probability[7, 1] = 2, 2  # too near along the chain; the other way round
    found = contacts.contact_precision(probability, coords, torch.ones(12))
    assert found == dict(p_l2=pytest.approx(3 / 6), p_l=pytest.approx(4 / 12), chance=pytest.approx(5 / 21))
    mask = torch.ones(12)
    mask[5] = 0  # 11 residues, 20 pairs: the first five are (0, 6), (1, 7), (0, 7), (0, 8) and (2, 8)
    found = contacts.contact_precision(probability, coords, mask)
    assert found == dict(p_l2=pytest.approx(3 / 5), p_l=pytest.approx(4 / 11), chance=pytest.approx(5 / 20))
    assert [contacts.half_length(torch.ones(size)) for size in (1, 2, 3, 4, 5)] == [1, 1, 1, 2, 2]


def test_lddt_of_distances_is_that_of_a_structure_with_these_distances():
    generator = torch.Generator().manual_seed(1)
    coords = 6 * torch.randn(2, 40, 3, generator=generator, dtype=torch.float64)
    true, model, seen = coords[0], coords[0] + 0.2 * coords[1], torch.arange(40) % 7 != 3
    found = contacts.distance_lddt(torch.cdist(model, model), true, seen.float())
    by_structures = structure_metrics.lddt(model[seen].numpy(), true[seen].numpy())
    assert found == pytest.approx(np.nanmean(by_structures), abs=1e-6) and 0.2 < found < 0.9
    assert contacts.distance_lddt(torch.cdist(true, true), true, seen.float()) == 1.0
    assert contacts.distance_lddt(torch.zeros(40, 40), 1e3 * true, seen.float()) == 0.0  # nothing is near


