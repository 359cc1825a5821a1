"""protein_data against real files with known answers, and against each way such a file can differ."""
import gzip
import re
import shutil
import sys

import numpy as np
import pytest

from tests.proteins.structures import (
    CODES,
    as_cif,
    atom,
    letters,
    model,
    one_line_error,
    read_alignment,
    write,
    write_model,
)
from tests.support import require_shared
from tiny_openfold.proteins import files
from tiny_openfold.proteins.files import load_families, load_protein, map_query, read_structure
from tiny_openfold.proteins.matching import align

pytest.importorskip("gemmi")

def data(*parts):
    return require_shared("data", *parts)


def contact_share(coords, places=None):
    """Share of CB < 8 Å among residue pairs at least six apart."""
    places = np.arange(len(coords)) if places is None else places
    distances = np.linalg.norm(coords[:, None] - coords, axis=-1)
    pairs = (places[None] - places[:, None] >= 6) & np.isfinite(distances)
    return (distances[pairs] < 8).mean()


def columns_with_coords(coords):
    return np.flatnonzero(np.isfinite(coords).all(1)).tolist()


# --- Real pairs -----------------------------------------------------------------------------------------

PAIRS = [  # alignment, structure, chain, query; rows; L query, mapped, identical, located; share of contacts
    ("pairs/1a3a_A.a3m", "pairs/1a3a.pdb", "A", None, 1303, 145, 145, 145, 145, 0.033),
    # GLU 78 of 3BR8 has no CB in the model
    ("pairs/3BR8_A.a3m", "pairs/3BR8_A.pdb", "A", None, 560, 90, 90, 90, 89, 0.058),
    ("pairs/4CUP_A.a3m", "pairs/4CUP.cif", "A", None, 569, 117, 115, 115, 115, 0.021),
    # the ground truth's .066 counts separation in alignment columns; in residues it is .064
    ("pairs/RRM_1.sto", "pairs/2X1B_A.pdb", "A", "RNA15_YEAST/20-91", 79, 72, 72, 72, 72, 0.064),
    # the query's X is a selenomethionine: mapped, neither identical nor different
    ("nasty/1pko_A.a3m", "nasty/1pko.pdb", "A", None, 616, 139, 124, 123, 124, 0.043),
]


NUMBERED = {"pairs/1a3a.pdb": ("4", "148"), "pairs/4CUP.cif": ("1856", "1970")}  # first and last of the file


@pytest.mark.parametrize("pair", PAIRS, ids=lambda pair: pair[1])
def test_pair_has_the_known_mapping(pair):
    msa_file, structure_file, chain_name, query, rows, length, mapped, identical, located, share = pair
    protein = load_protein(data(msa_file), data(structure_file), chain_name, query)
    chain, = read_structure(data(structure_file), chain_name)
    index, same, different = map_query(protein.msa[0], chain)
    assert protein.msa.shape == (rows, length) and protein.msa.dtype == np.uint8
    assert ((index >= 0).sum(), same, different) == (mapped, identical, 0)
    assert (np.diff(index[index >= 0]) > 0).all()
    assert protein.coords.shape == (length, 3) and protein.coords.dtype == np.float32
    assert np.isfinite(protein.coords).all(1).sum() == located
    assert round(contact_share(protein.coords), 3) == share
    numbered = [number for number in protein.numbers if number]
    assert len(protein.numbers) == length
    assert (numbered[0], numbered[-1]) == NUMBERED.get(structure_file, (numbered[0], numbered[-1]))


@pytest.mark.parametrize("suffix", [".pdb", ".cif"])
def test_residue_numbers_are_the_files_own(tmp_path, suffix):
    """Negative, with insertion codes, with a residue that the file lacks and one without CB."""
    numbers, sequence = ["-1", "0", "1", "2", "2A", "2B", "3", "6", "7", "8"], "MKVLAWDERQ"
    path = write_model(tmp_path / "x.pdb", *(
        atom(name, CODES[letter], "B", int(number.rstrip("AB")), (3.8 * place, dy, 0),
             number[-1] if number[-1] in "AB" else " ")
        for place, (number, letter) in enumerate(zip(numbers, sequence, strict=True))
        for name, dy in (("N", 1), ("CA", 0), ("C", -1), ("CB", 1.5)) if (place, name) != (8, "CB")))
    msa = write(tmp_path / "x.a3m", f">q\nGG{sequence}\n")
    protein = load_protein(msa, as_cif(path) if suffix == ".cif" else path)
    assert protein.chain == "B" and protein.numbers == ("", "", *numbers)
    assert columns_with_coords(protein.coords) == [2, 3, 4, 5, 6, 7, 8, 9, 11]


def test_families_have_the_known_shapes_and_contact_shares(families_dir):
    table = re.findall(r"(?m)^\| (\w+_A) \| PF\d+ [^|]*\|[^|]*\| (\d+) \| (\d+) \([^|]*\| ([\d.]+) \|",
                       data("README.md").read_text())
    assert len(table) == 32
    proteins, _ = load_families(families_dir)
    assert [protein.name for protein in proteins] == sorted(name for name, *_ in table)
    by_name = {protein.name: protein for protein in proteins}
    for name, length, rows, share in table:
        assert by_name[name].msa.shape == (int(rows), int(length)), name
        assert round(contact_share(by_name[name].coords), 3) == float(share), name
        assert by_name[name].msa.max() <= files.GAP and (by_name[name].msa[0] < files.GAP).all()


# --- Structures, one way to differ at a time ------------------------------------------------------------

SEQUENCE = "MASGHKWDEF"


@pytest.fixture
def query(tmp_path):
    return write(tmp_path / "query.fasta", f">q\n{SEQUENCE}\n")


def test_a_structure_may_be_named_with_its_chain(tmp_path):
    mine = write(tmp_path / "mine:A", "")  # a file of this very name
    for given, *expected in (("x:B", "x", "B"), ("x", "x", None), ("x:", "x", None), ("C:/x", "C:/x", None),
                             ("C:/x:B", "C:/x", "B"), (mine, str(mine), None)):
        assert files.split_structure_argument(given) == (*expected,)


@pytest.mark.parametrize("name", ["x.PDB", "x.ent", "x.pdb.gz", "x.cif", "x.CIF.GZ", "misnamed.txt"])
def test_the_format_is_told_by_content(name, query, tmp_path):
    path = write_model(tmp_path / "x.pdb", *model(SEQUENCE), "TER")
    content = (as_cif(path) if ".cif" in name.lower() else path).read_bytes()
    path = write(tmp_path / name, gzip.compress(content) if name.lower().endswith("gz") else content)
    protein = load_protein(query, path)
    np.testing.assert_allclose(protein.coords[:, 0], 3.8 * np.arange(10), atol=1e-3)
    np.testing.assert_allclose(protein.coords[:, 1], [0 if a == "G" else -1.5 for a in SEQUENCE], atol=1e-3)


@pytest.mark.parametrize("end", ["\n", "\r\n"])
def test_atom_lines_only_with_odd_numbers_and_no_chain_name(end, query, tmp_path):
    lines = model(SEQUENCE, chain=" ", start=-3)
    lines = [line[:22] + "   2A" + line[27:] if line[22:26] == "   3" else line for line in lines]
    protein = load_protein(query, write(tmp_path / "x.pdb", "\ufeff" + end.join(lines)))
    assert columns_with_coords(protein.coords) == list(range(10)) and protein.chain == ""


@pytest.mark.parametrize("fmt", ["pdb", "cif"])
def test_only_the_protein_of_the_first_model_is_read(fmt, tmp_path):
    calcium = atom("CA", "CA", "A", 500, (1, 1, 1), record="HETATM").replace("  CA  ", " CA   ", 1)
    ligand = [line.replace("ATOM  ", "HETATM") for line in model("E", start=600)]
    water = [atom("O", "HOH", "A", 700 + i, (9, 9, i), record="HETATM") for i in range(3)]
    dna = [atom(name, base, "D", i, (4 * i, 20, 0)) for i, base in enumerate(["DA", "DC", "DG", "DT"])
           for name in ("P", "C1'", "N1")]
    first = [*model(SEQUENCE), "TER", *model("WYWYWY", chain="B"), "TER", *dna, "TER",
             calcium, *ligand, *water]
    second = [*model(SEQUENCE, beta=-9), "TER"]
    path = write_model(tmp_path / "x.pdb",
                       "MODEL        1", *first, "ENDMDL", "MODEL        2", *second, "ENDMDL")
    chains = read_structure(as_cif(path) if fmt == "cif" else path)
    assert [(c.name, *letters([c.sequence])) for c in chains] == [("A", SEQUENCE), ("B", "WYWYWY")]
    assert chains[0].coords[0, 1] == -1.5
    assert "'D'" in one_line_error(read_structure, path, "D")


@pytest.mark.parametrize("fmt", ["pdb", "cif"])
def test_modified_residues_belong_to_the_chain(fmt, tmp_path):
    path = write_model(tmp_path / "x.pdb", *model("AmDsEuF"), "TER")
    chain, = read_structure(as_cif(path) if fmt == "cif" else path)
    assert letters([chain.sequence]) == ["AMDSEXF"] and columns_with_coords(chain.coords) == list(range(7))


@pytest.mark.parametrize("fmt", ["pdb", "cif"])
def test_highest_occupancy_of_alternate_locations_and_residues(fmt, tmp_path):
    lines = model("AMDE", leave_out=[(1, "CB"), (2, "CB")])
    lines += [atom("CB", "MET", "A", 2, (1, 1, 1), alternate="A", occupancy=0.4),
              atom("CB", "MET", "A", 2, (2, 2, 2), alternate="B", occupancy=0.6)]
    lines = [line[:16] + "A" + line[17:54] + "  0.30" + line[60:] if line[22:26] == "   3" else line
             for line in lines]
    lines += [atom("CA", "ASN", "A", 3, (7.6, 0, 0), alternate="B", occupancy=0.7),
              atom("CB", "ASN", "A", 3, (3, 3, 3), alternate="B", occupancy=0.7)]
    lines.sort(key=lambda line: int(line[22:26]))
    path = write_model(tmp_path / "x.pdb", *lines, "TER")
    chain, = read_structure(as_cif(path) if fmt == "cif" else path)
    assert letters([chain.sequence]) == ["AMNE"]
    assert chain.coords[1:3].tolist() == [[2, 2, 2], [3, 3, 3]]


def test_no_cb_no_coordinates_except_glycine(query, tmp_path):
    path = write_model(tmp_path / "x.pdb", *model(SEQUENCE, leave_out=[(4, "CB")]))
    protein = load_protein(write(tmp_path / "gap.fasta", f">q\n-{SEQUENCE}\n"), path)
    assert columns_with_coords(protein.coords) == [0, 1, 2, 3, 5, 6, 7, 8, 9] and protein.left_out == 1
    trace = write_model(tmp_path / "ca.pdb", *(line for line in model(SEQUENCE) if line[12:16] == " CA "))
    error = one_line_error(load_protein, query, trace)
    assert "ca.pdb" in error and "only 1 of 10" in error


@pytest.mark.parametrize("sequence, missing", [
    ("ACDESPSFGHIK", (4, 5)), ("ACDESPSFGHIK", (5, 6)), ("ACDESSFGHIK", (4,)), ("ACDESSFGHIK", (5,))])
@pytest.mark.parametrize("seqres", [False, True])
def test_residue_beside_a_gap_stays_on_its_side(sequence, missing, seqres, tmp_path):
    """S-P-S with one S seen: the letters cannot tell which, the geometry of the chain can."""
    msa = write(tmp_path / "x.fasta", f">q\n{sequence}\n")
    header = [f"SEQRES   1 A   12  {' '.join(CODES[a] for a in sequence)}"] * seqres
    path = write_model(tmp_path / "x.pdb", *header, *model(sequence, skip=missing), "TER")
    located = columns_with_coords(coords := load_protein(msa, path).coords)
    assert located == [i for i in range(len(sequence)) if i not in missing]
    np.testing.assert_allclose(coords[located, 0], 3.8 * np.array(located), atol=1e-3)


def cif_with_labels(path, sequence, labels, entity=None, **kwargs):
    """mmCIF of `sequence` whose residues bear the given label_seq_id in the sequence of the entity."""
    import gemmi
    structure = gemmi.read_pdb_string("\n".join(model(sequence, **kwargs)))
    structure.setup_entities()
    structure.entities[0].full_sequence = [CODES[a] for a in entity or sequence]
    for residue, label in zip(structure[0]["A"], labels, strict=True):
        residue.label_seq = label
    structure.make_mmcif_document().write_file(str(path))
    return path


@pytest.mark.parametrize("alone", [4, 6, 8])
def test_mmcif_says_which_residue_was_seen(alone, tmp_path):
    """One S between two gaps: not even geometry can tell which of three it is, label_seq_id does."""
    sequence, located = "ACDESPSPSFGHIK", [0, 1, 2, 3, alone, 9, 10, 11, 12, 13]
    path = cif_with_labels(tmp_path / "x.cif", sequence, [i + 1 for i in located],
                           skip=set(range(4, 9)) - {alone})
    protein = load_protein(write(tmp_path / "x.fasta", f">q\n{sequence}\n"), path)
    assert columns_with_coords(protein.coords) == located


@pytest.mark.parametrize("sequence, labels, entity", [
    (SEQUENCE, range(10, 0, -1), None), (SEQUENCE, range(1, 11), "W" * 12), ("A" * 10, 10 * [3], None)])
def test_labels_that_make_no_sense_are_not_believed(sequence, labels, entity, tmp_path):
    path = cif_with_labels(tmp_path / "x.cif", sequence, labels, entity)
    assert letters([read_structure(path)[0].sequence]) == [sequence]
    protein = load_protein(write(tmp_path / "x.fasta", f">q\n{sequence}\n"), path)
    np.testing.assert_allclose(protein.coords[:, 0], 3.8 * np.arange(10), atol=1e-3)


def test_old_columns_behind_the_atoms_do_not_count(query, tmp_path):
    """Until 1996 PDB files ended lines with their entry and a number, where element and charge stand now."""
    old = [f"{line[:72]}1GDR{number:4d}" for number, line in enumerate(model(SEQUENCE), 86)]
    for lines in old, [f"{line[:78]}9X" for line in old]:
        path = write_model(tmp_path / "x.pdb", *lines)
        assert columns_with_coords(load_protein(query, path).coords) == [*range(10)]


@pytest.mark.parametrize("number", [lambda i: i % 7, lambda i: 5, lambda i: 9 - i if i > 4 else i])
def test_residues_of_one_number_are_kept_or_refused(number, query, tmp_path):
    path = write_model(tmp_path / "x.pdb", *(f"{line[:22]}{number(int(line[22:26])):4d}{line[26:]}"
                                             for line in model(10 * "A")), *model("WYWY", "B"))
    assert "chain 'A' has two residues" in one_line_error(read_structure, path)
    assert len(read_structure(path, "B")) == 1
    twos = write_model(tmp_path / "y.pdb", *(f"{line[:22]}{int(line[22:26]) // 2:4d}{line[26:]}"
                                             for line in model(SEQUENCE)))
    assert columns_with_coords(load_protein(query, twos).coords) == [*range(10)]


def test_chain_in_two_parts_is_one(query, tmp_path):
    path = write_model(tmp_path / "x.pdb", *model(SEQUENCE, skip=range(5, 10)), *model("WYWY", chain="B"),
                       *model(SEQUENCE, skip=range(5)))
    assert columns_with_coords(load_protein(query, path).coords) == list(range(10))


def test_cif_with_other_blocks_and_capital_keyword(query, tmp_path):
    text = as_cif(write_model(tmp_path / "x.pdb", *model(SEQUENCE))).read_text()
    text = "# comment\nDATA_other\n_a.b 1\n" + re.sub("(?m)^data_", "DATA_", text)
    assert np.isfinite(load_protein(query, write(tmp_path / "y.cif", text)).coords).all()


@pytest.mark.parametrize("mutations, accepted", [(2, True), (4, False)])
def test_point_mutants_pass_and_homologues_do_not(mutations, accepted, tmp_path):
    sequence = 3 * SEQUENCE
    path = write_model(tmp_path / "x.pdb", *model(sequence))
    for k in range(mutations):
        sequence = sequence[:4 + 7 * k] + "Y" + sequence[5 + 7 * k:]
    msa = write(tmp_path / "x.fasta", f">q\n{sequence}\n")
    if accepted:
        assert np.isfinite(load_protein(msa, path).coords).all()
    else:
        assert "26 agree, 4 differ" in one_line_error(load_protein, msa, path)


def test_a_short_exact_chain_goes_before_a_long_homologue(query, tmp_path):
    """Of A 8 residues agree and 2 differ, of B 8 and none."""
    path = write_model(tmp_path / "x.pdb", *model("MAYGHKWDYFC"), *model("SGHKWDEF", "B"))
    assert load_protein(query, path).chain == "B"


def test_a_chain_of_which_less_than_half_was_seen(tmp_path):
    """8 of 20 residues: enough, since they are what the structure has."""
    sequence = SEQUENCE + "NQRSTVYLIP"
    header = [f"SEQRES   {row + 1} A   20  {' '.join(CODES[a] for a in sequence[13 * row:13 * row + 13])}"
              for row in (0, 1)]
    path = write_model(tmp_path / "x.pdb", *header, *model(sequence, skip=range(4, 16)), "TER")
    msa = write(tmp_path / "x.fasta", f">q\n{sequence}\n")
    assert columns_with_coords(load_protein(msa, path).coords) == [0, 1, 2, 3, 16, 17, 18, 19]


def test_chains_break_where_their_ca_atoms_do(tmp_path):
    """Not where CB atoms point to opposite sides, nor where a glycine has none."""
    lines = model("AAGGAA")
    lines = [line[:38] + f"{8.0 if line[22:26] == '   2' else -1.5:8.3f}" + line[46:] if line[12:16] == " CB "
             else line for line in lines]
    far = [f"{line[:30]}{float(line[30:38]) + 4 * (int(line[22:26]) > 3):8.3f}{line[38:]}" for line in lines]
    for atoms, breaks in ((lines, [0, 6]), (far, [0, 3, 6])):
        chain, = read_structure(write_model(tmp_path / "x.pdb", *atoms))
        assert np.flatnonzero(chain.breaks).tolist() == breaks


def test_query_longer_and_shorter_than_the_chain(tmp_path):
    path = write_model(tmp_path / "x.pdb", *model("GVLIPFYWTSCMAGHKWDEFNQRST"))
    domain = load_protein(write(tmp_path / "d.fasta", ">q\nCMAGHKWDEF\n"), path)
    np.testing.assert_allclose(domain.coords[:, 0], 3.8 * np.arange(10, 20), atol=1e-3)
    tagged = load_protein(write(tmp_path / "t.fasta", ">q\nHHHHHHGVLIPFYWTSCMAGHKWDEFNQRSTEKEK\n"), path)
    assert columns_with_coords(tagged.coords) == list(range(6, 31))
    mutant = load_protein(write(tmp_path / "m.fasta", ">q\nGVLIPFYWTSCMAAHKWDEFNQRST\n"), path)
    assert columns_with_coords(mutant.coords) == list(range(25))
    deletion = load_protein(write(tmp_path / "x.fasta", ">q\nGVLIPFYWTSWDEFNQRST\n"), path)
    np.testing.assert_allclose(deletion.coords[:, 0], 3.8 * np.r_[0:10, 16:25], atol=1e-3)


def test_of_places_that_fit_alike_the_near_one_is_taken():
    """M stands behind a break, and twice in the query: beside what comes before, or four residues away."""
    query, chain = files._tokens(b"WWWWWMKKKM"), files._tokens(b"WWWWWM")
    found = align(query, chain, np.array([True, False, False, False, False, True, True]), files.UNKNOWN)
    assert found.tolist() == [0, 1, 2, 3, 4, 5, -1, -1, -1, -1]


@pytest.mark.parametrize("chain, expected", [("MKWW", [0, 1]), ("WWMK", [2, 3]), ("MK" + 300 * "W", [0, 1]),
                                             (300 * "W" + "MK", [300, 301]), ("W" + "MK" + "W", [1, 2]),
                                             ("MKWMKW", [3, 4])])
def test_ends_of_the_chain_beyond_the_query_are_free(chain, expected):
    """However long they are: a gap within costs more than these two matches are worth."""
    breaks = np.isin(np.arange(len(chain) + 1), (0, len(chain)))
    found = align(files._tokens(b"MK"), files._tokens(chain.encode()), breaks, files.UNKNOWN)
    assert found.tolist() == expected


def test_a_long_query_does_not_match_by_chance(tmp_path):
    """With gaps of any length at one price, 50,000 random letters match 40 residues."""
    letters_ = np.random.default_rng(0).choice(list(files.AMINO_ACIDS), 50_040)
    path = write_model(tmp_path / "x.pdb", *model("".join(letters_[:40])))
    alignment = write(tmp_path / "x.a3m", f">q\n{''.join(letters_[40:])}\n")
    assert "does not match" in one_line_error(load_protein, alignment, path)


@pytest.mark.parametrize("first, plddt, expected", [
    ([], False, False), ([], True, True), (["EXPDTA    X-RAY DIFFRACTION"], True, False),
    (["EXPDTA    THEORETICAL MODEL"], False, True), (["PARENT N/A"], False, True),
    (["TITLE     ALPHAFOLD MONOMER V2.0 PREDICTION FOR X"], False, True),
    (["EXPDTA    X-RAY DIFFRACTION", "REMARK 200 STARTING MODEL: ALPHAFOLD"], False, False),
    (["REMARK   1 MODEL CREATED WITH SOMETHING"], False, True), ([], 20, False), ([], -20, False),
    (["CRYST1    1.000    1.000    1.000  90.00  90.00  90.00 P 1           1"], True, True),
    (["CRYST1   52.000   58.600   61.900  90.00  90.00  90.00 P 21 21 21    8"], True, False),
    (["TITLE     A PREDICTED PROTEIN", "REMARK   2 RESOLUTION.    3.60 ANGSTROMS."], True, False),
    ([atom("O", "HOH", "W", 1, (9, 9, 9))], True, False),
    ([atom("CA", "CA", "W", 1, (9, 9, 9), occupancy=0.5)], True, False)])
def test_a_prediction_is_told_from_an_experiment(first, plddt, expected, query, tmp_path):
    """By what its file says, or by one B-factor for all atoms of a residue, as pLDDT is written, unless facts
    speak against it."""
    lines = [f"{line[:60]}{50 + plddt * int(line[22:26]):6.2f}{line[66:]}" for line in model(SEQUENCE)]
    path = write_model(tmp_path / "x.pdb", *first, *lines)
    assert bool(read_structure(path)[0].predicted) is expected
    assert any("predicted structure" in remark for remark in load_protein(query, path).remarks) is expected
    if not first:
        text = as_cif(path).read_text() + "_ma_model_list.ordinal_id 1\n"
        assert read_structure(write(tmp_path / "y.cif", text))[0].predicted


def test_a_consensus_as_the_query_is_said(tmp_path):
    path = write(tmp_path / "x.a3m", "#cluster\n>c_consensus of 2\nMKTAY\n>q\nMKTAY\n")
    remark, = files.load_alignment(path).remarks
    assert "consensus" in remark and "\n" not in remark and not files.load_alignment(path, "q").remarks


def test_wrong_row_and_wrong_chain_are_named(tmp_path):
    other = "WYWYTPTPLVLVNQNQ"
    path = write_model(tmp_path / "x.pdb", *model(SEQUENCE), "TER", *model(other, chain="B"), "TER")
    msa = write(tmp_path / "x.fasta", f">first\n{other[:10]}\n>second row\n{SEQUENCE}\n")
    assert load_protein(msa, path).chain == "B"
    assert "--query 'second'" in one_line_error(load_protein, msa, path, chain="A")
    assert load_protein(msa, path, chain="A", query="second").sequence == SEQUENCE
    alone = write(tmp_path / "alone.fasta", f">first\n{other}\n")
    assert f"use {path}:B" in one_line_error(load_protein, alone, path, chain="A")


@pytest.mark.parametrize("name, text", [
    ("x.pdb", b"hello\n"), ("x.pdb", bytes(range(256)) * 20), ("x.cif", b"data_x\n_a 1\n"), ("x.cif", b""),
    ("x.cif", b"data_x\nloop_\n_atom_site.id\n_atom_site.type_symbol\n1 N 2\n"), ("x.pdb", b"ATOM\n"),
    ("x.pdb.gz", gzip.compress(b"ATOM  " * 99, mtime=0)[:-5]), ("x.pdb", b">q\nACDEF\n"),
    ("x.pdb", atom("CA", "CA", "A", 1, (0, 0, 0), record="HETATM").encode()),
])
def test_bad_structure_is_one_line_with_the_file(name, text, tmp_path):
    assert name in one_line_error(read_structure, write(tmp_path / name, text))


@pytest.mark.parametrize("read", [read_alignment, read_structure, load_families])
def test_missing_file_and_directory(read, tmp_path):
    assert "absent.pdb" in one_line_error(read, tmp_path / "absent.pdb")
    if read is not load_families:
        assert "directory" in one_line_error(read, tmp_path)


def test_an_alignment_is_no_structure_and_a_structure_no_alignment(tmp_path):
    for text in (">q\nACDEF\n", "# STOCKHOLM 1.0\nq ACDEF\n//\n"):
        assert "this is an alignment" in one_line_error(read_structure, write(tmp_path / "x.pdb", text))
    path = write_model(tmp_path / "y.pdb", *model("ACDEF"))
    for one in (path, as_cif(path)):
        assert "this is a PDB or mmCIF file" in one_line_error(read_alignment, one)
    bases = [atom("C1'", "DA", "D", i, (4 * i, 0, 0)) for i in range(4)]
    assert "chains is a protein" in one_line_error(read_structure, write_model(tmp_path / "x.pdb", *bases))


# --- Directories and packages ---------------------------------------------------------------------------

def family(directory, name, msa=".a3m", structure=".pdb"):
    directory.mkdir(exist_ok=True)
    for suffix, source in ((msa, "3I2Z_A.a3m"), (structure, "3I2Z_A.pdb")):
        if suffix:
            content = data("families", source).read_bytes()
            write(directory / (name + suffix), gzip.compress(content) if suffix.endswith(".gz") else content)


def test_alignments_in_a_directory_are_told_by_their_suffix(tmp_path):
    suffixes = "a2m a3m afa aln clustal clw fa faa fas fasta msa sto stk stockholm".split()
    paths = [write(tmp_path / f"x.{suffix}{end}", "") for suffix in suffixes for end in ("", ".gz", ".txt")]
    assert {*files.alignments_in(tmp_path)} == {str(path) for path in paths if path.suffix != ".txt"}


def test_families_in_other_dress_are_the_same(tmp_path):
    family(tmp_path / "d", "b", ".a3m.gz", ".pdb.gz")
    family(tmp_path / "d", "a", ".A3M", ".ENT")
    family(tmp_path / "d", "c.1", ".fasta", ".pdb")
    shutil.copy(data("nasty/1pko.pdb"), tmp_path / "d" / ".hidden.pdb")
    write(tmp_path / "d" / "notes.txt", "x")
    (tmp_path / "d" / "folder.pdb").mkdir()
    (first, *others), _ = load_families(tmp_path / "d")
    assert [first.name, *(protein.name for protein in others)] == ["a", "b", "c.1"]
    assert first.msa.shape == (807, 71)
    for protein in others:
        assert (protein.msa == first.msa).all()
        np.testing.assert_array_equal(protein.coords, first.coords)


@pytest.mark.parametrize("files, expected", [
    ([("a", ".a3m", None)], ["no families", "a.a3m"]),
    ([("b", None, ".pdb")], ["no families", "b.pdb"]),
    ([("a", ".a3m", ".pdb"), ("a", ".fasta", None)], ["a.a3m", "a.fasta", "keep one"]),
    ([("a", ".a3m", ".pdb"), ("a", None, ".pdb.gz")], ["a.pdb", "a.pdb.gz", "keep one"]),
    ([], ["no families"]),
])
def test_directory_that_is_not_pairs(files, expected, tmp_path):
    (tmp_path / "d").mkdir()
    for name, msa, structure in files:
        family(tmp_path / "d", name, msa, structure)
    error = one_line_error(load_families, tmp_path / "d")
    assert str(tmp_path / "d") in error and all(part in error for part in expected), error


def test_strays_beside_whole_families_are_named_and_left_out(tmp_path):
    for name, msa, structure in (("a", ".a3m", ".pdb"), ("b", None, ".pdb"), ("c", ".fasta", None)):
        family(tmp_path / "d", name, msa, structure)
    proteins, strays = load_families(tmp_path / "d")
    assert [protein.name for protein in proteins] == ["a"] and strays == ["b.pdb", "c.fasta"]


def test_without_gemmi_alignments_are_still_read(monkeypatch):
    monkeypatch.setitem(sys.modules, "gemmi", None)
    assert read_alignment(data("nasty/globins4.sto")).shape == (4, 146)
