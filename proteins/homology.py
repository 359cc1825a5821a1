"""Which families are related, by alignment: no relative of a test family may be trained on. Needs numpy only.

    clusters(load_families("families/"))   # [["1PTF_A"], ["1U2H_A", "2PND_A"], ...]

The profile of each family (log-odds of its columns, as in PSI-BLAST: Altschul et al. 1997,
doi:10.1093/nar/25.17.3389) is aligned with every other family's query and with its consensus, which shows far
more: local alignment with affine gaps (Smith and Waterman 1981, Gotoh 1982). Scores of reversed and shuffled
sequences give the extreme value distribution of unrelated ones (Karlin and Altschul 1990), and that an
E-value. 126 families take half a minute on one core. Relatives that only structures show are not found.
"""
import numpy as np

from proteins.files import LETTERS, TOKENS, UNKNOWN
from proteins.yardsticks import sequence_weights, some_rows

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


def blosum62():
    """(20, 20)"""
    full = np.zeros((20, 20))
    full[np.tril_indices(20)] = list(map(int, BLOSUM62.split()))
    return np.maximum(full, full.T) + np.minimum(full, full.T) - np.diag(np.diagonal(full))


def profile(msa):
    """((S, TOKENS) int32 scores of an alignment's columns, 0 for no amino acid; (S,) their consensus)."""
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
    return scores, np.where(known, counts.argmax(axis=1), UNKNOWN)


def local_scores(scores, sequences):
    """Best local alignment of a profile (S, TOKENS) with each of the sequences, token arrays: (sequences,)
    in units of BLOSUM62. All of them lie one behind the other, so that numpy works on a whole row of the
    alignment matrix at once; a gap along it is the best earlier place, less its cost up to here."""
    tokens = np.concatenate([np.append(sequence, TOKENS) for sequence in sequences])
    starts = np.cumsum([0, *(len(sequence) + 1 for sequence in sequences[:-1])])
    scores = np.concatenate([scores, np.full((len(scores), 1), -APART, np.int32)], axis=1)
    travelled = np.cumsum(np.where(tokens == TOKENS, APART, EXTEND), dtype=np.int64).astype(np.int32)
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


def decoys_of(real, seed):
    """Unrelated sequences like the real ones: reversed and shuffled."""
    rng, decoys = np.random.default_rng(seed), [sequence[::-1] for sequence in real]
    while len(decoys) < DECOYS:
        decoys += [rng.permutation(sequence) for sequence in real]
    return decoys


def found_by(columns, real, decoys):
    """(real,) how many sequences that score as well as each of the real ones a profile would find by chance
    among as many unrelated ones."""
    lengths = np.array([len(sequence) for sequence in [*real, *decoys]])
    scores = local_scores(columns, [*real, *decoys])
    rate, size = fitted(scores[len(real):], lengths[len(real):])
    return -len(real) * np.expm1(-size * lengths[:len(real)] * np.exp(-rate * scores[:len(real)]))


def e_values(families, seed=0):
    """(families, families) [a, b]: how many sequences as good as query or consensus of b the profile of a
    would find by chance among as many unrelated ones. families have a name and msa, as files.Protein."""
    profiles, consensus = zip(*(profile(family.msa) for family in families), strict=True)
    real = [*(family.msa[0] for family in families), *consensus]
    decoys = decoys_of(real, seed)
    return np.stack([found_by(columns, real, decoys).reshape(2, -1).min(axis=0) for columns in profiles])


def nearest(msa, sequences, seed=0):
    """(name, E-value) of the family that is most like an alignment's profile by one of its sequences;
    sequences {name: [letters, ...]}."""
    names, real = zip(*((name, np.array([LETTERS.index(letter) for letter in letters]))
                        for name, own in sequences.items() for letters in own), strict=True)
    found = found_by(profile(msa)[0], real, decoys_of(real, seed))
    return names[found.argmin()], float(found.min())


def clusters(families, e_value=RELATED):
    """Lists of names: families are together if the profile of one finds the other with such an E-value or a
    lower one, or if others link them so. Every family is in one list, most are alone."""
    linked = e_values(families) <= e_value
    linked |= linked.T | np.eye(len(families), dtype=bool)
    while (further := (linked.astype(np.float32) @ linked) > 0).sum() > linked.sum():
        linked = further
    return [[families[i].name for i in group]
            for group in dict.fromkeys(tuple(np.flatnonzero(row).tolist()) for row in linked)]
