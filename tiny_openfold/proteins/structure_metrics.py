"""How near a predicted structure is to a true one, by CA atoms whose partners are known. Needs numpy only.

TM-score (Zhang and Skolnick 2004, doi:10.1002/prot.20264), lDDT (Mariani et al. 2013,
doi:10.1093/bioinformatics/btt473) and RMSD. Letters in shapes: L residues that both structures have, S
superpositions tried at once. Lengths in Å.
"""
import numpy as np

FEWEST = 3          # atoms of a superposition
SHORTEST = 4        # residues of a piece that a search starts from
ROUNDS = 20         # of superposing on those that lie near
LDDT_CUTOFFS = (0.5, 1, 2, 4)
LDDT_RADIUS = 15    # of the true neighbours that count


def distances(points):
    """(L, L)"""
    return np.linalg.norm(points[:, None] - points, axis=-1)


def moved(model, true, chosen):
    """Models (S, L, 3) on the true points: the chosen ones, (S, L) bool, are superposed with the least RMSD
    (Kabsch 1976, doi:10.1107/S0567739476001873), without mirroring."""
    share = chosen / chosen.sum(1, keepdims=True)
    middle, goal = (share @ model)[:, None], (share @ true)[:, None]  # (S, 1, 3)
    a = model - middle
    u, _, v = np.linalg.svd(np.einsum("sl,sli,slj->sij", share, a, true - goal))
    u[:, :, 2] *= np.sign(np.linalg.det(u @ v))[:, None]
    return a @ (u @ v) + goal


def superposed(model, true, chosen):
    """How far each residue lies from its partner, (S, L), when the chosen ones are superposed."""
    return np.linalg.norm(moved(model, true, chosen) - true, axis=-1)


def fragments(size):
    """(S, L) bool: pieces of the chain that a superposition may start from, from the whole down to SHORTEST
    residues."""
    pieces, length = [], size
    while length >= min(SHORTEST, size):
        step = max(length // 2, 1)
        starts = sorted({*range(0, size - length + 1, step), size - length})
        pieces += [(start, start + length) for start in starts]
        length = length // 2 if length > 1 else 0
    place = np.arange(size)
    return np.array([(place >= first) & (place < end) for first, end in pieces])


def searched(model, true, score, cutoff):
    """The best score(distances (S, L)) -> (S,) of superpositions that start from pieces and go on with what
    lies within the cutoff, which grows where less than FEWEST residues do."""
    chosen, best = fragments(len(model)), -np.inf
    for _ in range(ROUNDS):
        away = superposed(model, true, chosen)
        best = max(best, score(away).max())
        reach = np.maximum(cutoff, np.sort(away, axis=1)[:, min(FEWEST, len(model)) - 1])
        following = np.unique(away <= reach[:, None], axis=0)
        if following.shape == chosen.shape and (following == chosen).all():
            break
        chosen = following
    return float(best)


def tm_scale(residues):
    """d0, Å."""
    return max(1.24 * max(residues - 15, 0) ** (1 / 3) - 1.8, 0.5)


def tm_score(model, true):
    """Of models (L, 3) and true atoms (L, 3), 0 to 1; a share of all L residues."""
    scale = tm_scale(len(true))
    return max(searched(model, true, lambda d: (1 / (1 + (d / scale) ** 2)).mean(1), cutoff)
               for cutoff in (scale, max(scale, 4.5), 8.0))


def rmsd(model, true):
    """Of all residues, superposed."""
    return float(np.sqrt((superposed(model, true, np.ones((1, len(model)), bool)) ** 2).mean()))


def lddt(model, true):
    """(L,) share of each residue's true distances within LDDT_RADIUS that the model has within 0.5, 1, 2
    and 4 Å; NaN where it has no neighbour."""
    wanted, reached = distances(true), distances(model)
    counts = (wanted < LDDT_RADIUS) & ~np.eye(len(true), dtype=bool)
    error = np.abs(wanted - reached)
    kept = np.mean([error < cutoff for cutoff in LDDT_CUTOFFS], axis=0) * counts
    with np.errstate(invalid="ignore"):
        return kept.sum(1) / counts.sum(1)


def compared(model, true):
    """All of them for CA atoms (L, 3); residues whose true atom is NaN are left out. None where fewer than
    FEWEST are left."""
    known = np.isfinite(true).all(axis=1)
    if known.sum() < FEWEST:
        return None
    model, true = np.asarray(model, float)[known], np.asarray(true, float)[known]
    return dict(tm_score=tm_score(model, true), lddt_ca=float(np.nanmean(lddt(model, true))),
                rmsd=rmsd(model, true), residues_compared=int(known.sum()))
