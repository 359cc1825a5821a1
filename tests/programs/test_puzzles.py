"""Each puzzle is unsolved as it stands, and solved by an answer."""
import importlib.util
import subprocess
import sys

import pytest

from fusion_lab.training.files import interpreter_fault
from tests.support import ROOT

if importlib.util.find_spec("triton") is None:
    pytest.skip("Triton is not installed (pip install triton)", allow_module_level=True)
if fault := interpreter_fault():
    pytest.skip(fault, allow_module_level=True)
CHECK, ANSWERS = ROOT / "puzzles" / "check.py", ROOT / "tests" / "puzzle_answers.py"
PUZZLES = sorted(CHECK.parent.glob("p*_*.py"))


def check(*arguments):
    return subprocess.run([sys.executable, CHECK, *map(str, arguments)], capture_output=True, text=True,
                          check=False)


def test_every_puzzle_is_unsolved_and_has_an_answer():
    numbers = range(1, len(PUZZLES) + 1)
    unsolved, solved = check(*numbers), check(*numbers, "--answer", ANSWERS)
    assert (unsolved.returncode, solved.returncode) == (1, 0), unsolved.stderr + solved.stdout + solved.stderr
    for number in numbers:
        assert f"puzzle {number}: not yet\n" in unsolved.stdout
        assert f"puzzle {number}: solved\n" in solved.stdout


def test_every_puzzle_ends_with_the_path_of_our_own_kernel():
    assert all((ROOT / path.read_text(encoding="utf-8").split()[-1]).exists() for path in PUZZLES)


def test_a_wrong_element_is_named_and_memory_is_counted(tmp_path):
    own = tmp_path / "mine.py"  # every row takes the first bias; the first product is none
    own.write_text(ANSWERS.read_text().replace("row % BIAS_ROWS * S", "0").replace("(x @", "(x @ 3 @"))
    done = check(3, 1, "--answer", own)
    assert done.returncode == 1 and "the first is [0, 0, 1, " in done.stdout
    assert "load 16,384 elements" in done.stdout and "store 8,192" in done.stdout
    assert done.stdout.endswith("puzzle 1: not yet\n") and not done.stderr


def test_a_forgotten_mask_and_atomics_are_named_by_line(tmp_path):
    text, own = ANSWERS.read_text(), tmp_path / "mine.py"
    text = text.replace("+ gated, mask=there)", "+ gated)").replace("tl.store(out + column, total)",
                                                                   "tl.atomic_add(out + column, total)")
    own.write_text(text)
    done = check(2, 6, "--answer", own)
    lines = [1 + text.splitlines().index(line) for line in text.splitlines() if "+ gated)" in line
             or "atomic" in line]
    first, second = (line for line in done.stdout.splitlines() if line.startswith(str(own)))
    assert done.returncode == 1 and f"line {lines[0]}: IndexError" in first and "mask" in first
    assert f"line {lines[1]}: " in second and "atomics" in second


@pytest.mark.parametrize("arguments", [(9,), (1, "--answer", "nofile.py")])
def test_bad_input_is_one_line(arguments):
    """Also where neither torch nor Triton is installed."""
    done = subprocess.run([sys.executable, "-S", CHECK, *map(str, arguments)], capture_output=True, text=True)
    assert done.returncode == 2 and done.stderr.count("\n") == 1 and not done.stdout
