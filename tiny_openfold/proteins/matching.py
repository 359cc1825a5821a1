"""Which residue of a query is which of a chain. Letters in shapes: L query residues, C of the chain."""
import numpy as np

MATCH, MISMATCH, OPEN, EXTEND = 32, -32, 96, 1  # a gap costs three matches, and one more for 32 residues


def align(query, chain, breaks, unknown):
    """Overlap alignment of query (L,) with chain (C,), letters as numbers; those from `unknown` on fit every
    letter, but gain nothing. Returns (L,): index into the chain, -1 where there is none.

    Overhanging ends are free. Without EXTEND a long query would match any chain, a few letters here and a few
    there. Where the chain is broken, `breaks` (C+1,), leaving out query residues costs no OPEN: with it the
    residue beside a missing loop lands on the wrong side of it whenever the letters allow.
    """
    rows, columns = len(query), len(chain)
    known = (query[:, None] < unknown) & (chain < unknown)
    gain = np.where(query[:, None] == chain, np.int32(MATCH), np.int32(MISMATCH)) * known  # (L, C)
    position = np.arange(columns + 1)
    query_open = np.where(breaks, 0, OPEN)
    query_extend = np.where((position > 0) & (position < columns), EXTEND, 0)
    chain_open = np.where(np.arange(rows + 1) < rows, OPEN, 0)
    chain_extend = np.where(np.arange(rows + 1) < rows, EXTEND, 0)
    best = np.zeros((rows + 1, columns + 1), np.int32)
    skipped = best[0] - query_open  # best of the rows above with the query residues since then left out
    for i in range(1, rows + 1):
        row = best[i]
        row[1:] = best[i - 1, :-1] + gain[i - 1]
        skipped = skipped - query_extend
        np.maximum(row, skipped, out=row)
        level = row + chain_extend[i] * position
        row[1:] = np.maximum(row[1:], np.maximum.accumulate(level)[:-1] - chain_open[i]
                             - chain_extend[i] * position[1:])
        np.maximum(skipped, row - query_open, out=skipped)

    def above(first, i, j):
        """Rows from `first` on from which leaving out query residues leads to (i, j)."""
        cost = query_open[j] + query_extend[j] * np.arange(i - first, 0, -1)
        return first + np.flatnonzero(best[first:i, j] - cost == best[i, j])

    index = np.full(rows, -1)
    i, j = rows, columns
    while i and j:
        if best[i, j] == best[i - 1, j - 1] + gain[i - 1, j - 1]:
            i, j = i - 1, j - 1
            index[i] = j
        elif len(first := above(i - 1, i, j)) or len(first := above(0, i, j)):  # mostly the next one
            i = first[-1]
        else:
            cost = chain_open[i] + chain_extend[i] * (j - position[:j])
            j = np.flatnonzero(best[i, :j] - cost == best[i, j])[-1]
    return index
