"""Damage for the fuzzer, from a seeded random.Random: to bytes, values of JSON, cells of CSV, databases."""
import copy
import json
import sqlite3

VALUES = (None, True, "x", "", "<b>|`$a^$", "a\nb", "\ud800", "\udce9", [], {}, [1], ["x"], [[]], {"a": 1},
          -1, 0, 1, 2.5, 1e308, 1e-320, 1e29, 1e31, 10 ** 9, 10 ** 400, [10 ** 9], float("inf"), float("nan"))
CELLS = ("", "x", "-1", "0", "nan", "inf", "1e400", "1e308", "-1e308", "9" * 5000, "\0", '"', "a\nb", ",",
         "é", "\ufeff", "1,5", " 7 ", "0x10", "1_0", "٣", "'", "|", "`", "$", "2.5", "-0")


def places(content, at=()):
    """Paths to every value inside."""
    parts = content.items() if isinstance(content, dict) else \
        enumerate(content) if isinstance(content, list) else ()
    for key, part in parts:
        yield (*at, key)
        yield from places(part, (*at, key))


def with_other_value(content, random_, values=VALUES):
    """A copy with one value changed or, now and then, left out."""
    content = copy.deepcopy(content)
    *before, last = random_.choice(list(places(content)))
    inner = content
    for key in before:
        inner = inner[key]
    if random_.random() < 0.2:
        del inner[last]
    else:
        inner[last] = random_.choice(values)
    return content


def damaged_json(text, random_):
    """The bytes of a JSON text with one value changed or left out, or with the text itself damaged."""
    if random_.random() < 0.8:
        return json.dumps(with_other_value(json.loads(text), random_)).encode()
    whole = text.encode()
    return random_.choice((b"[" * 200_000, b'{"a":' * 100_000, b"[1]", b"null", b'"x"', b"7",
                           whole.replace(b"2", b"9" * 5000, 1), damaged_bytes(whole, random_)))


def damaged_bytes(whole, random_):
    """One of the things that happen to files: cut short, a piece lost, twice or elsewhere, bits flipped."""
    a, b = sorted(random_.randrange(len(whole) + 1) for _ in range(2))
    c = random_.randrange(len(whole) + 1)
    flipped = bytearray(whole)
    for _ in range(random_.choice((1, 1, 3, 30))):
        flipped[random_.randrange(len(whole))] ^= 1 << random_.randrange(8)
    return random_.choice((
        whole[:a], whole[b:], whole[:a] + whole[b:], whole[:b] + whole[a:],
        whole[:c] + whole[a:b] + whole[c:], bytes(flipped),
        whole[:a] + random_.randbytes(b - a) + whole[b:], whole[:a] + b"\0" * (b - a) + whole[b:],
        whole[:a] + b"\xff\xfe" + whole[a:], b"", whole.upper(), whole.lower(), whole.replace(b"\n", b"\r\n"),
        whole.replace(b"\n", b"\r"), whole + whole, whole.replace(b"\n", b"")))


def damaged_text(whole, random_):
    """damaged_bytes(), or lines and words of a text in disorder or of another kind."""
    if random_.random() < 0.4:
        return damaged_bytes(whole, random_)
    lines = whole.split(b"\n")
    at = random_.randrange(len(lines))
    words = lines[at].split(b" ")
    words[random_.randrange(len(words))] = random_.choice(CELLS).encode()
    swapped = lines[:]
    random_.shuffle(swapped)
    column = random_.randrange(len(lines[at]) + 1)
    changed = random_.choice((
        swapped, lines[:at] + [b" ".join(words)] + lines[at + 1:], lines[:at] + lines[at + 1:],
        lines[:at] + [lines[at]] * random_.choice((2, 50)) + lines[at + 1:],
        lines[:at] + [lines[at][:column] + random_.choice(b"AXz-.*>#/9 \t@").to_bytes(1, "big")
                      + lines[at][column + 1:]] + lines[at + 1:],
        lines[:at] + [lines[at][:column] + b"A" * 70_000 + lines[at][column:]] + lines[at + 1:]))
    return b"\n".join(changed)


def damaged_csv(whole, random_):
    """damaged_bytes(), or one cell, row or column of another kind."""
    if random_.random() < 0.3:
        return damaged_bytes(whole, random_)
    rows = [line.split(b",") for line in whole.split(b"\n")]
    row = rows[random_.randrange(len(rows))]
    cell = random_.choice(CELLS).encode()
    kind = random_.random()
    if kind < 0.6:
        row[random_.randrange(len(row))] = cell
    elif kind < 0.7:
        rows.insert(random_.randrange(len(rows)), rows[0])
    elif kind < 0.8:
        column = random_.randrange(len(rows[0]))
        rows = [[*row[:column], *row[column + 1:]] for row in rows]
    elif kind < 0.9:
        del row[random_.randrange(len(row)):]
    else:
        column = random_.randrange(len(rows[0]))
        rows = [rows[0], *([*row[:column], cell, *row[column + 1:]] for row in rows[1:])]
    return b"\n".join(b",".join(row) for row in rows)


def damage_database(path, random_):
    """Change a SQLite file in place: its bytes, or one value or the whole of one column."""
    if random_.random() < 0.5:
        path.write_bytes(damaged_bytes(path.read_bytes(), random_))
        return
    connection = sqlite3.connect(path)
    tables = [name for (name,) in connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")]
    table = random_.choice(tables)
    columns = [row[1] for row in connection.execute(f'PRAGMA table_info("{table}")')]
    column = random_.choice(columns)
    value = random_.choice((None, "x", "", "a\nb", "9" * 5000, b"\xff\xfe", -1, 0, 2 ** 62, 1e308,
                            float("inf")))
    limit = random_.choice(("", " WHERE rowid = 1"))
    try:
        connection.execute(f'UPDATE "{table}" SET "{column}" = ?{limit}', (value,))
        if random_.random() < 0.1:
            connection.execute(f'ALTER TABLE "{table}" RENAME COLUMN "{column}" TO other')
    except sqlite3.Error:
        pass  # a primary key stays a number
    connection.commit()
    connection.close()
