"""Formats of alignments: a file -> names and rows as bytes of one length, one a column.

    names, rows, number = parse_alignment("query.a3m")   # number: of the query's row

FORMATS, at the end, are told apart by content. Nothing is left out in silence: what a reader would have to
guess is refused. Needs no numpy.
"""
import itertools
import re
import unicodedata
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from fusion_lab.training.errors import UserError
from tiny_openfold.proteins import containers

SYMBOLS = "ACDEFGHIKLMNPQRSTVWY" + "JOX?*" + "-.~" + "BZU"  # that a sequence may hold, in either case
GAPS = b"-.~"
LOWERCASE = b"abcdefghijklmnopqrstuvwxyz"
NOT_SEQUENCES = {"ss_pred", "ss_conf", "ss_dssp", "sa_dssp", "aa_dssp", "aa_pred"}  # HH-suite annotation


def split_suffix(path):
    """'dir/NAME.A3M.gz' -> ('NAME', '.a3m')."""
    name = Path(path)
    name = Path(name.stem if name.suffix.lower() in containers.SUFFIXES else name.name)
    return name.stem, name.suffix.lower()


def first_word(name):
    return (name.split(None, 1) or [""])[0]


def _fasta_records(path, data):
    """FASTA and A3M, wrapped or not -> (headers, rows as written). Lines that begin with '#' are comments."""
    text = re.sub(rb"(?m)^#.*$", b"", data).strip()
    if text and text[:1] != b">":
        raise UserError(f"{path}: {containers.begins(text)} stands where a header '>name' is expected")
    names, rows = [], []
    for record in (b"\n" + text).split(b"\n>")[1:]:
        header, _, body = record.partition(b"\n")
        name = header.lstrip(b">").decode("utf-8", "replace").strip()
        if first_word(name) not in NOT_SEQUENCES:
            names.append(name)
            rows.append(body.translate(None, b" \t\n\v\f").removesuffix(b"*"))  # '*' ends a chain
    return names, rows


ROW = rb"[^\s>#]\S*[ \t]+[A-Z*?~.-]+(?:[ \t]+\d+)?[ \t]*"  # of Clustal's format, which may count residues
TITLE = rb"(?:CLUSTAL|MUSCLE)\b.*|.*(?=\n[ \t]*\n)"  # the line before them, by whatever program


def _block_records(path, data):
    """Stockholm and, without its header, Clustal, interleaved or not -> (names, rows). Only lines with a
    sequence make rows, so '#=GS' naming hits before the query is harmless. A name twice in one block is two
    rows."""
    pieces, in_block = {}, {}
    for line in data.split(b"\n"):
        fields = line.split()
        if not fields:
            in_block = {}
        elif not line[:1].isspace() and not line.startswith(b"#"):
            if len(fields) != 2 and not (len(fields) == 3 and fields[2].isdigit()):
                raise UserError(f"{path}: the line {containers.begins(line)} is no name with a sequence")
            count = in_block[fields[0]] = in_block.get(fields[0], 0) + 1
            pieces.setdefault((fields[0], count), []).append(fields[1])
    return [name.decode("utf-8", "replace") for name, _ in pieces], [b"".join(row) for row in pieces.values()]


def _clustal_records(path, data):
    return _block_records(path, re.sub(rb"(?i)\A(\s|#.*\n)*(" + TITLE + rb")?", b"", data))


def _alignments(path, data, records):
    """[(names, rows as written)] of the alignments of a file: '//' or a NUL byte ends one. Those that begin
    with the same sequence are one, as a search of several databases writes them."""
    by_first_row = {}
    for part in re.split(rb"\0|(?m:^//[ \t]*$)", data):
        names, rows = records(path, part)
        if rows:
            same = by_first_row.setdefault(rows[0], ([], []))
            same[0].extend(names)
            same[1].extend(rows)
    return list(by_first_row.values())


def parse_alignment(path, query=None):
    """Any format -> (names, rows in the file's order, number of the query's row); rows are bytes of one
    length, one a column."""
    data, path, suffix = containers.read(path, ALIGNMENT), containers.called(path), split_suffix(path)[1]
    fitting = [known for known in FORMATS if known.fits(data)]
    if not fitting:
        raise UserError(f"{path}: not {ALIGNMENT}; it begins with {containers.begins(data)}")
    form = next((known for known in fitting if suffix in known.suffixes), fitting[-1])
    alignments = _alignments(path, data, form.records)
    if not alignments:
        raise UserError(f"{path}: the alignment has no sequences")
    if len(alignments) > 1:
        first = [first_word(names[0]) for names, _ in alignments]
        if first.count(query) != 1:
            listed = ", ".join(first[:6]) + ", ..." * (len(first) > 6)
            raise UserError(f"{path}: it holds {len(first)} alignments, of {listed}: choose one by --query, "
                            "or give it a file of its own")
        alignments = [alignments[first.index(query)]]
    (names, rows), = alignments
    _require_letters(path, names, rows)
    stated, numbered = _stated_lengths(data), re.fullmatch(r"101(\D+\d+)+", names[0])
    number = 0 if query is None or stated or numbered else _find_row(path, names, rows, query)
    rows = _columns(path, names, rows, number, form)
    if chains := _chains(path, names, rows, stated, numbered):
        names, rows = _one_chain(path, names, rows, chains, query)
        number = 0
    return names, rows, number


def _require_letters(path, names, rows):
    """Raise UserError for the first row that holds what no sequence does."""
    for number, (name, row) in enumerate(zip(names, rows, strict=True), 1):
        if strange := row.translate(None, (SYMBOLS + SYMBOLS.lower()).encode()):
            try:
                letter = strange.decode()[0]
                which = repr(letter) + f" ({unicodedata.name(letter, 'no name')})" * (not letter.isascii())
            except UnicodeDecodeError:
                which = f"the byte {strange[0]:#x}"
            raise UserError(f"{path}: row {number} ({name[:60]!r}) holds {which}, which is neither an amino "
                            "acid nor a gap; not an alignment of one protein")


def _columns(path, names, rows, number, form):
    """Rows as written -> rows of one length. In A3M, lowercase letters are insertions, which have no column,
    and '.' pads them; where no row has lowercase, '.' is a gap. Other files are read as they stand, or as A3M
    if only that makes their rows equal. The query has no insertions: its lowercase letters are masked
    residues, and an error if other rows have no column for them."""
    lower = [form.inserts and row != row.upper() for row in rows]
    a3m = [LOWERCASE + b".", LOWERCASE]
    if not any(lower):
        readings = [b""]
    else:
        readings = [*a3m, *[b""] * lower[number]] if form.name == "A3M" else [b"", *a3m]
    query = rows[number].upper()
    for deleted in readings:
        columns = [row.translate(None, deleted) for row in rows]
        columns[number] = query.translate(None, deleted)
        if len({len(row) for row in columns}) == 1:
            return columns
    deleted = LOWERCASE if form.name == "A3M" or any(lower) else b""
    lengths = [len(row.translate(None, deleted)) for row in rows]
    if len(set(lengths)) == 1:
        inserted = sum(map(str.islower, rows[number].decode("latin-1")))
        raise UserError(f"{path}: the query, row {number + 1} ({names[number][:60]!r}), has {inserted} "
                        "residues in lowercase, insertions without a column in other rows; align again "
                        "with this sequence as the query, in uppercase")
    row = next(i for i, length in enumerate(lengths) if length != lengths[0])
    raise UserError(f"{path}: row {row + 1} ({names[row][:60]!r}) has {lengths[row]} "
                    f"{'match ' if deleted else ''}columns, expected {lengths[0]} as in row 1; "
                    "the file is damaged or its sequences are not aligned")


def _stated_lengths(data):
    """Lengths of a complex's chains, by the line that ColabFold writes before its rows, '#30,40\\t1,1', or
    None."""
    comments = re.split(rb"(?m)^>", data, maxsplit=1)[0].decode("latin-1")
    numbers = r"(\d+(?:\s*,\s*\d+)+)"
    for line in re.finditer(rf"(?m)^\0*\s*#\s*{numbers}[\s;|]+{numbers}\s*$", comments):
        lengths, copies = ([int(number) for number in part.split(",")] for part in line.groups())
        if len(lengths) == len(copies):
            return lengths
    return None


def _blocks(rows):
    """[(row, first column, end)] of the rows that begin blocks, to the end of the file, each with the rows of
    one chain of a complex, gaps elsewhere: its first row is the chain. [] where rows make no such blocks."""
    size = len(rows[0])
    spans = [(size - len(row.lstrip(GAPS)), len(row.rstrip(GAPS))) for row in rows]
    whole = rows[0] if spans[0] == (0, size) else b""  # of all chains
    for first in (i for i, (start, end) in enumerate(spans) if start == 0 and 0 < end < size):
        blocks = []
        for row in range(first, len(rows)):
            (start, end), (_, begin, stop) = spans[row], blocks[-1] if blocks else (0, 0, 0)
            if start < end and not begin <= start < end <= stop:
                letters = rows[row][start:end].translate(None, GAPS)
                if start != stop or letters != (whole or rows[row])[start:end]:
                    break
                blocks.append((row, start, end))
        else:
            if blocks[-1][2] == size:
                return blocks
        if not whole:
            break
    return []


def _chains(path, names, rows, lengths, numbered):
    """[(name, first column, end)] of the chains of a complex by ColabFold, whose rows hold all chains side by
    side, and [] of other alignments. lengths: as stated, or None; numbered: row 1 is called 101 102."""
    blocks = _blocks(rows)
    if not lengths and numbered and not blocks:
        raise UserError(f"{path}: row 1 ({names[0][:60]!r}) is named as in an alignment of a complex, but no "
                        "line before it tells the lengths of the chains, such as '#30,40 1,1'")
    if lengths and sum(lengths) != len(rows[0]):
        raise UserError(f"{path}: its first line names chains of {', '.join(map(str, lengths))} residues, "
                        f"which is not what row 1 ({names[0][:60]!r}) holds; the file is damaged")
    lengths = lengths or [end - start for _, start, end in blocks]
    ways = names[0].split(), [first_word(names[row]) for row, _, _ in blocks], [*map(str, range(101, 999))]
    called = next((words for words in ways if len(words) == len(lengths)), ways[-1])
    ends = [*itertools.accumulate(lengths)]
    return list(zip(called, [0, *ends], ends, strict=False))


def _one_chain(path, names, rows, chains, query):
    """(names, rows) of one chain of a complex. Rows that lack this chain are left out."""
    for name, start, end in chains:
        if name == query:
            cut = [row[start:end] for row in rows]
            kept = [i for i, row in enumerate(cut) if row.strip(GAPS)]
            return [query, *(names[i] for i in kept[1:])], [cut[i] for i in kept]
    listed = ", ".join(f"{name} ({end - start} residues)" for name, start, end in chains)
    raise UserError(f"{path}: an alignment of a complex, of the chains {listed}; one chain is needed: "
                    f"choose it by --query {chains[0][0]}, or give it a file of its own")


def _find_row(path, names, rows, query):
    """Index of the row that `query` names: its header, the first word, that word up to '/' or between '|', or
    how it begins; the first of several with one sequence."""
    words, hits = [first_word(name) for name in names], []
    for fits in (lambda i: query == names[i], lambda i: query == words[i],
                 lambda i: query == words[i].split("/")[0] or query in words[i].split("|"),
                 lambda i: query and words[i].startswith(query)):
        hits = hits or [i for i in range(len(rows)) if fits(i)]
    if len({rows[i] for i in hits}) == 1:
        return hits[0]
    problem = "fits several rows" if hits else "is not a row of the alignment"
    alike = len({names[i] for i in hits}) < len(hits)  # then only their numbers tell them apart
    examples = ", ".join(f"{names[i][:60]}{f' (row {i + 1})' * alike}"
                         for i in (hits or range(len(rows)))[:4] if words[i]) or "(no names)"
    raise UserError(f"{path}: query {query!r} {problem}; rows are called, for instance: {examples}")


class Format(NamedTuple):
    """A format of alignments. To add one, write a reader and a line in FORMATS. Of formats that begin alike
    the one with the file's suffix is taken, else the last."""
    name: str
    begins: bytes      # how its files begin, behind comments: a pattern
    suffixes: tuple    # of its files in directories
    records: Callable  # (path, data) -> (names, rows as written)
    inserts: bool = False  # lowercase may be insertions, which have no column

    def fits(self, data):
        head = re.match(rb"(?i)(?:[\s\0]+|#(?!\s*STOCKHOLM|=).*)*", data)
        return re.compile(self.begins, re.IGNORECASE).match(data, head.end())


FORMATS = (
    Format("A3M", rb">", (".a3m", ".a2m"), _fasta_records, True),
    Format("aligned FASTA", rb">|\Z", (".fasta", ".fa", ".fas", ".faa", ".afa", ".msa"), _fasta_records,
           True),
    Format("Stockholm", rb"#\s*STOCKHOLM|#=G", (".sto", ".stk", ".stockholm"), _block_records),
    Format("Clustal", rb"(?:CLUSTAL|MUSCLE)\b|(?:.*\n(?:[ \t]*\n)+)?" + ROW + rb"\n" + ROW + rb"(?:\n|\Z)",
           (".aln", ".clustal", ".clw"), _clustal_records))
ALIGNMENT = f"an alignment in {', '.join(known.name for known in FORMATS[:-1])} or {FORMATS[-1].name} format"
