"""What happens before torch is imported, in this process; tests/programs/test_start.py starts programs."""
import importlib.util
import os

import pytest

from fusion_lab.training import start
from fusion_lab.training.program import DEFAULT_PROGRAM
from tests.second_program import COMMAND_LINE


@pytest.mark.parametrize("package", ["torch", "numpy", "tqdm"])
def test_packages_that_a_program_needs(package, monkeypatch, capsys):
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == package else find(name))
    with pytest.raises(SystemExit) as ended:
        start.go_on("x.py", lambda command_line: None, COMMAND_LINE)
    said = capsys.readouterr().err
    assert ended.value.code == 3 and said.startswith("x.py: error: ") and f" lacks {package}: pip " in said


def test_a_tool_judges_by_the_program_that_it_is_given(monkeypatch):
    """As soon as that is known; one that does not make itself known is not waited for."""
    judged, known = [], str(COMMAND_LINE.file)
    monkeypatch.setattr(start, "get_ready", lambda: None)
    monkeypatch.setattr(start, "go_on", lambda *given: judged.append(given))
    monkeypatch.setattr(start, "load_program", lambda path: start.begin(COMMAND_LINE, "second_program"))
    start.begin_tool("tool.py", ["--program", known], "judge")
    assert judged == [("tool.py", "judge", COMMAND_LINE)] and start.waiting == {}
    loaded = []
    monkeypatch.setattr(start, "load_program", lambda path: loaded.append((path, [*start.waiting])))
    start.begin_tool("tool.py", [], "judge")
    assert loaded == [(DEFAULT_PROGRAM, [os.path.realpath(DEFAULT_PROGRAM)])] and start.waiting == {}
    assert start.begin(COMMAND_LINE, "second_program") is None and len(judged) == 1
