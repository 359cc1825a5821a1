"""homology: how E-values become links, and chance becomes E-values."""
from types import SimpleNamespace

import numpy as np
import pytest

from proteins import homology


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
