"""A predicted structure as PDB, for any viewer. Writes only; files.py reads.

Atoms are N, CA, C, O and CB, which glycine does not have. Residues are numbered from 1 along the query, the
chain is A, and the B-factor column holds pLDDT, 0 to 100, as in AlphaFold's files. An X of the query is UNK.
The format's columns end at residue 9,999; the memory of the model ends long before.
"""
import re

from fusion_lab.training.files import write_text
from tiny_openfold.proteins.files import AMINO_ACIDS
from tiny_openfold.proteins.geometry import ATOMS

CODES = dict(zip(AMINO_ACIDS, ("ALA CYS ASP GLU PHE GLY HIS ILE LYS LEU MET ASN PRO GLN ARG SER THR VAL TRP "
                               "TYR").split(), strict=True))


def plain(text, longest):
    """What every reader of these files takes: letters of any script, and no control characters."""
    return re.sub(r"[^\w.,:;()/+ -]", "_", text)[:longest]


def write_pdb(path, name, sequence, atoms, plddt, remarks=()):
    """atoms (L, 5, 3) Å, plddt (L,)."""
    codes = [CODES.get(letter, "UNK") for letter in sequence]
    lines = [f"HEADER    PREDICTED STRUCTURE{'':24}", f"TITLE     {plain(name, 60).upper()}",
             *(f"REMARK   1 {plain(text, 68)}" for text in remarks)]
    for row in range(0, len(codes), 13):
        lines.append(f"SEQRES {row // 13 + 1:3d} A {len(codes):4d}  {' '.join(codes[row:row + 13])}")
    serial = 0
    for number, (residue, places) in enumerate(zip(codes, atoms, strict=True), 1):
        for atom, (x, y, z) in zip(ATOMS, places, strict=True):
            if (residue, atom) != ("GLY", "CB"):
                serial += 1
                lines.append(f"ATOM  {serial:5d}  {atom:<3} {residue} A{number:4d}    {x:8.3f}{y:8.3f}"
                             f"{z:8.3f}{1:6.2f}{plddt[number - 1]:6.2f}          {atom[0]:>2}")
    lines.append(f"TER   {serial + 1:5d}      {residue} A{number:4d}")
    write_text(path, "\n".join([*lines, f"{'END':80}", ""]))
