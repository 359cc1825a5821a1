"""Files of a performance study that are damaged, half written or of wrong types: a valid object or one line.

FUZZ_CASES is how many mutants of each file are read (default: 150).
"""
import copy
import json
import os
import pathlib
import random

import pytest
from study_parts import WORDS, row_of, study_of

from fusion_lab.study import directory
from fusion_lab.study.recommendation import Accuracy
from fusion_lab.study.records import as_json
from fusion_lab.study.regression import check, read_reference
from fusion_lab.study.report import page
from fusion_lab.study.results import Results
from fusion_lab.study.summary import Recommendation, Recommended, summarise
from fusion_lab.training.files import UserError
from fusion_lab.training.reading import parse_json

CASES = int(os.environ.get("FUZZ_CASES", "150"))
VALUES = (None, True, "x", "", "<b>|`$a^$", "a\nb", "\ud800", [], {}, [1], ["x"], [[]], {"a": 1}, -1, 0, 1,
          2.5, 1e308, 1e-320, 1e29, 1e31, 10 ** 9, 10 ** 400, [10 ** 9], float("inf"), float("nan"))


@pytest.fixture
def study(tmp_path):
    """The files of a study of two shapes and three settings in tmp_path; returns the Study."""
    asked = study_of((2,), (32, 64), (8,), settings=("baseline", "fused", "only-flash-attention"))
    rows = [row_of(point, 0.01 * point.run) for point in asked.points()]
    recommendation = Recommendation(None, (Recommended(rows[0].shape, ("all: broken",), "fused", "x"),))
    summary = summarise(asked, rows)
    results = Results(str(tmp_path), asked.axes)
    for row in rows:
        results.append(row)
    for name, content in (
            ("config", dict(study=asked.as_json(), command="x", created="2026-01-01")),
            ("results_summary", as_json(summary) | dict(recommendation=as_json(recommendation))),
            ("accuracy", {"B 2 S 32 N 8 fused": "passed"})):
        (tmp_path / f"{name}.json").write_text(json.dumps(content))
    return asked


def places(content, at=()):
    """Paths to every value inside."""
    parts = content.items() if isinstance(content, dict) else \
        enumerate(content) if isinstance(content, list) else ()
    for key, part in parts:
        yield (*at, key)
        yield from places(part, (*at, key))


def mutant(text, random_):
    """The bytes of a JSON text with one value changed or left out, or with the text itself damaged."""
    kind = random_.random()
    if kind < 0.8:
        content = copy.deepcopy(json.loads(text))
        *before, last = random_.choice(list(places(content)))
        inner = content
        for key in before:
            inner = inner[key]
        if kind < 0.15:
            del inner[last]
        else:
            inner[last] = random_.choice(VALUES)
        return json.dumps(content).encode()
    whole = text.encode()
    cut = random_.randrange(len(whole))
    return random_.choice((whole[:cut], b"[" * 200_000, b'{"a":' * 100_000, b"", b"[1]", b"null",
                           whole[:cut] + b"\xff\xfe" + whole[cut:], whole.replace(b"2", b"9" * 5000, 1)))


class Bystander:
    """What Accuracy needs of a Runner to read its file."""

    def __init__(self, path):
        self.directory = str(path)


def read_back(kind, path, asked):
    """Read one of a study's files as the study does, and use all that was read."""
    folder = str(path)
    if kind == "accuracy.json":
        return "".join(Accuracy(Bystander(path)).known.values())
    config = directory.read_config(folder, WORDS)
    results = Results(folder, WORDS.axes)
    results.load()
    summary = summarise(config.study, results.rows)
    if kind == "results_summary.json":
        directory.earlier_recommendation(folder, summary)
        return check(summary, read_reference(str(path / kind), asked), 1.1, 0.05)
    directory.write_results(folder, summary, config, plots=False)
    parse_json((path / "results_summary.json").read_text())
    return page(summary, config, [])


@pytest.mark.parametrize("name", ["config.json", "results.jsonl", "results_summary.json", "accuracy.json"])
def test_damaged_files_are_one_line(study, tmp_path, name):
    random_, file, refused = random.Random(name), tmp_path / name, 0
    saved = {path: path.read_bytes() for path in tmp_path.iterdir()}
    lines = saved[file].decode().split("\n")
    for _ in range(CASES):
        for path, content in saved.items():
            path.write_bytes(content)
        if name.endswith("jsonl"):
            at = random_.randrange(len(lines) - 1)
            parts = [line.encode() for line in lines]
            parts[at] = mutant(lines[at], random_)
            file.write_bytes(b"\n".join(parts))
        else:
            file.write_bytes(mutant(saved[file].decode(), random_))
        try:
            read_back(name, tmp_path, study)
        except UserError as error:
            refused += 1
            assert "\n" not in str(error) and len(str(error)) < 1000
    assert refused > CASES / 4
    file.write_bytes(saved[file])
    assert read_back(name, tmp_path, study) is not None


def test_half_a_row_and_a_deep_one(study, tmp_path):
    """What a kill leaves at the end is taken off; what is wrong before that is named by its line."""
    file = pathlib.Path(tmp_path / "results.jsonl")
    whole = file.read_bytes()
    file.write_bytes(whole + b'{"batch_size": 2, "seq')
    results = Results(str(tmp_path), WORDS.axes)
    results.load()
    assert len(results.rows) == 12 and file.read_bytes() == whole
    file.write_bytes(whole + b"[" * 200_000 + b"\n")
    with pytest.raises(UserError, match="line 13 is not the result of a run"):
        Results(str(tmp_path), WORDS.axes).load()


def test_a_study_that_would_never_end_is_refused(study, tmp_path):
    config = json.loads((tmp_path / "config.json").read_text())
    config["study"]["num_runs"] = 10 ** 12
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match="not the config of a study: num_runs = 1000000000000: makes"):
        directory.read_config(str(tmp_path), WORDS)
