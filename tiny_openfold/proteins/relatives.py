"""What an alignment can tell, judged before a model reads it: whether it is of proteins, how many of its rows
count, and whether the model was trained on a relative. Letters in shapes: R alignment rows, S residues.

Relatives are found as by PSI-BLAST (Altschul et al. 1997, doi:10.1093/nar/25.17.3389): the alignment's
profile, log-odds of its columns, is aligned with the sequences of a family by local alignment with affine
gaps (Smith and Waterman 1981, Gotoh 1982). Scores of reversed and shuffled sequences give the extreme value
distribution of unrelated ones (Karlin and Altschul 1990), and that an E-value. Relatives that only
structures show are not found.
"""
from dataclasses import dataclass

import numpy as np
import torch

from fusion_lab.training.errors import UserError
from fusion_lab.training.words import counted, printable
from tiny_openfold.proteins import AMINO_ACIDS, GAP, LETTERS, TOKENS, UNKNOWN
from tiny_openfold.proteins.coevolution import row_weights
from tiny_openfold.proteins.maps import runs, stretches

BASES = [AMINO_ACIDS.index(letter) for letter in "ACGT"]  # U is read as C, see files.py
NUCLEIC, ENOUGH = 0.95, 10  # share of letters that are bases or N; of fewer letters nobody can say
KNOWN = 0.5                 # share of the query whose amino acids must be known
LEAST_ROWS = 30             # effective ones; a column that fewer fill says next to nothing
STRETCH = 5                 # such columns, at least, side by side: there models were too sure

# Lower triangle of BLOSUM62 in the order of AMINO_ACIDS (Henikoff and Henikoff 1992), and the frequencies of
# amino acids at which its scale is 0.3176 (Robinson and Robinson 1991).
BLOSUM62 = """
4 0 9 -2 -3 6 -1 -4 2 5 -2 -2 -3 -3 6 0 -3 -1 -2 -3 6 -2 -3 -1 0 -1 -2 8 -1 -1 -3 -3 0 -4 -3 4 -1 -3 -1
1 -3 -2 -1 -3 5 -1 -1 -4 -3 0 -4 -3 2 -2 4 -1 -1 -3 -2 0 -3 -2 1 -1 2 5 -2 -3 1 0 -3 0 1 -3 0 -3 -2 6 -1
-3 -1 -1 -4 -2 -2 -3 -1 -3 -2 -2 7 -1 -3 0 2 -3 -2 0 -3 1 -2 0 0 -1 5 -1 -3 -2 0 -3 -2 0 -3 2 -2 -1 0 -2
1 5 1 -1 0 0 -2 0 -1 -2 0 -2 -1 1 -1 0 -1 4 0 -1 -1 -1 -2 -2 -2 -1 -1 -1 -1 0 -1 -1 -1 1 5 0 -1 -3 -2 -1
-3 -3 3 -2 1 1 -3 -2 -2 -3 -2 0 4 -3 -2 -4 -3 1 -2 -2 -3 -3 -2 -1 -4 -4 -2 -3 -3 -2 -3 11 -2 -2 -3 -2 3
-3 2 -1 -2 -1 -1 -2 -3 -1 -2 -2 -2 -1 2 7"""
BACKGROUND = np.array([781, 193, 536, 630, 386, 738, 220, 514, 574, 902, 224, 449, 520, 426, 512, 712, 584,
                       644, 133, 322]) / 10_000
SCALE, UNIT = 0.3176, 8  # nats in one unit of BLOSUM62; such a unit in the whole numbers that are added up
OPEN, EXTEND = 11 * UNIT, UNIT  # a gap of k residues costs OPEN + k EXTEND
APART = 10_000 * UNIT    # between sequences that lie one behind the other: nothing leads across
PSEUDOCOUNTS = 10        # rows' worth of what BLOSUM62 expects, beside the letters of a column less one
RELATED = 1e-3           # E-value, at most, of relatives
MOST_ROWS, DECOYS = 1000, 500  # at most, of an alignment; at least


def some_rows(msa, most, seed=0):
    """The query and at most most - 1 other rows, drawn by the seed where there are more; (rows, S)."""
    if len(msa) <= most:
        return msa
    others = np.random.default_rng(seed).permutation(np.arange(1, len(msa)))
    return msa[np.append(0, others[:most - 1])]


def sequence_weights(msa):
    """(R,) coevolution.row_weights() of an alignment (R, S) in numpy."""
    return row_weights(torch.from_numpy(msa)[None], torch.ones(1, msa.shape[1]))[0].numpy()


def require_protein(query, path):
    """Raise UserError for a query (L,) that no model of proteins can say anything about."""
    known = query[query < UNKNOWN]
    if len(known) < KNOWN * len(query):
        raise UserError(f"{path}: of the query's {len(query)} residues only {len(known)} are known amino "
                        "acids; the others are X")
    bases = np.isin(known, [*BASES, AMINO_ACIDS.index("N")]).mean()  # the query is never empty
    if len(known) >= ENOUGH and bases >= NUCLEIC and np.isin(BASES, known).sum() >= 3:
        raise UserError(f"{path}: the query reads like DNA or RNA ({100 * bases:.0f}% of it is A, C, G, T, U "
                        "or N); an alignment of proteins is needed")


@dataclass(frozen=True)
class Depth:
    """How much evidence the rows hold that a model reads."""
    rows: int
    effective: float  # rows, near copies (80% identity) counted once
    coverage: float   # mean share of the query's columns that a row fills
    thin: tuple       # residues, from 0, whose column fewer than LEAST_ROWS effective rows fill
    residues: int

    @classmethod
    def of(cls, msa):
        """msa (R, L)"""
        filled, weights = msa != GAP, sequence_weights(msa)
        return cls(len(msa), float(weights.sum()), float(filled.mean()),
                   tuple(np.flatnonzero(weights @ filled < LEAST_ROWS).tolist()), msa.shape[1])

    def __str__(self):
        thin = (f"; {len(self.thin)} of {counted(self.residues, 'column')} have fewer than {LEAST_ROWS} "
                "effective rows") * bool(self.thin)
        return (f"{self.effective:.1f} effective rows of {self.rows} (at 80% identity), coverage "
                f"{100 * self.coverage:.0f}%{thin}")

    @property
    def uncertain(self):
        """Residues, from 0, of stretches of thin ones."""
        flags = np.isin(np.arange(self.residues), self.thin)
        return [residue for first, last in runs(flags) if last - first + 1 >= STRETCH
                for residue in range(first, last + 1)]

    def untested(self, tested):
        """What lies outside of what a model was tested on, by tested_on(), in words; "" if nothing does or
        that is not known."""
        if tested is None:
            return ""
        (least, shortest, longest), outside = tested, []
        if self.effective < least:
            outside.append(f"{counted(round(self.effective), 'effective row')} (tested: {least:g} or more)")
        if not shortest <= self.residues <= longest:
            outside.append(f"{counted(self.residues, 'residue')} (tested: {shortest} to {longest})")
        return " and ".join(outside)


def tested_on(card):
    """(least effective rows, shortest chain, longest chain) that a model was tested on by its card; None
    where the card does not say it. Raises AttributeError, KeyError, TypeError or ValueError for nonsense."""
    if not (tested := card.get("tested")):
        return None
    shortest, longest = map(int, tested["residues"])
    return float(tested["effective_rows"]), shortest, longest


def cautions(result):
    """[what makes a prediction uncertain], for its files; result: what its JSON holds."""
    words = [f"{result['untested']}: the prediction may be wrong throughout"] * bool(result["untested"])
    if low := result["low_confidence"]:
        words.append(f"Low confidence at residues {stretches(low)}: fewer than {LEAST_ROWS} effective rows")
    return words


# --- Relatives ------------------------------------------------------------------------------------------


def blosum62():
    """(20, 20)"""
    full = np.zeros((20, 20))
    full[np.tril_indices(20)] = list(map(int, BLOSUM62.split()))
    return full + full.T - np.diag(np.diagonal(full))


def profile(msa):
    """(S, TOKENS) int32 scores of an alignment's columns, 0 for no amino acid."""
    msa = some_rows(msa, MOST_ROWS)
    weights = sequence_weights(msa)
    counts = np.stack([weights @ (msa == letter) for letter in range(20)], axis=1)  # (S, 20)
    known = counts.any(axis=1)
    shares = np.where(known[:, None], counts, BACKGROUND)
    shares /= shares.sum(axis=1, keepdims=True)
    expected = shares @ np.exp(SCALE * blosum62()) * BACKGROUND
    expected /= expected.sum(axis=1, keepdims=True)
    letters = np.maximum((counts > 0).sum(axis=1, keepdims=True) - 1, 0)
    mixed = (letters * shares + PSEUDOCOUNTS * expected) / (letters + PSEUDOCOUNTS)
    scores = np.zeros((msa.shape[1], TOKENS), np.int32)
    scores[:, :20] = np.rint(UNIT / SCALE * np.log(mixed / BACKGROUND))
    return scores


def local_scores(scores, sequences):
    """Best local alignment of a profile (S, TOKENS) with each of the sequences, token arrays: (sequences,)
    in units of BLOSUM62. All of them lie one behind the other, so that numpy works on a whole row of the
    alignment matrix at once; a gap along it is the best earlier place, less its cost up to here."""
    tokens = np.concatenate([np.append(sequence, TOKENS) for sequence in sequences])
    starts = np.cumsum([0, *(len(sequence) + 1 for sequence in sequences[:-1])])
    scores = np.concatenate([scores, np.full((len(scores), 1), -APART, np.int32)], axis=1)
    travelled = np.cumsum(np.where(tokens == TOKENS, APART, EXTEND), dtype=np.int64)  # of many, above int32
    row, best, down = (np.zeros(len(tokens), np.int32) for _ in range(3))
    for column in scores:
        here = column[tokens]
        here[1:] += row[:-1]
        down = np.maximum(row - OPEN, down) - EXTEND  # gaps in the sequence
        np.maximum(here, down, out=here)
        np.maximum(here, 0, out=here)
        along = np.maximum.accumulate(here + travelled)[:-1]
        here[1:] = np.maximum(here[1:], along - travelled[1:] - OPEN)  # gaps in the profile
        here[tokens == TOKENS] = 0
        row = here
        np.maximum(best, row, out=best)
    return np.maximum.reduceat(best, starts) / UNIT


def fitted(scores, lengths):
    """(rate, size) of the distribution of scores x of unrelated sequences, P(score > x) = 1 - exp(-size *
    length * exp(-rate * x)), by maximum likelihood."""
    low, high = 1e-3, 1e2
    for _ in range(60):
        rate = (low * high) ** 0.5
        share = lengths * np.exp(-rate * (scores - scores.min()))
        above = scores.mean() - (share * scores).sum() / share.sum() > 1 / rate
        low, high = (low, rate) if above else (rate, high)
    return rate, len(scores) / (lengths * np.exp(-rate * scores)).sum()


def in_tokens(sequences):
    """(name of each, tokens of each) of {name: [letters, ...]}. Raises AttributeError, TypeError or
    ValueError for what is no such thing."""
    names, tokens = zip(*((name, np.array([LETTERS.index(letter) for letter in letters]))
                          for name, own in sequences.items() for letters in own), strict=True)
    return names, tokens


def nearest(msa, sequences, seed=0):
    """(name, E-value) of the family that is most like an alignment's profile by one of its sequences,
    {name: [letters, ...]}: how many as good as that the profile would find by chance among as many."""
    names, real = in_tokens(sequences)
    rng, decoys = np.random.default_rng(seed), [sequence[::-1] for sequence in real]
    while len(decoys) < DECOYS:
        decoys += [rng.permutation(sequence) for sequence in real]
    lengths = np.array([len(sequence) for sequence in [*real, *decoys]])
    scores, count = local_scores(profile(msa), [*real, *decoys]), len(real)
    rate, size = fitted(scores[count:], lengths[count:])
    e_values = -count * np.expm1(-size * lengths[:count] * np.exp(-rate * scores[:count]))
    return names[e_values.argmin()], float(e_values.min())


def learned_from(families):
    """{name: [query, consensus]} of files.Protein: what relative() compares others with. The consensus is
    found by more remote relatives."""
    sequences = {}
    for family in families:
        rows = some_rows(family.msa, MOST_ROWS)
        counts = np.stack([(rows == letter).sum(axis=0) for letter in range(20)])  # (20, S)
        consensus = np.where(counts.any(axis=0), counts.argmax(axis=0), UNKNOWN)
        sequences[family.name] = [family.sequence, "".join(LETTERS[token] for token in consensus)]
    return sequences


def relative(msa, name, card):
    """What a model's card tells of relatives of an alignment: {name, e_value, trained} of the nearest family
    there by its sequences, trained if the model learned from it. Of families without sequences one of the
    same name can be told, with no E-value; of the others nothing, so that trained is None."""
    sequences, names = card.get("sequences") or {}, card.get("trained_on") or ()
    nearest_name, e_value = nearest(msa, sequences) if sequences else (None, None)
    if sequences and e_value <= RELATED:
        return dict(name=nearest_name, e_value=e_value, trained=True)
    if name in set(names) - set(sequences):
        return dict(name=name, e_value=None, trained=True)
    return dict(name=nearest_name, e_value=e_value, trained=None if set(names) - set(sequences) else False)


def kinship(kin):
    """The result of relative() in words; "" where there is nothing to tell."""
    name, e_value, trained = (kin[key] for key in ("name", "e_value", "trained"))
    nearest = f"{printable(name)} (E-value {e_value:.0e})" if e_value is not None else ""
    if trained:
        which = f"a relative, {nearest}" if nearest else "a family of this name"
        return f"The model was trained on {which}: how good it is here says nothing of other families"
    if trained is None:
        return ("Whether the model was trained on a relative cannot be told: its file names families without "
                "their sequences")
    return f"The nearest family that the model was trained on is no relative: {nearest}" if nearest else ""
