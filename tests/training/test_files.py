"""Whole files, whatever happens while they are written; JSON."""
import resource
import signal
import subprocess
import sys

import pytest
import torch

from fusion_lab.training import files
from fusion_lab.training.errors import UserError
from tests.support import ROOT

KILLED = f"""
import os, signal, sys
sys.path.insert(0, {str(ROOT)!r})
from fusion_lab.training import files
os.fsync = lambda handle: os.kill(os.getpid(), signal.SIGKILL)
files.write_text(sys.argv[1], "new")
"""


def test_a_kill_leaves_the_old_file_whole_and_its_leftover_is_used_up(tmp_path):
    path = tmp_path / "x"
    files.write_text(path, "old")
    assert subprocess.run([sys.executable, "-c", KILLED, path]).returncode == -signal.SIGKILL
    assert path.read_text() == "old" and len(list(tmp_path.iterdir())) == 2
    files.write_text(path, "newer")
    assert path.read_text() == "newer" and list(tmp_path.iterdir()) == [path]


def test_links_are_followed_and_a_directory_is_not_replaced(tmp_path):
    (tmp_path / "link").symlink_to(tmp_path / "x")
    files.write_text(tmp_path / "link", "text")
    assert (tmp_path / "x").read_text() == "text" and (tmp_path / "link").is_symlink()
    with pytest.raises(UserError, match="cannot write"):
        files.write_text(tmp_path, "x")


def test_a_full_disk_is_no_wrong_use_and_leaves_nothing(tmp_path):
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    files.write_text(tmp_path / "x", "old")
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, hard))
    try:
        with pytest.raises(UserError, match="ulimit -f") as full:
            files.write_atomically(tmp_path / "x", lambda file: torch.save(torch.zeros(10 ** 6), file))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert full.value.code == 1 and [p.read_text() for p in tmp_path.iterdir()] == ["old"]


@pytest.mark.parametrize("content", ["", "[1]", "{", "[" * 10 ** 5, "\x80"])
def test_what_is_no_json_object_is_refused_by_name(content, tmp_path):
    (tmp_path / "v1.json").write_bytes(content.encode("latin-1"))
    with pytest.raises(UserError, match="summary .*v1.json"):
        files.read_json(tmp_path / "v1.json", "summary")
    files.write_json(tmp_path / "v1.json", dict(a=files.finite([1.0, float("nan")])))
    assert files.read_json(tmp_path / "v1.json") == dict(a=[1.0, None])
    (tmp_path / "v1.json").write_text('{"a": NaN}')
    assert files.read_json(tmp_path / "v1.json") == dict(a=None)


def test_what_is_set_aside_never_replaces_anything(tmp_path):
    for number in range(3):
        (tmp_path / "x").write_text(str(number))
        files.set_aside(tmp_path / "x")
    assert files.set_aside(tmp_path / "x") is None
    assert sorted(p.read_text() for p in tmp_path.iterdir()) == ["0", "1", "2"]
    assert all(p.name.startswith("x.old-") for p in tmp_path.iterdir())
