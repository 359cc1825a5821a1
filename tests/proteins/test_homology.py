"""Families that are related are found by alignment, and others are not."""
import dataclasses
import itertools
from types import SimpleNamespace

import numpy as np
import pytest

from proteins import files, homology
from proteins.files import AMINO_ACIDS, GAP, UNKNOWN, Protein
from proteins.homology import EXTEND, OPEN, UNIT, blosum62, clusters, e_values, fitted, local_scores, profile
from tests.support import require_shared


def tokens(letters):
    return np.array([AMINO_ACIDS.index(letter) for letter in letters], np.uint8)


def test_the_table_is_blosum62():
    table = blosum62()
    score = {a + b: table[i, j] for i, a in enumerate(AMINO_ACIDS) for j, b in enumerate(AMINO_ACIDS)}
    assert [score[pair] for pair in ("WW", "CC", "AA", "YF", "IV", "GW", "WP", "DE", "KR", "ST")] == \
        [11, 9, 4, 3, 3, -2, -4, 2, 2, 1]
    assert np.array_equal(table, table.T) and table.sum() == -426
    odds = np.exp(homology.SCALE * table) * np.outer(homology.BACKGROUND, homology.BACKGROUND)
    assert odds.sum() == pytest.approx(1, abs=1e-3)  # which is what its scale means


def test_a_profile_of_two_rows_by_hand():
    """Half of a column is A, half W: counted once, for one letter beside the first; the table ten times."""
    assert homology.BACKGROUND.sum() == pytest.approx(1, abs=1e-12)
    columns, consensus = profile(np.stack([tokens("AW"), tokens("WA")]))
    shares = np.zeros(20)
    shares[tokens("AW")] = 0.5
    expected = shares @ np.exp(homology.SCALE * blosum62()) * homology.BACKGROUND
    mixed = (shares + 10 * expected / expected.sum()) / 11
    scores = np.rint(UNIT / homology.SCALE * np.log(mixed / homology.BACKGROUND))
    assert columns[:, :20].tolist() == 2 * [scores.tolist()] and not columns[:, 20:].any()
    assert consensus.tolist() == 2 * tokens("A").tolist()


def slow_score(columns, sequence):
    """Smith and Waterman's recurrence with gaps of every length tried, one cell at a time."""
    best = np.zeros((len(columns) + 1, len(sequence) + 1))
    for i, j in itertools.product(range(1, len(columns) + 1), range(1, len(sequence) + 1)):
        gaps = [best[i - k, j] - OPEN - k * EXTEND for k in range(1, i + 1)]
        gaps += [best[i, j - k] - OPEN - k * EXTEND for k in range(1, j + 1)]
        best[i, j] = max(0, best[i - 1, j - 1] + columns[i - 1, sequence[j - 1]], *gaps)
    return best.max() / UNIT


def test_scores_are_those_of_smith_and_waterman():
    """Sequences that lie one behind the other do not touch each other, and gaps on both sides are tried."""
    rng = np.random.default_rng(0)
    query = rng.integers(0, 20, 40)
    columns, consensus = profile(query[None].astype(np.uint8))
    assert np.array_equal(consensus, query)
    assert columns[:, :20] / UNIT == pytest.approx(blosum62()[query], abs=0.6)  # of one row: the table
    inserted = np.insert(query, 20, rng.integers(0, 20, 3))
    sequences = [query, inserted, np.delete(query, [18, 19, 20]), query[::-1], rng.integers(0, 20, 30),
                 query[20:], query[:20], np.array([UNKNOWN, GAP]), query[5:6]]
    found = local_scores(columns, sequences)
    assert found == pytest.approx([slow_score(columns, sequence) for sequence in sequences])
    assert found[1] > found[5] + 10 and found[2] > found[5] + 10  # across the gap


def test_the_distribution_is_fitted():
    rng = np.random.default_rng(1)
    lengths = rng.integers(50, 400, 5000)
    scores = np.log(2.5 * lengths / rng.exponential(size=5000)) / 0.27
    assert fitted(scores, lengths) == (pytest.approx(0.27, rel=0.05), pytest.approx(2.5, rel=0.3))


def random_family(rng, name, query, rows=60, changed=0.6):
    msa = np.where(rng.random((rows, len(query))) < changed, rng.integers(0, 20, (rows, len(query))), query)
    msa[0] = query
    return Protein(name, msa.astype(np.uint8), np.zeros((len(query), 3), np.float32))


def test_relatives_are_linked_and_strangers_are_not():
    """b shares half of a's columns; c is related to b by the other half, and so to a; d to nobody."""
    rng = np.random.default_rng(2)
    first, second, third = (rng.integers(0, 20, 60) for _ in range(3))
    families = [random_family(rng, name, query) for name, query in (
        ("a", first), ("d", rng.integers(0, 20, 70)), ("b", np.r_[first, second]), ("c", second[3:]),
        ("x", third))]
    assert clusters(families) == [["a", "b", "c"], ["d"], ["x"]]
    found = e_values(families)
    assert max(found[0, 2], found[2, 3]) < 1e-6 and min(found[1, 0], found[0, 3], found[4, 1]) > 1e-2


def test_a_family_without_known_letters_is_alone():
    rng = np.random.default_rng(3)
    blank = Protein("blank", np.full((3, 40), UNKNOWN, np.uint8), None)
    assert clusters([random_family(rng, "a", rng.integers(0, 20, 50)), blank]) == [["a"], ["blank"]]


def halves(family):
    """Two families of the rows of one, with other queries."""
    order = np.argsort((family.msa[1:] == GAP).sum(axis=1), kind="stable") + 1  # whole ones first
    parts = []
    for k in range(2):
        msa = family.msa[order[k::2]]
        msa = msa[:, msa[0] != GAP]
        parts.append(dataclasses.replace(family, name=f"{family.name}/{k}", msa=msa))
    return parts


def test_halves_of_real_families_are_found():
    pytest.importorskip("gemmi")
    names = ["1WVN_A", "2O9S_A", "1GUU_A", "1UCS_A", "1U2H_A", "2PND_A"]
    stems = [require_shared("data", "families", f"{name}.a3m") for name in names]
    families = [files.load_protein(stem, stem.with_suffix(".pdb")) for stem in stems]
    found = clusters([half for family in families for half in halves(family)])
    immunoglobulins = [f"{name}/{k}" for name in names[-2:] for k in range(2)]  # I-set and V-set
    assert found == [[f"{name}/{k}" for k in range(2)] for name in names[:-2]] + [immunoglobulins]


# --- Links and chance ------------------------------------------------------------------------------------

def test_one_profile_that_finds_the_other_is_a_link(monkeypatch):
    """A shallow alignment's profile may miss what a deep one finds."""
    values = np.full((4, 4), 1.0)
    values[0, 1] = values[2, 1] = 1e-4
    monkeypatch.setattr(homology, "e_values", lambda families: values)
    families = [SimpleNamespace(name=name) for name in "abcd"]
    assert homology.clusters(families) == [["a", "b", "c"], ["d"]]
    values[:] = values.T.copy()
    assert homology.clusters(families) == [["a", "b", "c"], ["d"]]


def test_an_e_value_counts_all_sequences_that_were_tried(monkeypatch):
    """P(score > x) = 1 - exp(-2 * length * exp(-x)), the better of query and consensus, times these four."""
    lengths = [6, 9]
    families = [SimpleNamespace(msa=np.full((1, length), length, np.uint8)) for length in lengths]
    monkeypatch.setattr(homology, "profile", lambda msa: (len(msa[0]), msa[0][:-1]))
    monkeypatch.setattr(homology, "fitted", lambda scores, lengths: (1.0, 2.0))
    monkeypatch.setattr(homology, "local_scores", lambda columns, sequences: np.array(
        [columns + len(sequence) % 2 for sequence in sequences], float))
    expected = [[4 * min(-np.expm1(-2 * length * np.exp(-(columns + length % 2.0)))
                         for length in (whole, whole - 1)) for whole in lengths] for columns in lengths]
    assert homology.e_values(families) == pytest.approx(np.array(expected), rel=1e-12)


def test_chance_is_of_the_same_sequences_backwards_and_shuffled(monkeypatch):
    families = [SimpleNamespace(msa=np.arange(length, dtype=np.uint8)[None]) for length in (6, 9)]
    monkeypatch.setattr(homology, "profile", lambda msa: (None, msa[0] + 10))
    tried = []
    monkeypatch.setattr(homology, "local_scores", lambda columns, sequences: tried.append(
        [sequence.tolist() for sequence in sequences]) or np.arange(len(sequences), dtype=float))
    homology.e_values(families)
    real, decoys = tried[0][:4], tried[0][4:]
    assert real == [[*range(6)], [*range(9)], [*range(10, 16)], [*range(10, 19)]]
    assert decoys[:4] == [sequence[::-1] for sequence in real] and len(decoys) >= homology.DECOYS
    assert [sorted(sequence) for sequence in decoys[4:]] == real * (len(decoys) // 4 - 1)
    assert len({*map(tuple, decoys)}) > 0.9 * len(decoys) and tried[0] == tried[1]
