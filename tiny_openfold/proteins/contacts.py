"""What a model says of one protein: contacts and distances, and how right they are where a structure is
known."""
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch

from fusion_lab.training.feeding import to_device
from tiny_openfold.proteins import CONTACT_DISTANCE
from tiny_openfold.proteins.files import Protein
from tiny_openfold.proteins.orientations import BINS
from tiny_openfold.proteins.structure_metrics import LDDT_CUTOFFS, LDDT_RADIUS

SEPARATION = 6  # contacts between residues nearer along the chain say nothing about the fold
LONG_RANGE = 24  # residues apart; such contacts say most about the fold
MAPS = ("contact_probability", "distances")  # outputs of the model, (L, L)
OUTPUTS = (*MAPS, "distogram_logits", *BINS)  # and with bins, (L, L, bins); some models have no BINS


@torch.no_grad()
def run_model(model, batch, device, dtype=None, wanted=MAPS):
    """{output: (L, L) or (L, L, bins)} of a batch of one, float32 on the CPU. No losses are computed."""
    inputs = {name: values for name, values in batch.items() if name not in ("coords", "coord_mask")}
    with torch.autocast(device.type, dtype, dtype is not None):
        output = model(**to_device(inputs, device))
    return {name: output[name][0].float().cpu() for name in wanted if name in output}


@dataclass
class Prediction:
    """A protein of L residues and what the model says of it; what pictures, tables and figures are made
    of."""
    protein: Protein  # its coordinates are NaN where there is no structure
    output: dict      # of run_model()

    @property
    def probability(self):
        """(L, L) of a contact, numpy"""
        return self.output["contact_probability"].numpy()

    @property
    def distances(self):
        """(L, L) predicted, Å, numpy"""
        return self.output["distances"].numpy()

    @cached_property
    def coords(self):
        """(coordinates (L, 3), 0 where there are none; coord_mask (L,))"""
        seen = np.isfinite(self.protein.coords).all(axis=1)
        return torch.from_numpy(np.nan_to_num(self.protein.coords)), torch.from_numpy(seen).float()

    @property
    def known(self):
        """Whether there is a structure."""
        return bool(self.coords[1].any())

    @cached_property
    def true(self):
        """(L, L) Å, NaN where a residue has no coordinates, numpy"""
        return true_distances(*self.coords).numpy()

    @cached_property
    def precision(self):
        """contact_precision(); {} without a structure."""
        return contact_precision(self.output["contact_probability"], *self.coords) if self.known else {}

    @property
    def chosen(self):
        """(i, j), i < j, numpy: the L/2 most probable pairs, which precision counts. Without a structure all
        residues count."""
        mask = self.coords[1] if self.known else torch.ones(self.protein.length)
        return tuple(index[:half_length(mask)].numpy()
                     for index in ranked_pairs(self.output["contact_probability"], mask))

    @property
    def missing(self):
        """(L,) bool, residues that the structure lacks; none without a structure."""
        return (self.coords[1] == 0).numpy() & self.known

    def best(self):
        """[(i, j, probability, distance)], positions from 1, of all pairs SEPARATION apart, best first."""
        i, j = ranked_pairs(self.output["contact_probability"], torch.ones(self.protein.length))
        probability, distances = (self.output[name][i, j].tolist() for name in MAPS)
        return list(zip((i + 1).tolist(), (j + 1).tolist(), probability, distances, strict=True))


# --- Figures ------------------------------------------------------------------------------------------------


def true_distances(coords, coord_mask):
    """(S, S) Å, NaN where a residue has no coordinates. coords (S, 3), coord_mask (S,)."""
    seen = coord_mask.bool()
    distances = (coords[:, None] - coords[None]).norm(dim=-1)
    return distances.masked_fill(~(seen[:, None] & seen), float("nan"))


def ranked_pairs(probability, coord_mask, separation=SEPARATION):
    """(i, j), i < j, of the pairs that count, most probable first: so many residues apart, both residues with
    coordinates. probability (S, S), coord_mask (S,)."""
    seen = coord_mask.bool()
    i, j = torch.triu_indices(len(seen), len(seen), separation, device=seen.device)
    both = seen[i] & seen[j]
    i, j = i[both], j[both]
    order = probability[i, j].argsort(descending=True, stable=True)  # ties alike on every device
    return i[order], j[order]


def half_length(coord_mask):
    """L/2, of the L residues with coordinates."""
    return max(int(coord_mask.sum()) // 2, 1)


def contact_precision(probability, coords, coord_mask, separation=SEPARATION):
    """Share of true contacts among the L/2 and L most probable pairs so many residues apart (L residues with
    coordinates), and among all such pairs; NaN where there are none. probability (S, S), of any scores that
    are high for contacts; coords (S, 3), coord_mask (S,)."""
    i, j = ranked_pairs(probability, coord_mask, separation)
    contact = ((coords[i] - coords[j]).norm(dim=-1) < CONTACT_DISTANCE).float()
    return dict(p_l2=contact[:half_length(coord_mask)].mean().item(),
                p_l=contact[:int(coord_mask.sum())].mean().item(), chance=contact.mean().item())


def distance_lddt(distances, coords, coord_mask):
    """lDDT of predicted distances (S, S) Å, without a structure: of each residue's true distances within
    LDDT_RADIUS the share that is met within 0.5, 1, 2 and 4 Å, on average over residues. coords (S, 3),
    coord_mask (S,). 0 to 1; 0 where no two residues are that near."""
    wanted = true_distances(coords, coord_mask).fill_diagonal_(float("nan"))
    near, error = wanted < LDDT_RADIUS, (distances - wanted).abs()
    kept = sum((error < cutoff) & near for cutoff in LDDT_CUTOFFS) / len(LDDT_CUTOFFS)
    return (kept.sum(1) / near.sum(1)).nanmean().nan_to_num().item()
