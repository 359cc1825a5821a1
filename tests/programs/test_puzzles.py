"""Each puzzle is unsolved as it stands, and solved by an answer."""
import importlib.util
import re
import subprocess
import sys
import xml.etree.ElementTree as tree

import pytest

from puzzles.interpreter import interpreter_fault
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


def picture(number, path, *arguments):
    """{"launch tensor loaded|stored": {(row, column) of each element: programs}} as the picture's rectangles
    lie, which must agree with what they say when one points at them."""
    check(number, "--picture", path, *arguments)
    panels = {}
    for panel in tree.parse(path).iter("{http://www.w3.org/2000/svg}g"):
        elements = panels[panel.get("id")] = {}
        for block in panel.findall("{*}rect"):
            x, y, width, height = (int(block.get(name)) for name in ("x", "y", "width", "height"))
            who, place = block.findtext("{*}title").split(": ")
            rows, columns = range(y // 10, (y + height) // 10), range(x // 5, (x + width) // 5)
            assert [*map(int, re.findall(r"\d+", place))] == [rows[0], rows[-1], columns[0], columns[-1]]
            elements |= {(row, column): who for row in rows for column in columns}
    return panels


def test_a_picture_shows_which_program_stores_which_element(tmp_path):
    """Puzzle 2: 500 elements in rows of 64, 128 for each program. Puzzle 7: tiles of 16 by 16."""
    solved = picture(2, tmp_path / "a.svg", "--answer", ANSWERS)
    expected = {divmod(element, 64): str(element // 128) for element in range(500)}
    assert solved == dict.fromkeys(
        ("1 x loaded", "1 gate loaded", "1 update loaded", "1 out stored"), expected)
    tiles = picture(7, tmp_path / "b.svg", "--answer", ANSWERS)
    assert tiles["1 out stored"] == {(r, c): f"{r // 16},{c // 16}" for r in range(64) for c in range(48)}
    assert tiles["1 x loaded"] == {(r, c): " ".join(f"{r // 16},{j}" for j in range(3))
                                   for r in range(64) for c in range(64)}


def test_a_wrong_kernel_has_another_picture(tmp_path):
    """Programs that overlap and leave the end to nobody; a bias of which all rows take the first."""
    own, text = tmp_path / "mine.py", ANSWERS.read_text()
    own.write_text(text.replace("* BLOCK + tl", "* (BLOCK // 2) + tl").replace("row % BIAS_ROWS * S", "0"))
    halves = picture(2, tmp_path / "a.svg", "--answer", own)["1 out stored"]
    assert [halves[divmod(e, 64)] for e in (0, 64, 128, 319)] == ["0", "0 1", "1 2", "3"]
    assert halves[5, 0] == halves[7, 51] == "nobody"
    bias = picture(3, tmp_path / "b.svg", "--answer", own)["1 bias loaded"]
    assert {bias[0, column] for column in range(32)} == {"256 programs"} and bias[1, 0] == "nobody"


def test_a_picture_shows_pytorch_s_matrix_products(tmp_path):
    packed = picture(1, tmp_path / "a.svg", "--answer", ANSWERS)
    assert [*packed] == ["1 x loaded", "1 operand 2 loaded", "1 result stored"]
    assert packed["1 result stored"] == {(row, column): "0" for row in range(32) for column in range(96)}


@pytest.mark.parametrize("arguments", [(1, 2, "--picture", "a.svg"), (9,), (1, "--answer", "nofile.py")])
def test_bad_input_is_one_line(arguments):
    """Also where neither torch nor Triton is installed."""
    done = subprocess.run([sys.executable, "-S", CHECK, *map(str, arguments)], capture_output=True, text=True)
    assert done.returncode == 2 and done.stderr.count("\n") == 1 and not done.stdout
