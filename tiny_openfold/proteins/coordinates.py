"""How many residues of real proteins have coordinates: few of them teach little, and nobody would see it."""
import sys

import numpy as np

from fusion_lab.training import torchrun
from fusion_lab.training.files import UserError, printable

FEW = 0.5  # share of a protein's residues below which there is a warning


def located(protein):
    """How many residues have coordinates."""
    return int(np.isfinite(protein.coords).all(axis=1).sum())


def below(proteins, share):
    """The proteins less than such a share of which has coordinates, in words; "" if there are none."""
    return ", ".join(f"{printable(protein.name)} ({located(protein)} of {protein.length} residues)"
                     for protein in proteins if located(protein) < share * protein.length)


def require_coordinates(proteins, least):
    """One line on stderr for proteins less than half of which has coordinates. Raises UserError where it is
    less than `least`, --min-coordinates."""
    if bare := below(proteins, least):
        raise UserError(f"too few coordinates in {bare}: fewer than --min-coordinates {least:g}; "
                        "is it the right structure? A lower --min-coordinates takes it as it is")
    if torchrun.first() and (few := below(proteins, FEW)):
        print(f"warning: less than half has coordinates in {few}", file=sys.stderr)
