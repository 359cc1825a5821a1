"""What an alignment can tell, judged before a model reads it: whether it is of proteins, how many of its rows
count, what they cover, and whether the model was trained on a relative. Needs numpy only."""
from dataclasses import dataclass

import numpy as np

from proteins.files import AMINO_ACIDS, GAP, LETTERS, UNKNOWN, DataError
from proteins.homology import RELATED, nearest
from proteins.yardsticks import sequence_weights

BASES = [AMINO_ACIDS.index(letter) for letter in "ACGT"]  # U is read as C, see files.py
NUCLEIC, ENOUGH = 0.95, 10  # share of letters that are bases or N; of fewer letters nobody can say
KNOWN = 0.5                 # share of the query whose amino acids must be known
THIN = 0.1                  # of the rows; a column that fewer fill says next to nothing
TESTED_ROWS = 100           # effective ones; with fewer the shipped model was not tested (models/README.md)
TESTED_LENGTHS = (40, 409)  # residues of the chains that it was tested on


def require_protein(query, path):
    """Raise DataError for a query (L,) that no model of proteins can say anything about."""
    known = query[query < UNKNOWN]
    if len(known) < KNOWN * len(query):
        raise DataError(f"{path}: of the query's {len(query)} residues only {len(known)} are known amino "
                        "acids; the others are X")
    bases = np.isin(known, [*BASES, AMINO_ACIDS.index("N")]).mean()  # the query is never empty
    if len(known) >= ENOUGH and bases >= NUCLEIC and np.isin(BASES, known).sum() >= 3:
        raise DataError(f"{path}: the query reads like DNA or RNA ({100 * bases:.0f}% of it is A, C, G, T, U "
                        "or N); an alignment of proteins is needed")


@dataclass(frozen=True)
class Depth:
    """How much evidence the rows hold that a model reads."""
    rows: int
    effective: float  # rows, near copies (80% identity) counted once
    coverage: float   # mean share of the query's columns that a row fills
    thin: int         # columns that less than THIN of the rows fill
    residues: int

    @classmethod
    def of(cls, msa):
        """msa (R, L)"""
        filled = msa != GAP
        return cls(len(msa), float(sequence_weights(msa).sum()), float(filled.mean()),
                   int((filled.mean(axis=0) < THIN).sum()), msa.shape[1])

    def __str__(self):
        thin = f"; {self.thin} of {self.residues} columns are nearly empty" if self.thin else ""
        return (f"{self.effective:.1f} effective rows of {self.rows} (at 80% identity), coverage "
                f"{100 * self.coverage:.0f}%{thin}")

    @property
    def untested(self):
        """What is outside of what the shipped model was tested on, in words; "" if nothing is."""
        low, high = TESTED_LENGTHS
        found = [f"{self.effective:.0f} effective rows (tested: {TESTED_ROWS} or more)"] \
            * (self.effective < TESTED_ROWS)
        found += [f"{self.residues} residues (tested: {low} to {high})"] * (not low <= self.residues <= high)
        return " and ".join(found)


def relative(msa, name, card):
    """What a model's card tells of relatives of an alignment: {name, e_value, trained} of the nearest family
    there by its sequences (query and consensus), trained if the model learned from it. Without sequences only
    a family of the same name can be told, with no E-value. Raises DataError."""
    sequences = card.get("sequences")
    if not sequences:
        return dict(name=name, e_value=None, trained=name in (card.get("trained_on") or ()))
    whole = isinstance(sequences, dict) and all(isinstance(own, list) and own for own in sequences.values())
    if not whole or not all(isinstance(letters, str) and letters and not set(letters) - set(LETTERS)
                            for own in sequences.values() for letters in own):
        raise DataError("the sequences in the model's card are damaged")
    found, e_value = nearest(msa, sequences)
    return dict(name=found, e_value=e_value, trained=e_value <= RELATED)
