"""Standard streams that are closed, full or know few letters, and a system that gives no more memory."""
import io
import subprocess
import sys

import pytest

from fusion_lab.training import files
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


def test_a_full_stdout_is_called_that(tmp_path):
    """Also where a flush has failed before, which throws away what it had."""
    code = PROGRAM.replace('print("to stdout", flush=True)', 'print("to stdout", flush=True) or 1/0')
    with open("/dev/full", "w") as full:
        done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, stdout=full, stderr=subprocess.PIPE,
                              text=True, timeout=PATIENCE, check=False)
    assert (done.returncode, done.stderr) == (1, "p: error: standard output: No space left on device\n")


@pytest.mark.parametrize("errors", ["strict", "surrogateescape"])  # of UTF-8, and of the POSIX locale
def test_letters_that_stdout_lacks_are_spelled_out(errors, monkeypatch):
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(io.BytesIO(), "ascii", errors))
    assert files.exit_code(lambda argv: print("8 \xc5 in \udcc3\udc84.a3m") or 0, [], "p") == 0
    assert sys.stdout.buffer.getvalue() == b"8 \\xc5 in \xc3\x84.a3m\n"


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
