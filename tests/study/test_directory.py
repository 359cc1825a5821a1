"""Files of a performance study that are damaged; programs/test_damaged_files.py has many more."""
import json
import pathlib

import pytest

from fusion_lab.study import directory, regression
from fusion_lab.study.results import Results
from fusion_lab.training.files import UserError
from tests.study.study_parts import WORDS, write_study


@pytest.fixture
def study(tmp_path):
    return write_study(tmp_path)


def test_a_row_that_is_none_is_named_by_its_line(study, tmp_path):
    file = pathlib.Path(tmp_path / "results.jsonl")
    file.write_bytes(file.read_bytes() + b"[" * 200_000 + b"\n")
    with pytest.raises(UserError, match="line 13 is not the result of a run"):
        Results(str(tmp_path), WORDS.axes).load()


def test_a_study_that_would_never_end_is_refused(study, tmp_path):
    config = json.loads((tmp_path / "config.json").read_text())
    config["study"]["num_runs"] = 10 ** 12
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match="not the config of a study: num_runs = 1000000000000: makes"):
        directory.read_config(str(tmp_path), WORDS)


@pytest.mark.parametrize("changes, words", [
    (dict(format="another"), "not the results_summary.json"),
    (dict(points=[]), "not the results_summary.json"), (dict(machine=[{}]), "not the results_summary.json"),
    (dict(study=dict(num_runs="3")), "not the results_summary.json"),
    *((dict(without=key), "not the results_summary.json")
      for key in ("n", "seq_len", "run_medians_ms", "speedup_low")),
    (dict(study=dict(trainer_flags=["--x"])), r"made with trainer_flags = \['--x'\], this study has \[\]"),
    (dict(study=dict(amp_dtype="bfloat16")), "made with amp_dtype = bfloat16, this study has None"),
    (dict(study=dict(program="other.py")), "program = other.py, this study has tiny_openfold_v2.py"),
    (dict(study=dict(num_runs=1)), "without at least two runs .* there 1, here 2")])
def test_only_what_was_measured_alike_is_a_reference(changes, words, tmp_path):
    study, path = write_study(tmp_path), tmp_path / "results_summary.json"
    known = regression.read_reference(path, study).study
    assert known == dict(program="tiny_openfold_v2.py", trainer_flags=[], amp_dtype=None, num_runs=2)
    content = json.loads(path.read_text())
    for point in content["points"]:
        point.pop(changes.get("without"), None)
    content |= {key: {**content[key], **value} if key == "study" else value for key, value in changes.items()}
    path.write_text(json.dumps(content))
    with pytest.raises(UserError, match=words):
        regression.read_reference(path, study)


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"study": {}}'])
def test_only_summaries_of_studies_are_references(content, study, tmp_path):
    (tmp_path / "x.json").write_text(content)
    with pytest.raises(UserError, match="not the results_summary.json"):
        regression.read_reference(tmp_path / "x.json", study)
