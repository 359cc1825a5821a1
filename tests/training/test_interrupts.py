"""While a program starts or ends: Ctrl-C, streams that are closed, no more memory."""
import os
import signal
import subprocess
import sys

import pytest

from fusion_lab.training import interrupts
from tests.support import PATIENCE, ROOT

PROGRAM = f"""
import sys
sys.path.insert(0, {str(ROOT)!r})
from fusion_lab.training import interrupts
interrupts.quiet(__name__)
import os, subprocess
from fusion_lab.training import files
def run(argv):
    with open("result", "w") as result:  # gets the number of a closed stream, where that is free
        print("to stdout", flush=True)
        print("to stderr", file=sys.stderr)
        subprocess.run(["sh", "-c", "echo of another program; echo and its complaint >&2"])
        os.write(2, b"of a library")
        result.write(sys.stdin.read())
    return 0
sys.exit(files.exit_code(run, [], "p"))
"""


@pytest.mark.parametrize("closed", ["0<&-", "1>&-", "2>&-", "1>&- 2>&-", "0<&- 1>&- 2>&-"])
def test_streams_that_are_closed_harm_nothing(closed, tmp_path):
    command = ["bash", "-c", f'exec "$0" -c "$1" {closed}', sys.executable, PROGRAM]
    done = subprocess.run(command, cwd=tmp_path, input="what was read", capture_output=True, text=True,
                          timeout=PATIENCE, check=False)
    assert done.returncode == 0
    assert (tmp_path / "result").read_text() == ("" if "0<&-" in closed else "what was read")
    assert done.stdout == ("" if "1>&-" in closed else "to stdout\nof another program\n")
    assert done.stderr == ("" if "2>&-" in closed else "to stderr\nand its complaint\nof a library")


@pytest.mark.parametrize("error", ['MemoryError()', 'RuntimeError("can\'t start new thread")',
                                   'ImportError("x.so: failed to map segment from shared object")'])
def test_want_of_memory_is_one_line_from_the_first_import_on(error, tmp_path):
    for code in (f"raise {error}", f"import sys\nfrom fusion_lab.training import files\ndef run(argv):\n"
                 f"    raise {error}\nsys.exit(files.exit_code(run, [], 'p'))"):
        begin = "from fusion_lab.training import interrupts\ninterrupts.quiet(__name__)\n"
        done = subprocess.run([sys.executable, "-c", begin + code], cwd=ROOT, capture_output=True, text=True,
                              timeout=PATIENCE, check=False)
        assert done.returncode == 1 and done.stderr.count("\n") == 1 and ": error: " in done.stderr
        assert "memory" in done.stderr
    done = subprocess.run([sys.executable, "-c", begin + "raise ValueError"], cwd=ROOT, capture_output=True,
                          text=True, check=False)
    assert "Traceback" in done.stderr


@pytest.fixture
def ctrl_c(monkeypatch):
    """Sets what Ctrl-C does, until the test ends."""
    before = signal.getsignal(signal.SIGINT)
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    yield lambda handler: signal.signal(signal.SIGINT, handler)
    signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize("name, handler, then", [
    ("a.module", signal.default_int_handler, signal.default_int_handler),
    ("__main__", signal.SIG_IGN, signal.SIG_IGN), ("a.module", signal.SIG_IGN, signal.SIG_IGN),
    ("__main__", signal.default_int_handler, interrupts.leave)])
def test_who_is_quiet_about_ctrl_c(name, handler, then, ctrl_c):
    hook = sys.excepthook
    ctrl_c(handler)
    interrupts.quiet(name)
    assert signal.getsignal(signal.SIGINT) == then
    assert sys.excepthook is (interrupts.say_what_is_missing if name == "__main__" else hook)


def test_ctrl_c_raises_while_there_is_something_to_end_in_order(ctrl_c):
    for outside, inside in ((interrupts.leave, signal.default_int_handler), (signal.SIG_IGN,) * 2):
        ctrl_c(outside)
        with pytest.raises(KeyError), interrupts.Raised():
            assert signal.getsignal(signal.SIGINT) is inside
            assert interrupts.Raised.within is (outside is interrupts.leave)
            raise KeyError
        assert signal.getsignal(signal.SIGINT) is outside and not interrupts.Raised.within


def test_to_leave_is_a_line_and_the_code_of_the_signal(monkeypatch, capsys):
    monkeypatch.setattr(os, "_exit", lambda code: print(code))
    interrupts.leave(signal.SIGTERM, None)
    assert capsys.readouterr() == ("143\n", "interrupted\n")


def test_a_closed_stream_is_opened_again_and_others_are_left_alone(monkeypatch):
    before = sys.stdin, sys.stderr
    monkeypatch.setattr(sys, "stdout", None)
    interrupts.open_streams()
    assert (sys.stdin, sys.stderr) == before and sys.stdout.write("nowhere") == 7
    assert os.path.samestat(os.fstat(sys.stdout.fileno()), os.stat(os.devnull))
    assert not os.get_inheritable(sys.stdout.fileno())  # it has not got the number 1
    os.close(sys.stdout.fileno())


def test_what_is_missing_is_said(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["there/p.py"])
    for error, words in ((MemoryError(), "out of memory"), (OSError("Cannot allocate memory"),) * 2):
        interrupts.say_what_is_missing(type(error), error, None)
        assert capsys.readouterr().err == (f"p.py: error: {words}: the system gives no more memory or "
                                           "threads; see ulimit -v and ulimit -u\n")
    interrupts.say_what_is_missing(ValueError, ValueError("other"), None)
    assert capsys.readouterr().err == "ValueError: other\n"
