"""Structures made up for tests: PDB lines of an extended chain, and the same as mmCIF; what tests of readers
ask."""
import pytest

from fusion_lab.training.errors import UserError
from tiny_openfold.proteins import files

CODES = dict(zip("ACDEFGHIKLMNPQRSTVWYmsu", (
    "ALA CYS ASP GLU PHE GLY HIS ILE LYS LEU MET ASN PRO GLN ARG SER THR VAL TRP TYR MSE SEP UNK").split(),
    strict=True))


def write(path, text):
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


def atom(name, residue, chain, number, xyz, insertion=" ", alternate=" ", occupancy=1.0, record="ATOM"):
    x, y, z = xyz
    return (f"{record:<6}{1:5d}  {name:<3}{alternate}{residue:>3} {chain}{number:4d}{insertion}   "
            f"{x:8.3f}{y:8.3f}{z:8.3f}{occupancy:6.2f}{10:6.2f}          {name[0]:>2}")


def model(sequence, chain="A", start=1, skip=(), beta=-1.5, leave_out=()):
    """PDB lines of an extended chain: residue i has CA at (3.8 i, 0, 0) and CB at (3.8 i, beta, 0)."""
    lines = []
    for i, letter in enumerate(sequence):
        for name, dx, dy in (("N", -1.2, 0), ("CA", 0, 0), ("C", 1.2, 0.5), ("O", 1.2, 1.7), ("CB", 0, beta)):
            if i not in skip and (i, name) not in leave_out and (letter, name) != ("G", "CB"):
                lines.append(atom(name, CODES[letter], chain, start + i, (3.8 * i + dx, dy, 0),
                                  record="HETATM" if letter.islower() else "ATOM"))
    return lines


def write_model(path, *lines, end="\n"):
    return write(path, end.join([*lines, "END", ""]))


def as_cif(path):
    """The same model as mmCIF, written by gemmi."""
    import gemmi
    structure = gemmi.read_structure(str(path))
    structure.setup_entities()
    structure.assign_label_seq_id()
    structure.make_mmcif_document().write_file(str(path.with_suffix(".cif")))
    return path.with_suffix(".cif")


def read_alignment(path, query=None):
    return files.load_alignment(path, query).msa


def letters(msa):
    return ["".join(files.LETTERS[token] for token in row) for row in msa]


def one_line_error(call, *args, **kwargs):
    with pytest.raises(UserError) as caught:
        call(*args, **kwargs)
    assert "\n" not in str(caught.value)
    return str(caught.value)
