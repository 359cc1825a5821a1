"""Alignments: what one format says, all say; whatever the bytes, an alignment or one line."""
import bz2
import gzip
import lzma
import re

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fusion_lab.training.errors import UserError
from tests.properties import cases
from tests.proteins.structures import letters, one_line_error, read_alignment, write
from tiny_openfold.proteins import files
from tiny_openfold.proteins.files import GAP, read_structure

PLAIN = ["ACDEF", "AC-EF", "GHIKL"]
SAME_ALIGNMENT = {  # file name, content: all the same three rows
    "plain": ("x.a3m", ">q\nACDEF\n>a\nAC-EF\n>b\nGHIKL\n"),
    "insertions": ("x.a3m", ">q\nACDEF\n>a\nACgg-EFwww\n>b\naGHIKL\n"),
    "masked query": ("x.a3m", ">q\nACdeF\n>a\nACgg-EF\n>b\nGHIKL\n"),
    "masked columns": ("x.a2m", ">q\nACdeF\n>a\nAC.eF\n>b\nGHikL\n"),
    "padded insertions": ("x.a2m", ">q\nAC..DEF\n>a\nACgg-EF\n>b\nGH.wIKL\n"),
    "dots as gaps": ("x.a3m", ">q\nACDEF\n>a\nACk.EF\n>b\nGHIKL\n"),
    "colabfold line": ("x.a3m", "#5\t1\n>101\nACDEF\n>a\t12\t0.5\nAC-EF\n>b\nGHIKL\n"),
    "colabfold homodimer": ("x.a3m", "#5\t2\n>101\nACDEF\n>a\nAC-EF\n>b\nGHIKL\n"),
    "NUL behind it": ("x.a3m", "\0>101\nACDEF\n>a\nAC-EF\n>b\nGHIKL\n\0\n"),
    "odd headers": ("x.a3m", ">>q\nACDEF\n>\nAC-EF\n> \tb\tc\nGHIKL\n"),
    "headers that are no text": ("x.a3m", b">q\xff\xe9\nACDEF\n>\x80\nAC-EF\n>b\nGHIKL\n"),
    "secondary structure": ("x.a3m", ">ss_pred\nHHHHC\n>ss_conf\n98765\n>q\nACDEF\n>a\nAC-EF\n>b\nGHIKL\n"),
    "columns without query": ("x.a3m", ">q\nA-CDEF\n>a\nAWC-EF\n>b\nGWHIKL\n"),
    "lowercase query of an A3M": ("x.a3m", ">q\nacdef\n>a\nAC-EF\n>b\nGHIwKL\n"),
    "all lowercase A3M": ("x.a3m", ">q\nacdef\n>a\nac-ef\n>b\nghikl\n"),
    "wrapped, spaced, blank lines": ("x.a3m", "\n>q\nACD\nEF\n\n>a\nAC-\n EF \n\n>b\nGHI KL"),
    "windows": ("x.a3m", "\ufeff>q\r\nACDEF\r\n>a\r\nAC-EF\r\n>b\r\nGHIKL\r\n"),
    "utf-16": ("x.a3m", ">q\nACDEF\n>a\nAC-EF\n>b\nGHIKL\n".encode("utf-16")),
    "old mac": ("x.fasta", ">q\rACDEF\r>a\rAC-EF\r>b\rGHIKL\r"),
    "end marks": ("x.fasta", ">q\nACDEF*\n>a\nAC-EF\n>b\nGHIKL*\n//\n"),
    "fasta in lowercase": ("x.FA", ">q\nacdef\n>a\nac~ef\n>b\nGHikl\n"),
    "fasta that is A3M": ("x.fasta", ">q\nACDEF\n>a\nACgg-EF\n>b\nGHIKL\n"),
    "stockholm": ("x.sto", "# STOCKHOLM 1.0\n#=GF ID x\n#=GS b DE hit\n#=GS q DE query\n"
                           "q ACDEF\n#=GR q PP 99999\na AC.EF\nb ghikl\n#=GC RF xxxxx\n//\n"),
    "stockholm interleaved": ("x.stk", "# STOCKHOLM 1.0\r\n\r\nq ACD\r\na AC-\r\nb GHI\r\n#=GC SS CCC\r\n\r\n"
                                       "q EF\r\n#=GR q PP 99\r\na EF\r\nb KL\r\n//\r\n"),
    "stockholm inserts": ("x.sto", "# STOCKHOLM 1.0\nq A..CDEF\na AwwC.EF\nb G.wHIKL\n"),
    "stockholm by content": ("x.txt", b"\n# STOCKHOLM 1.0\nq\xff ACDEF\na AC-EF\nb GHIKL\n//\n"),
    "clustal": ("x.aln", "CLUSTAL W (1.83)\n\n\nq   ACD 3\na   AC- 2\nb   GHI 3\n    * :\n\n"
                         "q   EF 5\na   EF 4\nb   KL 5\n"),
    **{title: ("x.txt", f"{title}\n\nq ACDEF\na AC-EF\nb GHIKL\n   *\n") for title in (
        "MUSCLE (3.8) multiple sequence alignment\n", "# a comment\nKalign (2.0) alignment in ClustalW",
        "PROBCONS version 1.12 multiple sequence alignment", "By hand")},
    "title without a blank line": ("x.txt", "MUSCLE (3.8) alignment\nq ACDEF\na AC-EF\nb GHIKL\n"),
    "no title": ("x.aln", "q ACD 3\na AC-\nb GHI\n\nq EF 5\na EF\nb KL\n"),
    "stockholm by hand": ("x.a3m", "# by hand\n#Stockholm 1.0\nq ACDEF\na AC.EF\nb GHIKL\n"),
}
PACKED = {"": bytes, ".gz": gzip.compress, ".bz2": bz2.compress, ".xz": lzma.compress}


@pytest.mark.parametrize("case", SAME_ALIGNMENT)
def test_same_alignment_in_every_dress(case, tmp_path):
    name, text = SAME_ALIGNMENT[case]
    for suffix, pack in PACKED.items():
        content = text if isinstance(text, bytes) else text.encode()
        msa = read_alignment(write(tmp_path / (name + suffix), pack(content)))
        assert letters(msa) == PLAIN and msa.dtype == np.uint8


COMPLEX = ("#3,2\t1,1\n>101\t102\nACDEF\n>a\tb\nACg-EF\n>101\nACD--\n>c\nMKL--\n>102\n---EF\n>d\n---Wy.F\n")
UNPAIRED = COMPLEX[COMPLEX.index(">101\n"):]
CHAINS = {"101": ["ACD", "AC-", "ACD", "MKL"], "102": ["EF", "EF", "EF", "WF"]}
SEVERAL = {  # file name, content, {query: rows}
    "its first line has spaces": ("x.a3m", COMPLEX.replace("\t", " "), CHAINS),
    "a comment and no tab": ("x.a3m", "# by hand\n" + COMPLEX.replace("#3,2\t1", "# 3, 2 ; 1"), CHAINS),
    "no first line": ("x.a3m", COMPLEX.partition("\n")[2], CHAINS),
    "no first line, dots as gaps": ("x.a3m", ">101\t102\nACDEF\n>101\nACD..\n>c\nMK-..\n>102\n...EF\n",
                                    {"101": ["ACD", "ACD", "MK-"], "102": ["EF", "EF"]}),
    "no joint rows": ("x.a3m", "#3,2 1,1\n" + UNPAIRED, {"101": ["ACD", "MKL"], "102": ["EF", "WF"]}),
    "complex of ColabFold": ("x.a3m", COMPLEX, CHAINS),
    "of one length, NUL between": ("x.a3m", ">101\nACDEF\n>a\nAC-EF\n\0>102\nWYWYW\n\0",
                                   {"101": ["ACDEF", "AC-EF"], "102": ["WYWYW"]}),
    "of two lengths, NUL between": ("x.a3m", ">101\nACDEF\n\0>102\nWYW\n>b\nWYY\n\0",
                                    {"101": ["ACDEF"], "102": ["WYW", "WYY"]}),
    "stockholm": ("x.sto", "# STOCKHOLM 1.0\n101 AC\n//\n# STOCKHOLM 1.0\n102 WW\na W-\n//\n",
                  {"101": ["AC"], "102": ["WW", "W-"]})}


@pytest.mark.parametrize("case", SEVERAL)
def test_of_several_alignments_in_a_file_one_must_be_chosen(case, tmp_path):
    name, text, expected = SEVERAL[case]
    path = write(tmp_path / name, text)
    for wrong in (None, "103"):
        error = one_line_error(read_alignment, path, wrong)
        assert "101" in error and "102" in error and "--query" in error
    assert {query: letters(read_alignment(path, query)) for query in expected} == expected


def test_a_name_that_two_alignments_have_chooses_neither(tmp_path):
    path = write(tmp_path / "x.a3m", ">101\nACDEF\n\0>102\nWYW\n\0>102\nGHI\n")
    assert letters(read_alignment(path, "101")) == ["ACDEF"]
    assert "choose one" in one_line_error(read_alignment, path, "102")


def test_every_letter_has_its_token(tmp_path):
    everything = "ACDEFGHIKLMNPQRSTVWYXBZUJO"
    msa = read_alignment(write(tmp_path / "x.fasta", f">q\n{everything}\n>a\n{everything.lower()}\n"))
    assert msa.tolist() == 2 * [[*range(21), 2, 3, 1, 20, 20]]
    gaps = read_alignment(write(tmp_path / "y.fasta", ">q\nAAAA\n>a\n-.~C\n"))
    assert gaps[1].tolist() == [21, 21, 21, 1]
    assert files.AMINO_ACIDS == "ACDEFGHIKLMNPQRSTVWY"


@pytest.mark.parametrize("name, text, rows", [
    ("x.a3m", ">101\nACDEF\n>a\nAC-EF\n\0>102\nACDEF\n>b\nGHIKL\n\0",  # of two databases for one query
     ["ACDEF", "AC-EF", "ACDEF", "GHIKL"]),
    ("x.fasta", ">q\nAC*EF*\n>a\nACDEF\n>b\nACDEF*\n", ["ACXEF", "ACDEF", "ACDEF"]),  # a stop codon within
    ("x.a3m", ">q C:\\new\nACDE\n>r\nAC-E\n", ["ACDE", "AC-E"]),
    ("x.txt", ">q\nACDEF\n>a\nACdef\n", ["ACDEF", "ACDEF"]),  # FASTA: no insertions, if rows fit with them
    ("x.a3m", ">q\nA.DEF\n>a\nAC.EF\n>b\nACD.F\n", ["ADEF", "A-EF", "AD-F"]),  # '.' is a gap, one in each
    ("x.txt", "# STOCKHOLM 1.0\nMUSCLE-1 ACDE\nCLUSTAL_X AC-E\n//\n", ["ACDE", "AC-E"]),
    ("x.sto", "# STOCKHOLM 1.0\n\nq AC\nq AC\na A-\n\nq DE\nq DE\na DE\n//\n", ["ACDE", "ACDE", "A-DE"])])
def test_no_row_is_lost_or_taken_for_something_else(name, text, rows, tmp_path):
    assert letters(read_alignment(write(tmp_path / name, text))) == rows


@pytest.mark.parametrize("query, first", [
    ("b", "GHIKL"), ("b a long header", "GHIKL"), ("P1/1-5", "AC-EF"), ("P1", "AC-EF"), ("P12345", "MMMM-"),
    ("sp|P", "MMMM-"), ("SHORT", "WWWWW"), ("twice", "ACDEF"), ("TAIL", "FFFFF"),
])
def test_query_by_name(query, first, tmp_path):
    path = write(tmp_path / "x.fasta", ">twice\nACDEF\n>P1/1-5 x\nAC-EF\n>P10/1-5\nYYYYY\n"
                                       ">b a long header\nGHIKL\n>sp|P12345|NAME_X\nMMMM-\n"
                                       ">SHORT_TAIL\nWWWWW\n>twice\nACDEF\n>>TAIL\nFFFFF\n")
    msa = read_alignment(path, query)
    kept = [i for i, letter in enumerate(first) if letter != "-"]
    assert letters(msa)[0] == first.replace("-", "") and msa.shape == (8, len(kept))
    if query != "twice":
        assert letters(msa)[1] == "".join("ACDEF"[i] for i in kept)  # the others keep their order


def test_query_that_is_no_row_or_several(tmp_path):
    path = write(tmp_path / "x.fasta", ">P1/1-5\nACDEF\n>P2/1-5\nAC-EF\n>P2/7-11\nGHIKL\n"
                                       ">P3 first\nACDEF\n>P3 second\nGHIKL\n")
    error = one_line_error(read_alignment, path, "Q")
    assert str(path) in error and "'Q' is not a row" in error and "P1/1-5" in error
    error = one_line_error(read_alignment, path, "P2")
    assert "several" in error and "P2/1-5" in error and "P2/7-11" in error and "P1" not in error
    assert "P3 first, P3 second" in one_line_error(read_alignment, path, "P3")
    assert letters(read_alignment(path, "P3 second"))[0] == "GHIKL"
    assert "no names" in one_line_error(read_alignment, write(tmp_path / "x.a3m", ">\nAC\n"), "q")


def test_an_alignment_alone_is_a_protein_without_coordinates(tmp_path):
    path = write(tmp_path / "x.1.fasta", ">a\nACDEF\n>b\nA-DEF\n")
    protein = files.load_alignment(path, "b")
    assert (protein.name, letters(protein.msa)) == ("x.1", ["ADEF", "ADEF"])
    assert protein.numbers == ("1", "2", "3", "4") and np.isnan(protein.coords).all()
    assert protein.coords.shape == (4, 3) and protein.coords.dtype == np.float32
    assert protein.left_out == 1 and files.load_alignment(path).left_out == 0


BAD_ALIGNMENTS = {  # file name, content, what the message must say
    "short row": ("x.a3m", ">q\nACDEF\n>a\nACDEF\n>hit 3\nACEF\n",
                  ["row 3", "'hit 3'", "4 match columns", "expected 5 as in row 1"]),
    "a3m of equal lengths": ("x.a3m", ">q\nACDEF\n>hit\nACdEF\n", ["row 2 ('hit')", "4 match", "expected 5"]),
    "unaligned": ("x.fasta", ">q\nACDEF\n>hit\nACDEFGHI\n", ["row 2 ('hit')", "8 columns", "expected 5"]),
    "stockholm": ("x.sto", "# STOCKHOLM 1.0\nq ACDEF\nhit ACD\n//\n",
                  ["row 2 ('hit')", "3 columns", "expected 5"]),
    "symbols": ("x.fasta", ">q\nACDEF\n>hit\nAC1EF\n", ["row 2", "'hit'", "'1'"]),
    "a dash of a word processor": ("x.a3m", ">q\nACDEF\n>hit\nAC\u2013EF\n", ["row 2 ('hit')", "EN DASH"]),
    "a dash of old Windows": ("x.a3m", b">q\nACDEF\n>hit\nAC\x96EF\n", ["row 2 ('hit')", "byte 0x96"]),
    "a complex without lengths": ("x.a3m", ">101\t102\nACDEF\n>a\tb\nACDEF\n", ["row 1", "complex"]),
    "prose": ("x.txt", "Error\n\nNot found\n", ["not an alignment", "'Error'"]),
    "query of gaps": ("x.fasta", ">q\n-----\n>hit\nACDEF\n", ["no residues"]),
    "lowercase within the query": ("x.a3m", ">q\nACkkDEF\n>a\nACDEF\n", ["query", "2 residues", "lowercase"]),
    "chains behind each other": ("x.a3m", ">q\nACD/EF\n>a\nACD/EF\n", ["'/'", "one protein"]),
    "lengths of another complex": ("x.a3m", "#3,4\t1,1\n>101\t102\nACDEF\n", ["3, 4 residues", "row 1"]),
    "prose in blocks": ("x.sto", "# STOCKHOLM 1.0\nthis is no row\n", ["'this is no row'"]),
    "empty": ("x.a3m", "", ["empty"]),
    "comments only": ("x.a3m", "# nothing\n", ["no sequences"]),
    "binary": ("x.a3m", bytes(range(256)) * 50, ["not an alignment", "no text"]),
    "no text encoding": ("x.a3m", b">q\n" + bytes(range(128, 256)), ["not an alignment"]),
    "bare rows": ("x.aln", "ACDEF\nAC-EF\n", ["not an alignment", "'ACDEF'"]),
    "broken gzip": ("x.a3m.gz", b"\x1f\x8b" + bytes(99), ["damaged"]),
    **{f"cut {suffix}": (f"x.a3m{suffix}", pack(b">q\nACDEF\n" * 999)[:-9], ["damaged"])
       for suffix, pack in PACKED.items() if suffix},
}


@pytest.mark.parametrize("case", BAD_ALIGNMENTS)
def test_bad_alignment_is_one_clear_line(case, tmp_path):
    name, text, expected = BAD_ALIGNMENTS[case]
    error = one_line_error(read_alignment, write(tmp_path / name, text))
    assert name in error and all(part in error for part in expected), error


FOREIGN = {  # how a file begins, what it is
    b"\x28\xb5\x2f\xfd\x04X": "zstd", b"PK\x03\x04": "zip archive",
    b"x.a3m" + bytes(252) + b"ustar": "tar archive",
    b"\n<!DOCTYPE html>\n<html>": "web page", b"\n<?xml version": "XML", b'[{"name": "x"}]': "JSON",
    b'{"sequences": [{"protein": {"unpairedMsa": ">q\\nACDEF"}}]}': "AlphaFold 3",
    b"key,sequence\n-1,ACDEF\n": "Boltz CSV", b"sequence,key\nACDEF,-1\n": "a Boltz CSV",
    b">query\\nACDEF\\n>hit\\nACDEF": "written out as \\n",
    b">P1;q\nFIRST\nACDEF*\n": "PIR", b"#NEXUS\nbegin data;": "NEXUS", b" 12 345\nq ACDEF\n": "PHYLIP",
    b"!!AA_MULTIPLE_ALIGNMENT 1.0": "MSF", b"HMMER3/f [3.3]\nNAME x": "profile",
    b"HHsearch 1.5\nNAME x": "profile",
    b"{ \n  s_m_m2io_version\n": "Maestro", b"SEQUENCE: ACDEF\nSCORE: 1\n": "Rosetta",
    b"\x83\xa7version\xa50.3.0\xaadataBlocks": "BinaryCIF", b"\xde\x00\x1f\xabmmtfVersion\xa51.0": "MMTF",
    b"@<TRIPOS>MOLECULE\n": "MOL2"}


@pytest.mark.parametrize("content", FOREIGN, ids=FOREIGN.get)
def test_files_of_other_programs_are_named(content, tmp_path):
    for name, read in (("x.a3m", read_alignment), ("x.pdb", read_structure), ("x.a3m.gz", read_alignment)):
        data = gzip.compress(content) if name.endswith("gz") else content
        assert FOREIGN[content] in one_line_error(read, write(tmp_path / name, data))


# --- Properties -----------------------------------------------------------------------------------------

BEGINNINGS = st.sampled_from([b"", b">q\nACDEF"])
PIECES = st.lists(st.one_of(st.sampled_from([
    b">", b">q\n", b"\n", b"# STOCKHOLM 1.0\n", b"#=GC SS ", b"//\n", b"CLUSTAL\n", b"row1 ", b"ACDEF", b"kL",
    b"acd", b"-.-", b"*", b"\0", b"\0>r\n", b"\xff\xfe", b"\x1f\x8b", b"#3,2\t1,1\n", b"\t", b"\r"]),
    st.binary(max_size=5)), max_size=8)


@cases(150)
@given(st.tuples(BEGINNINGS, PIECES.map(b"".join)).map(b"".join),
       st.sampled_from(["a3m", "fasta", "sto", "clustal", "aln", "gz", "a3m.gz"]),
       st.one_of(st.none(), st.sampled_from(["q", "row1", ""])))
def test_properties_of_bytes_that_may_be_no_alignment(tmp_path_factory, content, suffix, query):
    """An alignment or one line that names the file. Of an alignment nothing is left out in silence: it has as
    many rows as the file has headers, and every letter of the query stands behind one of them."""
    path = tmp_path_factory.getbasetemp() / f"y.{suffix}"
    path.write_bytes(content)
    try:
        msa = read_alignment(path, query)
    except UserError as error:
        assert str(error).startswith(f"{path}: ") and "\n" not in str(error)
        return
    assert msa.ndim == 2 and msa.size and msa.max() <= GAP and (msa[0] != GAP).all()
    if query is None and content.startswith(b">"):
        text = re.sub(rb"(?m)^#.*$|^//\s*$", b"", content.replace(b"\r", b"\n").replace(b"\0", b"\n"))
        records = [record.partition(b"\n")[2] for record in (b"\n" + text).split(b"\n>")[1:]]
        written = [files.TOKEN_OF[np.frombuffer(b"".join(record.split()).removesuffix(b"*"), np.uint8)]
                   for record in records]
        assert len(msa) == len(records)
        assert any(np.array_equal(row[row != GAP], msa[0]) for row in written)
