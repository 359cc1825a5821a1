"""Statistics of a whole alignment that residue pairs can start from (--coevolution).

AlphaFold 2 reads thousands of rows beside its few hundred clusters in an extra MSA stack (Alg. 18). Here all
rows enter the pair representation as direct couplings of two columns: the inverse of their covariance, by
which mean-field DCA predicts contacts (Morcos et al. 2011, doi:10.1073/pnas.1111471108); as input of a
network as in trRosetta (Yang et al. 2020, doi:10.1073/pnas.1914677117).

Letters: B alignments, M rows, S residues, Q = 21 states of a site: 20 amino acids, and everything else.
"""
import numpy as np
import torch
from torch.nn.functional import one_hot

from evoformer_kernels.precision import set_tf32_products, tf32_products
from tiny_openfold.proteins import GAP

Q = 21
FEATURES = Q * Q + 1  # for each pair: a table of states against states, and its strength
IDENTITY = 0.8      # rows that agree in this share of the columns count as one
BLOCK = 4096        # rows that are compared with all others at a time
PSEUDOCOUNT = 0.5   # share of evenly spread states that is mixed into the frequencies
SCALE = 10.0        # tables times this have a standard deviation near 1
COARSE, FINE = 17, 2  # steps of Newton's iteration, in TF32 and in float32


def row_weights(rows, seq_mask):
    """(B, M) in float64: 1 over the number of rows that have at least IDENTITY of the columns in common with
    a row, itself among them, so that a clade of near copies counts as one; the sum is the effective number of
    rows. Gaps count as letters, but rows of gaps alone as nothing. rows (B, M, S) tokens, seq_mask (B, S)."""
    exact = torch.float16 if rows.is_cuda else torch.float32  # for counts of up to 2048 residues
    states = torch.arange(GAP + 1, device=rows.device)
    letters = rows.clamp(max=GAP)[..., None] == states  # (B, M, S, 22)
    letters = (letters * seq_mask[:, None, :, None]).flatten(2).to(exact)
    present, least = (rows != GAP).any(2), IDENTITY * seq_mask.sum(1)[:, None, None] - 1e-3
    counts = [((block @ letters.transpose(1, 2) >= least) & present[:, None]).sum(2)
              for block in letters.split(BLOCK, 1)]  # all at once would be rows x rows of memory
    return present / torch.cat(counts, 1).clamp(min=1).double()


def frequencies(rows, weights):
    """Of states (B, S*Q) and of pairs of them (B, S*Q, S*Q), weighted."""
    states = one_hot(rows.clamp(max=Q - 1), Q).flatten(2).float()
    weights = weights / weights.sum(1, keepdim=True).clamp(min=1e-6)
    return (weights[:, None] @ states)[:, 0], (states * weights[..., None]).transpose(1, 2) @ states


def inverse(matrix):
    """Of symmetric positive definite matrices (B, n, n) in float32. On a GPU by Newton's iteration, which is
    matrix products alone: the coarse steps may err by rounding, the fine ones correct that."""
    if not matrix.is_cuda:
        return torch.cholesky_inverse(torch.linalg.cholesky(matrix))
    scale = matrix.diagonal(dim1=1, dim2=2).rsqrt()
    scale = scale[:, :, None] * scale[:, None]
    matrix = matrix * scale
    bound = matrix.abs().sum(2).amax(1)[:, None, None]  # of the eigenvalues
    estimate = torch.eye(matrix.shape[1], device=matrix.device) / bound
    before = tf32_products()
    try:
        for step in range(COARSE + FINE):
            set_tf32_products(step < COARSE)
            estimate = torch.baddbmm(estimate, estimate, matrix @ estimate, beta=2, alpha=-1)
    finally:
        set_tf32_products(before)
    return (estimate + estimate.transpose(1, 2)) / 2 * scale


def direct_couplings(single, pairs, seq_mask):
    """(B, S, Q, S, Q): minus the inverse of the covariance, every table with rows and columns that sum to 0.
    Sites that seq_mask (B, S) lacks are independent of all others; pseudocounts would couple them."""
    size = seq_mask.shape[1]
    single = (1 - PSEUDOCOUNT) * single + PSEUDOCOUNT / Q
    pairs = ((1 - PSEUDOCOUNT) * pairs + PSEUDOCOUNT / Q ** 2).unflatten(2, (size, Q)).unflatten(1, (size, Q))
    site = torch.arange(size, device=single.device)
    single = single.unflatten(1, (size, Q))
    pairs[:, site, :, site] = torch.diag_embed(single).transpose(0, 1)
    linked = (seq_mask[:, :, None] * seq_mask[:, None]).clamp(min=torch.eye(size, device=single.device))
    covariance = (pairs - single[..., None, None] * single[:, None, None]) * linked[:, :, None, :, None]
    covariance = covariance[:, :, :-1, :, :-1].reshape(len(single), size * (Q - 1), size * (Q - 1))
    tables = pairs.new_zeros(pairs.shape)
    tables[:, :, :-1, :, :-1] = -inverse(covariance).unflatten(2, (size, Q - 1)).unflatten(1, (size, Q - 1))
    return (tables - tables.mean(2, keepdim=True) - tables.mean(4, keepdim=True)
            + tables.mean((2, 4), keepdim=True))


def strengths(tables, residues):
    """(B, S, S): Frobenius norms of the tables (B, S, Q, S, Q) over amino acids, less what the two sites have
    with all others (APC, Dunn et al. 2008, doi:10.1093/bioinformatics/btm604), in units of their standard
    deviation over pairs of the residues (B, 1, 1) that are present."""
    norm = tables[:, :, :-1, :, :-1].square().sum((2, 4)).sqrt()
    mean = norm.sum(2, keepdim=True) / (residues - 1).clamp(min=1)
    overall = (mean.sum((1, 2), keepdim=True) / residues).clamp(min=1e-6)
    rest = (norm - mean * mean.transpose(1, 2) / overall) * (norm > 0)
    spread = rest.square().sum((1, 2), keepdim=True) / (residues * (residues - 1)).clamp(min=1)
    return rest / (spread.sqrt() + 1e-6)


@torch.no_grad()
def pair_features(rows, seq_mask=None):
    """(B, S, S, FEATURES) in float32 of alignments rows (B, M, S), tokens; 0 on the diagonal and where
    seq_mask (B, S) is 0."""
    with torch.autocast("cuda" if rows.is_cuda else "cpu", enabled=False):
        seq_mask = torch.ones_like(rows[:, 0], dtype=torch.float32) if seq_mask is None else seq_mask.float()
        single, pairs = frequencies(rows, row_weights(rows, seq_mask).float())
        off_diagonal = 1.0 - torch.eye(rows.shape[2], device=rows.device)
        present = seq_mask[:, :, None] * seq_mask[:, None] * off_diagonal
        tables = direct_couplings(single, pairs, seq_mask) * present[:, :, None, :, None]
        strength = strengths(tables, seq_mask.sum(1)[:, None, None])
        return torch.cat([SCALE * tables.transpose(2, 3).flatten(3), strength[..., None]], dim=3)


def mean_field_dca(msa):
    """(S, S) scores of contacts by direct coupling analysis, without any training: the strengths of the
    couplings of an alignment, msa (R, S) numpy."""
    return pair_features(torch.from_numpy(msa.astype(np.int64))[None])[0, ..., -1]
