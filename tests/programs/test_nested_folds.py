"""benchmarks/nested_folds.py: no model folds what it was trained on, a stopped call goes on, the table."""
import json
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import numpy as np
import pytest

from fusion_lab.training.files import UserError
from fusion_lab.training.locks import hold_file, release
from fusion_lab.training.models import save_model
from tests.support import ROOT, require_shared
from tiny_openfold_v2 import PROGRAM, FusionConfig, TinyOpenFoldConfig, TinyOpenFoldV2

sys.path.insert(0, str(ROOT / "benchmarks"))
import nested_folds  # noqa: E402

SIZES = dict(num_blocks=1, msa_dim=8, pair_dim=8, msa_heads=2, pair_heads=2, outer_product_dim=4)


def a_run(out, name, names, trained_on):
    """What real_families.py leaves of a training for a fold."""
    directory = out / "runs" / name
    directory.mkdir(parents=True)
    config = TinyOpenFoldConfig(**SIZES)
    weights = TinyOpenFoldV2(config, FusionConfig()).state_dict()
    save_model(directory / "best.pt", PROGRAM, weights, config, dict(trained_on=trained_on))
    evaluations = {"1": dict(held_out={family: dict(p_l2=0.5) for family in names}, validation={})}
    summary = {PROGRAM.evaluation_name: evaluations}
    (directory / PROGRAM.result("performance_summary")).write_text(json.dumps(summary))
    (directory / "done").write_text("{}")


def test_no_model_folds_what_it_was_trained_on(tmp_path):
    a_run(tmp_path, "full-1-fold-0", ["A", "B"], ["C"])
    a_run(tmp_path, "full-1-fold-1", ["C"], ["A", "B"])
    (tmp_path / "runs" / "full-2-fold-0").mkdir()  # not done
    first, second = (tmp_path / "runs" / f"full-1-fold-{fold}" / "best.pt" for fold in (0, 1))
    expected = {(1, "A"): first, (1, "B"): first, (1, "C"): second}
    assert nested_folds.held_out(tmp_path, "full", [1, 2]) == expected
    a_run(tmp_path, "full-3-fold-0", ["A", "B"], ["B", "C"])
    with pytest.raises(UserError, match="was trained on B"):
        nested_folds.held_out(tmp_path, "full", [3])
    with pytest.raises(UserError, match="no training of recipe scratch"):
        nested_folds.held_out(tmp_path, "scratch", [1])


def test_what_is_known_is_not_folded_again_and_an_error_loses_nothing(monkeypatch):
    families = {name: SimpleNamespace(length=length, backbone=np.zeros((length, 4, 3)))
                for name, length in (("A", 5), ("B", 9), ("C", 7))}
    families["D"] = SimpleNamespace(length=8, backbone=np.full((8, 4, 3), np.nan))
    tasks = nested_folds.chosen({(seed, name): "model" for seed in (1, 2) for name in families}, families, 5)
    assert list(tasks) == [(1, "B"), (2, "B"), (1, "C"), (2, "C"), (1, "A")]

    def judged(family, seed):
        if family.length == 5:
            raise UserError("stopped")
        return dict(residues=family.length, tm_score=0.5, seconds=dict(folding=0))

    monkeypatch.setattr(nested_folds, "ProcessPoolExecutor", lambda jobs, *_: ThreadPoolExecutor(jobs))
    monkeypatch.setattr(nested_folds, "read_model", lambda path, program: path)
    monkeypatch.setattr(nested_folds, "predicted", lambda saved, family, seed, device: ())
    monkeypatch.setattr(nested_folds, "judged", judged)
    monkeypatch.setattr(nested_folds, "digest", "digest of {}".format)
    known, writings = {"1 B": "kept"}, []
    with pytest.raises(UserError, match="stopped"):
        nested_folds.fold_all(tasks, families, known, 1, None, lambda: writings.append(set(known)))
    assert known["1 B"] == "kept" and known["2 B"]["model"] == "digest of model"
    assert writings[-1] == {"1 B", "2 B", "1 C", "2 C"}


def test_what_another_model_folded_is_not_known(tmp_path):
    models = {(1, name): tmp_path / name for name in "ABC"}
    for path in models.values():
        path.write_text("weights")
    known = {f"1 {name}": dict(model=nested_folds.digest(models[1, "A"])) for name in "AB"} | {"2 B": {}}
    (tmp_path / "B").write_text("other weights")
    nested_folds.digest.cache_clear()
    nested_folds.forget_other_models(known, models)
    assert [*known] == ["1 A", "2 B"]


def test_the_table_is_of_families_not_of_folds():
    def of(tm_score, right_hand):
        return dict(tm_score=tm_score, lddt_ca=tm_score, right_hand=right_hand)
    known = {"1 A": of(0.4, True), "2 A": of(0.6, True), "1 B": of(0.9, True), "1 C": of(0.2, False)}
    found = nested_folds.table(known, dict(A="x", B="x", C="x"))["x"]
    assert (found["families"], found["folds"]) == (3, 4)
    assert found["TM-score"] == (0.5, [0.2, 0.9]) and found["TM > .5"][0] == pytest.approx(0.5)
    assert found["right hand"][0] == pytest.approx(2 / 3) and found["right hand"][1] == [0, 1]


def test_the_line_of_plddt_sees_every_family_once():
    known = {"2 A": "second", "1 B": "first", "2 B": "second", "10 A": "tenth"}
    assert sorted(nested_folds.one_of_each(known, [1, 2, 10])) == ["first", "second"]
    assert nested_folds.one_of_each(known, [10, 1, 2]) == ["tenth", "first"]


@pytest.mark.slow
def test_a_family_is_folded_and_a_second_call_knows_it(tmp_path):
    families = require_shared("data", "families_more")
    (tmp_path / "families").mkdir()
    for suffix in ("a3m", "pdb"):
        shutil.copy(families / f"5COY_A.{suffix}", tmp_path / "families")
    a_run(tmp_path, "full-1-fold-0", ["5COY_A"], ["1CTF_A"])
    program = [sys.executable, ROOT / "benchmarks/nested_folds.py", "--runs", tmp_path, "--device", "cpu"]
    outputs = []
    for begin in ("1 folds, 0 of them known", "1 folds, 1 of them known"):
        done = subprocess.run([*program, "--jobs", "1"], text=True, capture_output=True, check=False)
        assert done.returncode == 0 and done.stdout.startswith(begin), done.stderr
        outputs.append(json.loads((tmp_path / "folds.json").read_text()))
    assert outputs[0]["families"] == outputs[1]["families"] and outputs[0]["table"] == outputs[1]["table"]
    assert outputs[0]["table"]["families"]["TM-score"][0] == outputs[0]["families"]["1 5COY_A"]["tm_score"]
    hold_file(tmp_path / "folds.json")
    try:
        done = subprocess.run(program, text=True, capture_output=True, check=False)
    finally:
        release()
    assert done.returncode == 2 and "another call is writing it" in done.stderr, done.stderr
