"""Samples split over ranks (--sequence-parallel): equal to one process, on two and four of them."""
import json

import pytest
from conftest import run_program
from split_samples import CASES, MUTANTS

ON = {"uneven, masks": "24", "predictions": "24", "uneven, no masks, more ranks than rows": "4",
      "baseline": "4"}  # ranks; two otherwise
LONG = ("compiled",)
PRECISION = {"couplings, uneven": 1e-5}  # float64 otherwise
BROKEN = 1e-3


def errors(names):
    """Of cases and mutants, all in one go, for the sake of the imports."""
    done = run_program("tests/split_samples.py", *names)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_losses_and_all_gradients_are_those_of_one_process():
    found = errors(f"{name} / {ON.get(name, '2')}" for name in CASES if name not in LONG)
    rounded = found.pop("bfloat16")["2"]  # by the rule of 3 of all mixed precision
    assert 0.001 < rounded["error"] <= 3 * rounded["alone"], rounded
    for name, by_ranks in found.items():
        assert set(by_ranks) == set(ON.get(name, "2"))
        for ranks, worst in by_ranks.items():
            assert worst["error"] < PRECISION.get(name, 1e-10), (name, ranks, worst)


def test_a_broken_exchange_is_caught():
    found = errors(MUTANTS)
    assert set(found) == set(MUTANTS)
    assert {name: worst for name, worst in found.items() if worst["error"] < BROKEN} == {}


@pytest.mark.slow
@pytest.mark.parametrize("name", LONG)
def test_compiled_in_one_piece(name):
    worst = errors([f"{name} / 2"])[name]["2"]
    assert worst["error"] < 1e-10, worst
