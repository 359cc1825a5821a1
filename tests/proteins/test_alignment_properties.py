"""Parsers of proteins: what one format says, all say; whatever the bytes, an alignment or one line."""
import gzip
import re

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fusion_lab.training.files import UserError
from tests.properties import cases
from tiny_openfold.proteins import files
from tiny_openfold.proteins.files import AMINO_ACIDS, GAP, UNKNOWN

LETTERS = AMINO_ACIDS + "X-"
ALIGNMENTS = st.integers(1, 30).flatmap(lambda length: st.lists(
    st.text(LETTERS, min_size=length, max_size=length), min_size=1, max_size=6)).filter(
    lambda rows: set(rows[0]) & set(AMINO_ACIDS))  # a query of X and gaps alone may be taken for none
WRAPS = st.integers(1, 40)


def wrapped(row, width):
    return "\n".join(row[at:at + width] for at in range(0, len(row), width))


def expected(rows):
    tokens = np.array([[LETTERS.index(letter) for letter in row] for row in rows], np.uint8)
    return tokens[:, tokens[0] != GAP]


def with_insertions(row, drawn):
    """Lower-case letters and dots between columns, as A3M has them."""
    return "".join(f"{insertion}{letter}" for insertion, letter in zip(drawn, row, strict=True))


def of_every_format(rows, width, drawn, twins):
    """{name of a file: its text}; twins: all rows of a block have one name."""
    length = len(rows[0])
    body = "\n\n".join("\n".join(f"row{0 if twins else i} {row[at:at + width]}" for i, row in enumerate(rows))
                       for at in range(0, length, width))
    turned = [drawn[i % length:] + drawn[:i % length] for i in range(len(rows))]
    inserted = [rows[0], *map(with_insertions, rows[1:], turned)]
    return {
        "x.a3m": "".join(f">row{i}\n{wrapped(row, width)}\n" for i, row in enumerate(inserted)),
        "x.fasta": "".join(f">row{i} of it\n{wrapped(row, width)}\n" for i, row in enumerate(rows)),
        "x.sto": f"# STOCKHOLM 1.0\n#=GF ID x\n{body}\n//\n", "x.clustal": f"CLUSTAL W\n\n{body}\n"}


@cases(80)
@given(ALIGNMENTS, WRAPS, st.data())
def test_properties_of_formats_that_say_the_same(tmp_path_factory, rows, width, data):
    place, length = tmp_path_factory.getbasetemp(), len(rows[0])
    drawn = data.draw(st.lists(st.text("acgt", max_size=3), min_size=length, max_size=length))
    ends = data.draw(st.sampled_from(["\n", "\r\n", "\r"]))
    zipped, twins = data.draw(st.booleans()), data.draw(st.booleans())
    number = data.draw(st.integers(0, len(rows) - 1).filter(lambda i: set(rows[i]) & set(AMINO_ACIDS)))
    ordered = [rows[number], *rows[:number], *rows[number + 1:]]
    for name, text in of_every_format(rows, width, drawn, twins).items():
        content = text.replace("\n", ends).encode()
        path = place / (name + ".gz" * zipped)
        path.write_bytes(gzip.compress(content) if zipped else content)
        assert np.array_equal(files.read_alignment(path), expected(rows)), name
        if name == "x.a3m" and number and "".join(drawn):  # another row's insertions have no columns
            with pytest.raises(UserError, match="in lowercase"):
                files.read_alignment(path, f"row{number}")
        elif not (twins and name in ("x.sto", "x.clustal")):
            assert np.array_equal(files.read_alignment(path, f"row{number}"), expected(ordered)), name


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
        msa = files.read_alignment(path, query)
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


def a_chain(sequence, seen):
    """A chain without breaks but where residues are missing."""
    observed = np.flatnonzero(seen)
    breaks = np.concatenate([[True], np.diff(observed) > 1, [True]])
    return files.Chain(name="A", sequence=sequence, coords=None, seen=seen, breaks=breaks, numbers=None,
                       backbone=None)


@cases(60)
@given(st.lists(st.integers(0, UNKNOWN - 1), min_size=8, max_size=40), st.data())
def test_properties_of_a_query_and_its_structure(query, data):
    """A structure that lacks some residues, with tags before and behind: in order, as good as it can be."""
    query = np.array(query, np.uint8)
    tags = [data.draw(st.lists(st.integers(0, UNKNOWN - 1), max_size=6)) for _ in range(2)]
    sequence = np.array([*tags[0], *query, *tags[1]], np.uint8)
    seen = np.ones(len(sequence), bool)
    lost = data.draw(st.lists(st.integers(0, len(query) - 1), max_size=len(query) // 3))
    seen[len(tags[0]) + np.array(lost, int)] = False
    index, identical, different = files.map_query(query, a_chain(sequence, seen))
    found = index >= 0
    assert identical - different >= seen[len(tags[0]):len(tags[0]) + len(query)].sum()
    same = query[found] == sequence[index[found]]
    assert (identical, different) == (same.sum(), (~same).sum())
    assert seen[index[found]].all() and (np.diff(index[found]) > 0).all()
