"""Contacts from the statistics of an alignment alone: what a trained model has to beat. Needs numpy only.

    scores = mean_field_dca(some_rows(protein.msa, 4000))   # (S, S), high where residues should touch

Tokens are those of files.py; letters in shapes: R alignment rows, S residues. 4,000 rows of 137 residues take
some five seconds on one core; time grows with the cube of S, since DCA inverts a matrix of 20 S rows.
"""
import numpy as np

from proteins.files import UNKNOWN

STATES = 21   # 20 amino acids; gap, unknown and mask are the last one
NO_ZERO = 1e-9  # a pseudocount without effect, so that logarithms exist
BLOCK = 1000  # rows that are compared with all others at once


def some_rows(msa, most, seed=0):
    """The query and at most most - 1 other rows, drawn by the seed where there are more; (rows, S)."""
    if len(msa) <= most:
        return msa
    others = np.random.default_rng(seed).permutation(np.arange(1, len(msa)))
    return msa[np.append(0, others[:most - 1])]


def one_hot(tokens, states):
    """(R, S) tokens -> (R, S * states) float32."""
    rows, residues = tokens.shape
    made = np.zeros((rows, residues * states), np.float32)
    np.put_along_axis(made, np.arange(residues) * states + tokens.astype(np.int64), 1, axis=1)
    return made


def sequence_weights(msa, identity=0.8):
    """(R,) 1 / the number of rows that have at least this share of columns in common with a row, itself among
    them; gaps count as letters. So a clade of near copies counts as one (Morcos et al. 2011,
    doi:10.1073/pnas.1111471108); the sum is the effective number of rows."""
    letters = one_hot(msa, int(msa.max()) + 1)
    needed = identity * msa.shape[1] - 1e-6
    count = np.zeros(len(msa))
    for start in range(0, len(msa), BLOCK):
        block = letters[start:start + BLOCK]
        alike = block @ letters[start:].T >= needed
        count[start:start + len(block)] += alike.sum(axis=1)
        count[start + len(block):] += alike[:, len(block):].sum(axis=0)  # the others find the block
    return 1 / count


def frequencies(msa, weights=None):
    """Weighted shares of states in columns (S, STATES) and in pairs of columns (S, STATES, S, STATES)."""
    weights = sequence_weights(msa) if weights is None else weights
    letters = one_hot(np.minimum(msa, UNKNOWN), STATES)
    letters *= np.sqrt(weights / weights.sum())[:, None].astype(np.float32)
    pairs = (letters.T @ letters).reshape(msa.shape[1], STATES, msa.shape[1], STATES)
    single = np.einsum("iaia->ia", pairs).astype(np.float64)  # a copy of the diagonal
    return single, pairs


def average_product_corrected(scores):
    """Scores less what each column has with all others on average (APC), which is phylogeny and conservation
    rather than contact (Dunn, Wahl and Gloor 2008, doi:10.1093/bioinformatics/btm604); 0 on the diagonal."""
    scores = scores - np.diag(np.diagonal(scores))
    others = max(len(scores) - 1, 1)
    mean = scores.sum(axis=0) / others
    total = mean.mean()
    corrected = scores - np.outer(mean, mean) / total if total else scores
    np.fill_diagonal(corrected, 0.0)
    return corrected


def mutual_information(msa, weights=None):
    """(S, S) MI-APC: mutual information of two columns (Korber et al. 1993, doi:10.1073/pnas.90.15.7176) with
    average product correction. Indirect couplings score like direct ones."""
    single, pairs = frequencies(msa, weights)
    single = (1 - NO_ZERO) * single + NO_ZERO / STATES
    entropy = -(single * np.log(single)).sum(axis=1)
    together = np.empty((len(single), len(single)))
    for i, column in enumerate(pairs):  # one at a time: all of them in float64 would fill the memory
        column = (1 - NO_ZERO) * column.astype(np.float64) + NO_ZERO / STATES ** 2
        together[i] = -(column * np.log(column)).sum(axis=(0, 2))
    return average_product_corrected(entropy[:, None] + entropy - together)


def mean_field_dca(msa, pseudocount=0.5, weights=None):
    """(S, S) couplings of a Potts model in mean-field approximation: the inverse of the covariance matrix, in
    which indirect couplings are explained away (direct coupling analysis, Morcos et al. 2011,
    doi:10.1073/pnas.1111471108); Frobenius norms without the gap state in the zero-sum gauge (Ekeberg et al.
    2013, doi:10.1103/PhysRevE.87.012707), with average product correction."""
    single, pairs = frequencies(msa, weights)
    size, used = len(single), STATES - 1  # the last state follows from the others
    single = (1 - pseudocount) * single + pseudocount / STATES
    covariance = pairs[:, :used, :, :used].astype(np.float64)
    covariance *= 1 - pseudocount
    covariance += pseudocount / STATES ** 2
    for i in range(size):
        covariance[i, :, i] = np.diag(single[i, :used])
    flat = single[:, :used].ravel()
    covariance = covariance.reshape(size * used, size * used)
    covariance -= np.outer(flat, flat)
    couplings = np.linalg.inv(covariance).reshape(size, used, size, used)  # their sign does not matter below
    first, second = couplings.sum(axis=1, keepdims=True), couplings.sum(axis=3, keepdims=True)
    both = first.sum(axis=3, keepdims=True)  # those of the last state are 0 before the gauge is changed
    couplings += both / STATES ** 2 - first / STATES - second / STATES
    return average_product_corrected(np.sqrt(np.einsum("iajb,iajb->ij", couplings, couplings)))
