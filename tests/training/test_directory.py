"""Directories of results, each of one run: refused, set aside or gone on with."""
import pytest

from fusion_lab.training import errors
from fusion_lab.training.directory import Directory
from fusion_lab.training.errors import UserError


@pytest.fixture(autouse=True)
def nothing_is_held_afterwards():
    yield
    errors.at_end.close()


@pytest.mark.parametrize("named, force, resumed, result", [
    (True, False, False, "refused"), (True, True, False, "aside"), (False, False, False, "aside"),
    (False, False, True, "kept"), (True, False, True, "kept")])
def test_a_directory_with_results_is_refused_kept_or_set_aside(named, force, resumed, result, tmp_path):
    path = tmp_path / "d"
    path.mkdir()
    (path / "old").write_text("")
    if result == "refused":
        with pytest.raises(UserError, match="--force"):
            Directory(path, named, force).claim(resumed)
    else:
        Directory(path, named, force).claim(resumed)
    assert path.is_dir() and (path / "old").exists() == (result != "aside")
    assert len(list(tmp_path.glob("d.old-*/old"))) == (result == "aside")


def test_the_directory_one_is_in_is_not_set_aside(tmp_path, monkeypatch):
    (tmp_path / "d" / "e").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "d" / "e")
    with pytest.raises(UserError, match="the current directory is in it"):
        Directory("..", named=True, force=True).claim()
