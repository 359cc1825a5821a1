"""How sure a fold is, residue by residue: pLDDT from the distogram's own spread.

If the distogram is true, the chance that the true distance of two residues lies within 0.5, 1, 2 or 4 Å of
the fold's is known, and so is the lDDT to be expected. Distograms are too sure or too unsure, folds do not
use all of them; a straight line, fitted to measured lDDT-CA, corrects the mean of that. Letters in shapes:
L residues.
"""
import torch

from tiny_openfold.proteins.structure_metrics import LDDT_CUTOFFS, LDDT_RADIUS


def line_of(card):
    """(intercept, slope, share of it at uncertain residues, data that it was measured on) of the line from
    expected to measured lDDT-CA in a model's card; (0, 1, 1, None) where there is none. Raises
    AttributeError, KeyError, TypeError or ValueError for what is no line."""
    line = card.get("plddt") or dict(intercept=0.0, slope=1.0, measured_on=None)
    share = line.get("uncertain_share", 1.0)
    return float(line["intercept"]), float(line["slope"]), float(share), line["measured_on"]


def expected_lddt(probability, centres, anchors):
    """(L,) lDDT that a fold would have if the distogram were true; NaN where no neighbour is probable.
    probability (L, L, bins), centres (bins,) Å, anchors (L, 3): the atoms that the distogram is about."""
    distances = torch.cdist(anchors[None], anchors[None])[0]
    weight, kept = torch.zeros_like(distances), torch.zeros_like(distances)
    for bin_, centre in enumerate(centres.tolist()):  # each alone, or long chains would not fit
        if centre < LDDT_RADIUS:
            chance, error = probability[..., bin_], (distances - centre).abs()
            weight += chance
            held = sum((error < cutoff).to(chance.dtype) for cutoff in LDDT_CUTOFFS)
            kept += chance * held / len(LDDT_CUTOFFS)
    for matrix in (weight, kept):
        matrix.fill_diagonal_(0)
    total = weight.sum(1)
    return torch.where(total > 0.5, kept.sum(1) / total, float("nan"))  # half a neighbour is none


def plddt(expected, intercept=0.0, slope=1.0, uncertain_share=1.0, uncertain=()):
    """(L,) 0 to 100, as in a B-factor column; 0 where nothing can be expected. uncertain: residues, from 0,
    for which there are next to no rows, and which keep uncertain_share of it."""
    percent = (100 * (intercept + slope * expected)).clamp(0, 100).nan_to_num(0)
    percent[list(uncertain)] *= uncertain_share
    return percent
