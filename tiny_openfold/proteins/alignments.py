"""Formats of alignments: a file -> names and rows as bytes of one length, one a column.

    names, rows, number = parse_alignment("query.a3m")   # number: of the query's row

A3M, Stockholm, aligned FASTA and Clustal are told apart by content. Nothing is left out in silence: what a
reader would have to guess is refused. Needs no numpy.
"""
import re
from pathlib import Path

from fusion_lab.training.files import UserError
from tiny_openfold.proteins import containers

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
        raise UserError(f"{path}: not {containers.ALIGNMENT}; it begins with {containers.begins(text)}")
    names, rows = [], []
    for record in (b"\n" + text).split(b"\n>")[1:]:
        header, _, body = record.partition(b"\n")
        name = header.lstrip(b">").decode("utf-8", "replace").strip()
        if first_word(name) not in NOT_SEQUENCES:
            names.append(name)
            rows.append(body.translate(None, b" \t\n\v\f").removesuffix(b"*"))  # '*' ends a chain
    return names, rows


HEADER = re.compile(rb"\A\s*(CLUSTAL|MUSCLE)[WXO]?\b.*")  # the first line of Clustal's format


def _block_records(path, data):
    """Stockholm and Clustal, interleaved or not -> (names, rows). Only lines with a sequence make rows, so
    '#=GS' naming hits before the query is harmless. A name twice in one block is two rows."""
    pieces, in_block = {}, {}
    for line in HEADER.sub(b"", data).split(b"\n"):
        fields = line.split()
        if not fields:
            in_block = {}
        elif not line[:1].isspace() and not line.startswith(b"#"):
            if len(fields) != 2 and not (len(fields) == 3 and fields[2].isdigit()):  # Clustal counts residues
                raise UserError(f"{path}: the line {containers.begins(line)} is no name with a sequence")
            count = in_block[fields[0]] = in_block.get(fields[0], 0) + 1
            pieces.setdefault((fields[0], count), []).append(fields[1])
    return [name.decode("utf-8", "replace") for name, _ in pieces], [b"".join(row) for row in pieces.values()]


def _alignments(path, data, records):
    """[(names, rows as written)] of the alignments of a file: '//' or a NUL byte ends one. Those that begin
    with the same sequence are one, as a search of several databases writes them."""
    found = {}
    for part in re.split(rb"\0|(?m:^//[ \t]*$)", data):
        names, rows = records(path, part)
        if rows:
            same = found.setdefault(rows[0], ([], []))
            same[0].extend(names)
            same[1].extend(rows)
    return list(found.values())


def parse_alignment(path, query=None):
    """Any format -> (names, rows in the file's order, number of the query's row); rows are bytes of one
    length, one a column."""
    data, path = containers.read(path, containers.ALIGNMENT), containers.called(path)
    in_blocks = data.lstrip(b"\0\n ").startswith((b"# STOCKHOLM", b"#=", b"CLUSTAL", b"MUSCLE"))
    alignments = _alignments(path, data, _block_records if in_blocks else _fasta_records)
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
    chains = re.match(rb"#(\d+(?:,\d+)+)\t[\d,]+\s*\n", data)
    number = 0 if query is None or chains else _find_row(path, names, rows, query)
    form = "blocks" if in_blocks else "a3m" if split_suffix(path)[1] in (".a3m", ".a2m") else "fasta"
    rows = _columns(path, names, rows, number, form)
    if chains:
        names, rows = _one_chain(path, names, rows, [*map(int, chains[1].split(b","))], query)
    return names, rows, number


def _columns(path, names, rows, number, form):
    """Rows as written -> rows of one length. A3M deletes lowercase letters and '.', unless '.' is its gap, as
    it is where no row has lowercase. A file not called A3M is one if only that makes its rows equal; else its
    rows are aligned as they stand. The query has no insertions: lowercase in it is masking, or there are
    columns for it, or it is an error."""
    lower = [form != "blocks" and row != row.upper() for row in rows]
    a3m = [LOWERCASE + b".", LOWERCASE]
    if not any(lower):
        readings = [b""]
    else:
        readings = [*a3m, *[b""] * lower[number]] if form == "a3m" else [b"", *a3m]
    query = rows[number].upper()
    for deleted in readings:
        columns = [row.translate(None, deleted) for row in rows]
        columns[number] = query.translate(None, deleted)
        if len({len(row) for row in columns}) == 1:
            return columns
    deleted = LOWERCASE if form == "a3m" or any(lower) else b""
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


def _one_chain(path, names, rows, lengths, query):
    """(names, rows) of one chain of a complex by ColabFold, whose rows hold all chains side by side. Rows
    that lack this chain are left out."""
    called = names[0].split()
    if sum(lengths) != len(rows[0]) or len(called) != len(lengths):
        raise UserError(f"{path}: its first line names chains of {', '.join(map(str, lengths))} residues, "
                        f"which is not what row 1 ({names[0][:60]!r}) holds; the file is damaged")
    if query not in called:
        listed = ", ".join(f"{name} ({length} residues)"
                           for name, length in zip(called, lengths, strict=True))
        raise UserError(f"{path}: an alignment of a complex, of the chains {listed}; one chain is needed: "
                        f"choose it by --query {called[0]}, or give it a file of its own")
    start = sum(lengths[:called.index(query)])
    cut = [row[start:start + lengths[called.index(query)]] for row in rows]
    kept = [i for i, row in enumerate(cut) if i == 0 or row.strip(b"-.~")]
    return [query, *(names[i] for i in kept[1:])], [cut[i] for i in kept]


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
