"""What tests share: where the ground truth lies, how a program of this project is started and read."""
import json
import os
import pathlib
import signal
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest

ROOT = pathlib.Path(__file__).resolve().parent.parent
SHARED = ROOT.parent / "shared"  # reference values and real proteins; never copied into the project
sys.path.insert(0, str(ROOT))
# One OpenMP thread: two that spin on a core shared with another process are a hundred times slower.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Shells let what runs in the background ignore Ctrl-C, and that is handed on to every program started here.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
GOING_ON = SimpleNamespace(signal=None)  # of an evaluation that no signal ends
PATIENCE = 300  # s, on any machine under any load; only what hangs is kept waiting so long


def require_shared(*parts):
    """Path below ../shared. Absent: skip with the reason, except in CI, where that is a failure."""
    path = SHARED.joinpath(*parts)
    if not path.exists():
        reason = (f"ground truth not found: {path} (../shared, beside the checkout, holds the authors' "
                  "reference values and real proteins, which are not part of the project)")
        (pytest.fail if os.environ.get("CI") else pytest.skip)(reason)
    return path


def wait_for(condition, patience=PATIENCE):
    """Return as soon as condition() holds; a test whose condition never comes fails."""
    deadline = time.monotonic() + patience
    while not condition():
        if time.monotonic() > deadline:
            pytest.fail("this should have happened by now")
        time.sleep(0.02)


def gone(pid):
    """Whether a process has ended; a zombie that nobody has reaped yet has."""
    try:
        return pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except (FileNotFoundError, ProcessLookupError):
        return True


def run_program(program, *args, cwd=None, env=None, patience=PATIENCE):
    """Run a program or script of this project as a user does; returns CompletedProcess with text output."""
    command = [*[sys.executable] * str(program).endswith(".py"), str(ROOT / program), *map(str, args)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHON": sys.executable, **(env or {})}
    with subprocess.Popen(command, cwd=cwd, env=environment, text=True, start_new_session=True,
                          stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        try:
            outputs = process.communicate(timeout=patience)
        except BaseException:  # what it has started would keep a GPU or a core from the next test
            os.killpg(process.pid, signal.SIGKILL)
            raise
    return subprocess.CompletedProcess(command, process.returncode, *outputs)


def code_of(main, *argv):
    """The exit code of a program in this process, however it ends."""
    try:
        return main([*map(str, argv)])
    except SystemExit as error:
        return error.code


def last_json(result):
    """The contract of every run: its last stdout line is JSON of at most 1 kB, headline figures of the file
    that it names, which may have more rows. Returns the content of that file."""
    text = result if isinstance(result, str) else result.stdout
    line = text.strip().splitlines()[-1]
    headline = json.loads(line)
    path = headline.pop("summary_file", None)
    if path is None:  # --check-flags, predictions: nothing but this line
        return headline
    assert len(line.encode()) <= 1024
    whole = json.loads(pathlib.Path(path).read_text(encoding="utf-8"))
    for key, value in headline.items():
        assert contains(whole[key], value), key
    return whole


def contains(whole, part):
    """Whether part says nothing that whole does not say in the same place."""
    if isinstance(part, dict):
        return all(key in whole and contains(whole[key], value) for key, value in part.items())
    if isinstance(part, list):  # in the same order, but some may be left out
        rest = iter(whole)
        return all(any(contains(a, b) for a in rest) for b in part)
    return whole == part or isinstance(part, str) and whole.startswith(part)
