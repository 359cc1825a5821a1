"""How many rows of an alignment count, and a few of them where there are many. Needs numpy only.

Tokens are those of files.py; letters in shapes: R alignment rows, S residues.
"""
import numpy as np

IDENTITY = 0.8  # rows that agree in this share of the columns count as one


def some_rows(msa, most, seed=0):
    """The query and at most most - 1 other rows, drawn by the seed where there are more; (rows, S)."""
    if len(msa) <= most:
        return msa
    others = np.random.default_rng(seed).permutation(np.arange(1, len(msa)))
    return msa[np.append(0, others[:most - 1])]


def sequence_weights(msa):
    """(R,) 1 / the number of rows that have at least IDENTITY of the columns in common with a row, itself
    among them; gaps count as letters. So a clade of near copies counts as one (Morcos et al. 2011,
    doi:10.1073/pnas.1111471108); the sum is the effective number of rows."""
    states = int(msa.max()) + 1
    letters = np.zeros((len(msa), msa.shape[1] * states), np.float32)  # one-hot
    np.put_along_axis(letters, np.arange(msa.shape[1]) * states + msa.astype(np.int64), 1, axis=1)
    return 1 / (letters @ letters.T >= IDENTITY * msa.shape[1] - 1e-6).sum(axis=1)
