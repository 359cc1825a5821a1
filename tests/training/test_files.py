"""How programs end, and what they leave on disk: whole files, directories of one run, exit codes, signals."""
import os
import resource
import signal
import subprocess
import sys
import time

import pytest
import torch

from fusion_lab.training import errors, files
from fusion_lab.training.directory import Directory
from fusion_lab.training.errors import UserError
from tests.support import ROOT


@pytest.fixture(autouse=True)
def nothing_is_held_afterwards():
    yield
    errors.at_end.close()


def raiser(error):
    def run(_argv):
        raise error
    return run


class OutOfMemoryError(RuntimeError):
    """torch's bears this name."""


# --- Ends -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("error, code, word", [
    (UserError("wrong"), 2, "wrong"), (UserError("absent", code=4), 4, "absent"),
    (KeyboardInterrupt(), 130, "interrupted"), (MemoryError(), 1, "out of memory"),
    (OutOfMemoryError("x"), 1, "out of memory"), (RuntimeError("cannot Allocate memory"), 1, "out of memory"),
    (RuntimeError("[gloo/transport/tcp/pair.cc] Connection closed\nmore"), 1, "a rank lost the others"),
    (RuntimeError("No working C++ compiler"), 3, "g++"),
    (OSError(2, "No such file", "data.a3m"), 2, "data.a3m")],
    ids=lambda value: type(value).__name__)
def test_expected_failures_are_a_line_and_a_code(error, code, word, capsys):
    assert errors.exit_code(raiser(error), [], "p") == code
    error = capsys.readouterr().err
    assert word in error and error.startswith("p: error: ") and error.count("\n") == 1


def test_mistakes_of_ours_are_not_hidden_and_success_is_silent(capsys):
    for error in (RuntimeError("a mistake"), ValueError("another")):
        with pytest.raises(type(error)):
            errors.exit_code(raiser(error), [], "p")
    assert errors.exit_code(lambda argv: len(argv), ["a", "b"], "p") == 2 and capsys.readouterr().err == ""


BEGIN = f"""
import os, signal, sys
sys.path.insert(0, {str(ROOT)!r})
from fusion_lab.training import errors, files
from fusion_lab.training.flags import Parser
"""
PRINTING = BEGIN + """
run = Parser(prog="p").parse_args if "--help" in sys.argv else lambda argv: print("x" * 10 ** 6) or 0
sys.exit(errors.exit_code(run, sys.argv[1:], "p"))
"""


def test_a_full_disk_or_a_closed_pipe_behind_the_output_ends_without_a_traceback():
    for flags in ([], ["--help"]):
        with open("/dev/full", "w") as full:
            done = subprocess.run([sys.executable, "-c", PRINTING, *flags], stdout=full,
                                  stderr=subprocess.PIPE, text=True)
        assert (done.returncode, done.stderr) == (
            1, "p: error: the output cannot be written: the disk is full\n")
    done = subprocess.run(f'{sys.executable} -c "$CODE" | head -c 1; exit ${{PIPESTATUS[0]}}', shell=True,
                          executable="/bin/bash", env={**os.environ, "CODE": PRINTING}, capture_output=True)
    assert done.returncode == errors.CLOSED_PIPE and done.stderr == b""


CLOSED = BEGIN + """
errors.begin(__name__)
with open(sys.argv[1], "w"):
    print("to stdout", flush=True)
    print("to stderr", file=sys.stderr, flush=True)
    sys.stdin.read()
    sys.exit(7)
"""


@pytest.mark.parametrize("closed, out, err", [
    (">&-", "", "to stderr\n"), ("2>&-", "to stdout\n", ""), ("<&- >&- 2>&-", "", "")])
def test_what_is_closed_stays_silent_and_no_file_takes_its_place(closed, out, err, tmp_path):
    command = ["bash", "-c", f'exec "$0" -c "$CODE" file {closed}', sys.executable]
    done = subprocess.run(command, cwd=tmp_path, env={**os.environ, "CODE": CLOSED}, capture_output=True,
                          text=True, stdin=subprocess.DEVNULL)
    assert (done.returncode, done.stdout, done.stderr) == (7, out, err)
    assert (tmp_path / "file").read_text() == ""


def test_the_first_signal_asks_and_the_second_one_acts():
    before = signal.getsignal(signal.SIGTERM)
    with errors.StopRequest() as stop:
        assert stop.signal is None
        os.kill(os.getpid(), signal.SIGTERM)
        assert stop.signal == signal.SIGTERM and signal.getsignal(signal.SIGTERM) == before
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(5)
    with errors.StopRequest(patient=True) as stop:  # where several processes may pass on one signal twice
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGINT):
            os.kill(os.getpid(), number)
            assert stop.signal == number
    assert signal.getsignal(signal.SIGTERM) == before


def test_a_signal_that_is_ignored_stays_so(monkeypatch):
    """As nohup has it for SIGHUP."""
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with errors.StopRequest() as stop:
            os.kill(os.getpid(), signal.SIGHUP)
            assert stop.signal is None and signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


# --- Files ------------------------------------------------------------------------------------------------


KILLED = BEGIN + """
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


# --- Directories ------------------------------------------------------------------------------------------


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


def test_what_is_set_aside_never_replaces_anything(tmp_path):
    for number in range(3):
        (tmp_path / "x").write_text(str(number))
        files.set_aside(tmp_path / "x")
    assert files.set_aside(tmp_path / "x") is None
    assert sorted(p.read_text() for p in tmp_path.iterdir()) == ["0", "1", "2"]
    assert all(p.name.startswith("x.old-") for p in tmp_path.iterdir())
