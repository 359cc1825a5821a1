"""Which tile sizes a kernel runs with: what wins, what is kept, what is looked up."""
import json

import pytest

pytest.importorskip("triton", reason="Triton is not installed (pip install triton)")
from fusion_lab.kernels import tuner

FIRST, SECOND = dict(BM=64, num_warps=4), dict(BM=128, num_warps=8)


def launched(shape="bfloat16 L256"):
    """The configuration that a launch of "k" runs with last."""
    ran = []
    tuner.launch("k", shape, [FIRST, SECOND], ran.append)
    return ran[-1]


def test_a_candidate_wins_only_beyond_the_spread_of_both():
    assert tuner.winner({0: [5, 6, 7, 8, 9], 1: [1, 2, 3, 4, 5]}) == 1  # 4 < 6
    assert tuner.winner({0: [5, 6, 7, 8, 9], 1: [4, 5, 6, 7, 8]}) == 0  # 7 > 6
    assert tuner.winner({1: [5, 6, 7, 8, 9], 2: [5, 5, 6, 6, 7]}) == 1  # the first that fits, 6 = 6


@pytest.mark.parametrize("table, shape, expected", [
    ({}, "bfloat16 L256", FIRST), ({"k bfloat16 L256": SECOND}, "bfloat16 L256", SECOND),
    ({"k bfloat16 L256": SECOND}, "bfloat16 L512", FIRST),
    ({"k bfloat16 L256": SECOND}, "float16 L256", SECOND),
    ({"k float16 L256": FIRST, "k bfloat16 L256": SECOND}, "float16 L256", FIRST),
    ({"k bfloat16 L256": SECOND}, "float32 L256", FIRST),
    ({"k bfloat16 L256": dict(BM=7)}, "bfloat16 L256", FIRST),
    ({"k bfloat16 L256": [1]}, "bfloat16 L256", FIRST)])
def test_the_table_is_looked_up_and_only_candidates_run(table, shape, expected, monkeypatch):
    monkeypatch.setattr(tuner, "table", lambda: table)
    assert launched(shape) == expected


def test_retuning_keeps_the_winner_in_the_cache_beside_what_was_there(monkeypatch, tmp_path):
    path = tmp_path / "fusion_lab" / "gpu.json"
    tuner.write(path, {"other": SECOND})
    monkeypatch.setattr(tuner, "cache_file", lambda: path)
    monkeypatch.setattr(tuner, "fastest", lambda key, candidates, run: candidates[1])
    with tuner.retuning() as found:
        assert launched() == SECOND and found == {"k bfloat16 L256": SECOND}
    assert json.loads(path.read_text()) == {"other": SECOND, "k bfloat16 L256": SECOND}
    assert tuner.found is None and [p.name for p in path.parent.iterdir()] == ["gpu.json"]


@pytest.mark.parametrize("text", ["", "[1]", "{", "[" * 100_000])
def test_a_table_that_cannot_be_used_is_none(text, tmp_path):
    (tmp_path / "t.json").write_text(text)
    assert tuner.read(tmp_path / "t.json") == tuner.read(tmp_path / "absent.json") == {}


def test_no_candidate_that_fits_is_an_error_in_one_line(monkeypatch):
    def run(candidate):
        raise tuner.triton.runtime.errors.OutOfResources(100_000, 65_536, "shared memory")
    monkeypatch.setattr(tuner.torch.cuda, "get_device_name", lambda: "Small GPU")
    with pytest.raises(RuntimeError, match="k bfloat16: none of 2 tile sizes fits Small GPU$"):
        tuner.fastest("k bfloat16", [FIRST, SECOND], run)
