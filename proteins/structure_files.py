"""A predicted structure as PDB and mmCIF, for any viewer. Writes only; files.py reads.

Atoms are N, CA, C, O and CB, which glycine does not have. Residues are numbered from 1 along the query, the
chain is A, and the B-factor column holds pLDDT, 0 to 100, as in AlphaFold's files. An X of the query is UNK.
"""
import re

from fusion_lab.training.files import write_text
from proteins.files import AMINO_ACIDS
from proteins.geometry import ATOMS

CODES = dict(zip(AMINO_ACIDS, ("ALA CYS ASP GLU PHE GLY HIS ILE LYS LEU MET ASN PRO GLN ARG SER THR VAL TRP "
                               "TYR").split(), strict=True))
LONGEST = 9999  # residues that a PDB file can number
COLUMNS = ("group_PDB id type_symbol label_atom_id label_alt_id label_comp_id label_asym_id label_entity_id "
           "label_seq_id pdbx_PDB_ins_code Cartn_x Cartn_y Cartn_z occupancy B_iso_or_equiv auth_seq_id "
           "auth_asym_id pdbx_PDB_model_num").split()


def code(letter):
    """The three letters of an amino acid."""
    return CODES.get(letter, "UNK")


def records(sequence, atoms):
    """[(atom's name, residue's code, its number, xyz)]; atoms (L, 5, 3) numpy."""
    return [(name, code(letter), number, xyz)
            for number, (letter, residue) in enumerate(zip(sequence, atoms, strict=True), 1)
            for name, xyz in zip(ATOMS, residue, strict=True) if (letter, name) != ("G", "CB")]


def plain(text, longest):
    """What every reader of these files takes."""
    return re.sub(r"[^A-Za-z0-9_.,:;()/+ -]", "_", text)[:longest]


def write_pdb(path, name, sequence, atoms, plddt, remarks=()):
    """atoms (L, 5, 3) Å, plddt (L,). Chains above LONGEST have mmCIF alone: nothing is written, None
    returned; else the path."""
    if len(sequence) > LONGEST:
        return None
    lines = [f"HEADER    PREDICTED STRUCTURE{'':24}", f"TITLE     {plain(name, 60).upper()}",
             *(f"REMARK   1 {plain(text, 68)}" for text in remarks)]
    for row in range(0, len(sequence), 13):
        codes = " ".join(code(letter) for letter in sequence[row:row + 13])
        lines.append(f"SEQRES {row // 13 + 1:3d} A {len(sequence):4d}  {codes}")
    for serial, (atom, residue, number, (x, y, z)) in enumerate(records(sequence, atoms), 1):
        lines.append(f"ATOM  {serial:5d}  {atom:<3} {residue} A{number:4d}    {x:8.3f}{y:8.3f}{z:8.3f}"
                     f"{1:6.2f}{plddt[number - 1]:6.2f}          {atom[0]:>2}")
    lines.append(f"TER   {serial + 1:5d}      {residue} A{number:4d}")
    write_text(path, "\n".join([*lines, "END", ""]))
    return path


def write_cif(path, name, sequence, atoms, plddt):
    """As write_pdb, for chains of any length."""
    def loop(category, columns, rows):
        return ["#", "loop_", *(f"_{category}.{column}" for column in columns), *rows]

    word = re.sub(r"[^A-Za-z0-9]", "_", name)[:40] or "fold"
    lines = [f"data_{word}", f"_entry.id {word}", "#", "_entity.id 1", "_entity.type polymer", "#",
             "_entity_poly.entity_id 1", "_entity_poly.type 'polypeptide(L)'",
             "_entity_poly.pdbx_strand_id A",
             *loop("struct_asym", ("id", "entity_id"), ["A 1"]),
             *loop("entity_poly_seq", ("entity_id", "num", "mon_id"),
                   [f"1 {number} {code(letter)}" for number, letter in enumerate(sequence, 1)])]
    rows = [f"ATOM {serial} {atom[0]} {atom} . {residue} A 1 {number} ? {x:.3f} {y:.3f} {z:.3f} 1.00 "
            f"{plddt[number - 1]:.2f} {number} A 1"
            for serial, (atom, residue, number, (x, y, z)) in enumerate(records(sequence, atoms), 1)]
    lines += loop("atom_site", COLUMNS, rows)
    lines += loop("ma_qa_metric", ("id", "mode", "name", "type"), ["1 local pLDDT pLDDT"])
    lines += loop("ma_qa_metric_local", ("label_asym_id", "label_comp_id", "label_seq_id", "metric_id",
                                         "metric_value", "model_id", "ordinal_id"),
                  [f"A {code(letter)} {number} 1 {plddt[number - 1]:.2f} 1 {number}"
                   for number, letter in enumerate(sequence, 1)])
    write_text(path, "\n".join([*lines, "#", ""]))
    return path
