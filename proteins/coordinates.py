"""How many residues of real proteins have coordinates: few of them teach little, and nobody would see it."""
import sys

import numpy as np

from fusion_lab.training import torchrun
from fusion_lab.training.files import UserError, printable

FEW = 0.5   # share of a protein's residues below which there is a warning
NAMED = 4   # proteins in a line, at most


def located(protein):
    """How many residues have coordinates."""
    return int(np.isfinite(protein.coords).all(axis=1).sum())


def sentence(proteins):
    return (f"{sum(map(located, proteins))} of {sum(protein.length for protein in proteins)} residues have "
            "coordinates")


def listed(proteins):
    named = ", ".join(f"{printable(protein.name)} ({located(protein)} of {protein.length} residues)"
                      for protein in proteins[:NAMED])
    return named + (f" and {len(proteins) - NAMED} more" if len(proteins) > NAMED else "")


def require_coordinates(proteins, least):
    """One line on stderr for proteins less than half of which has coordinates. Raises UserError where it is
    less than `least`, --min-coordinates."""
    shares = [located(protein) / protein.length for protein in proteins]
    if bare := [protein for protein, share in zip(proteins, shares, strict=True) if share < least]:
        raise UserError(f"too few coordinates in {listed(bare)}: fewer than --min-coordinates {least:g}; "
                        "is it the right structure? A lower --min-coordinates takes it as it is")
    few = [protein for protein, share in zip(proteins, shares, strict=True) if share < FEW]
    if few and torchrun.first():
        print(f"warning: less than half has coordinates in {listed(few)}", file=sys.stderr)
