"""How programs end and what they set aside: exit codes, signals, names of what was there before."""
import io
import os
import signal
import stat
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest

from fusion_lab.training import files, locks
from fusion_lab.training.files import UserError
from fusion_lab.training.options import ProfilerConfig
from tests.support import PATIENCE, ROOT


class OutOfMemoryError(RuntimeError):
    """torch's bears this name."""


@pytest.fixture(autouse=True)
def nothing_is_held_afterwards():
    yield
    locks.release()


def raiser(error):
    def run(_argv):
        raise error
    return run


MEMORY = "out of memory: lower --batch-size, --seq-len or --num-seqs, or add --use-amp"
ENDINGS = [
    (UserError("wrong"), 2, "wrong"), (UserError("absent", code=4), 4, "absent"),
    (UserError("long", code=1, details=("first", "second")), 1, "first\nsecond"),
    (KeyboardInterrupt(), 130, "interrupted"),
    (MemoryError(), 1, MEMORY), (OutOfMemoryError("x"), 1, MEMORY), (RuntimeError("ALLOC_FAILED"), 1, MEMORY),
    (RuntimeError("cannot Allocate Memory"), 1, MEMORY),
    *((RuntimeError(text), 3, "torch.compile needs a C++ compiler on CPU (g++) or Triton on a GPU (pip "
       "install triton)") for text in ("No working C++ compiler", "needs a working triton installation")),
    (OSError(2, "No such file", "data.a3m"), 2, "data.a3m: No such file")]


@pytest.mark.parametrize("error, code, message", ENDINGS, ids=lambda value: type(value).__name__)
def test_expected_failures_end_with_their_code_and_words(error, code, message, capsys):
    assert files.exit_code(raiser(error), [], "p") == code
    assert capsys.readouterr().err == f"p: error: {message}\n"


def test_other_errors_are_not_hidden_and_success_is_silent(capsys):
    for error in (RuntimeError("a mistake"), ValueError("another")):
        with pytest.raises(type(error)):
            files.exit_code(raiser(error), [], "p")
    assert files.exit_code(lambda argv: len(argv), ["a", "b"], "p") == 2 and capsys.readouterr().err == ""


@pytest.mark.parametrize("error, code, words, of_a_file", [
    (BrokenPipeError(32, "Broken pipe"), 141, "", ""),
    (OSError(28, "No space left"), 1, "p: error: standard output: No space left\n",
     "p: error: writing a file: No space left\n")])
def test_an_output_that_cannot_be_written_is_dropped(error, code, words, of_a_file, monkeypatch, capsys):
    """Whether a print or the last flush tells of it; a file that cannot be written leaves the output be."""
    dropped = []
    monkeypatch.setattr(files, "drop_output", lambda: dropped.append(True))
    assert files.exit_code(raiser(error), [], "p") == code and dropped == []
    assert capsys.readouterr().err == of_a_file
    monkeypatch.setattr(sys, "stdout", SimpleNamespace(flush=lambda: raiser(error)(None)))
    for number, run in enumerate((raiser(error), lambda argv: 0), 1):
        assert files.exit_code(run, [], "p") == code and dropped == [True] * number
        assert capsys.readouterr().err == words


def test_the_first_signal_asks_and_the_second_one_acts():
    before = signal.getsignal(signal.SIGTERM)
    with files.StopRequest() as stop:
        assert stop.signal is None
        os.kill(os.getpid(), signal.SIGTERM)
        assert stop.signal == signal.SIGTERM and signal.getsignal(signal.SIGTERM) == before
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(5)
    with files.StopRequest() as stop:
        os.kill(os.getpid(), signal.SIGINT)
    assert stop.signal == signal.SIGINT and signal.getsignal(signal.SIGINT) is signal.default_int_handler
    with files.StopRequest():
        pass
    assert signal.getsignal(signal.SIGTERM) == before


def test_a_patient_request_takes_every_signal_as_one_wish():
    """Where several processes may pass on one signal twice."""
    before = signal.getsignal(signal.SIGINT)
    with files.StopRequest(patient=True) as stop:
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGINT):
            assert signal.getsignal(number) == stop.ask  # or the next line would end this process
            os.kill(os.getpid(), number)
            assert stop.signal == number
    assert signal.getsignal(signal.SIGINT) == before


def test_what_is_there_is_set_aside_under_its_time(tmp_path, monkeypatch):
    monkeypatch.setattr(time, "strftime", lambda form: f"<{form}>")
    base = f"{tmp_path / 'x'}.old-<%Y%m%d_%H%M%S>"
    assert files.set_aside(tmp_path / "x") is None
    for expected in (base, f"{base}-2", f"{base}-3"):
        (tmp_path / "x").mkdir()
        (tmp_path / "x" / "inside").write_text(expected)
        assert files.set_aside(f"{tmp_path / 'x'}/") == expected and not (tmp_path / "x").exists()
        assert open(os.path.join(expected, "inside")).read() == expected
    (tmp_path / "x").symlink_to(tmp_path / "nowhere")
    assert files.set_aside(tmp_path / "x") == f"{base}-4"


@pytest.mark.parametrize("content, named, force, result", [
    (True, True, False, "refused"), (True, True, True, "kept"), (True, False, False, "aside"),
    (True, False, True, "aside"), (False, True, False, "kept"), (False, False, False, "kept")])
def test_a_directory_with_results_is_refused_kept_or_set_aside(content, named, force, result, tmp_path):
    path = tmp_path / "d"
    path.mkdir()
    if content:
        (path / "old").write_text("")
    if result == "refused":
        with pytest.raises(UserError, match="is not empty: name a fresh directory, or add --force"):
            files.fresh_directory(path, named, force)
    else:
        files.fresh_directory(path, named, force)
    assert path.is_dir() and len(list(tmp_path.iterdir())) == 1 + (result == "aside")
    assert (path / "old").exists() == (content and result != "aside")


@pytest.mark.parametrize("named, resume, aside", [
    (False, None, "d"), (False, "c.pt", "main"), (True, None, "main")])
def test_a_run_sets_earlier_results_aside(named, resume, aside, tmp_path, monkeypatch):
    """The default directory whole, unless its run is resumed; in one that the user named, the main file."""
    monkeypatch.chdir(tmp_path)
    profiler = ProfilerConfig(**dict(profile_dir="d") if named else {})
    directory = tmp_path / profiler.profile_dir
    path = directory / "main"
    directory.mkdir()
    path.write_text("")
    none = dict(save_checkpoint=None, save_best=None)
    training = SimpleNamespace(resume=resume, init_from=str(tmp_path / "models" / "c.pt"), **none)
    for start in (path, directory / "runs" / "c.pt") if aside == "d" else ():
        lost = SimpleNamespace(resume=None, init_from=str(start), **none)
        with pytest.raises(files.UserError, match="--init-from .*: it lies in the directory for this run's"):
            files.run_directory(SimpleNamespace(profiler=profiler, training=lost), "main")
    assert path.exists()
    found = files.run_directory(SimpleNamespace(profiler=profiler, training=training), "main")
    assert found == profiler.profile_dir
    found, = tmp_path.rglob("*.old-*")
    assert found.name.startswith(f"{directory.name if aside == 'd' else aside}.old-")
    assert directory.is_dir() and not path.exists()


def test_where_a_checkpoint_cannot_go_is_said_at_once(tmp_path, monkeypatch):
    files.require_writable(None)
    monkeypatch.chdir(tmp_path)
    files.require_writable(os.path.join("new", "deep", "c.pt"))
    assert list((tmp_path / "new" / "deep").iterdir()) == []
    with pytest.raises(UserError, match=f"cannot write .*c.pt: there is no directory {tmp_path}/absent/deep"):
        files.require_writable(tmp_path / "absent" / "deep" / "c.pt")  # misspelled, or not mounted
    assert not (tmp_path / "absent").exists()
    with pytest.raises(UserError, match=f"cannot write {tmp_path}: is a directory") as caught:
        files.require_writable(tmp_path)
    assert caught.value.code == 2


def test_directories_are_made_and_what_hinders_that_is_named(tmp_path):
    files.require_directory(tmp_path / "a" / "b")
    files.require_directory(tmp_path / "c")
    assert (tmp_path / "a" / "b").is_dir()
    (tmp_path / "c" / "c.pt12345678.part").write_text("of a killed run")
    files.require_writable(str(tmp_path / "c" / "c.pt"))
    assert list((tmp_path / "c").iterdir()) == []
    (tmp_path / "file").write_text("")
    for ask, words in ((lambda: files.require_directory(tmp_path / "file" / "d"), f"into {tmp_path}/file/d"),
                       (lambda: files.require_writable(f"{tmp_path}/file/c.pt"), f"{tmp_path}/file/c.pt")):
        with pytest.raises(UserError) as caught:
            ask()
        assert str(caught.value) == f"cannot write {words}: Not a directory"
    named = ProfilerConfig(profile_dir=str(tmp_path / "new"))
    training = SimpleNamespace(resume=None, init_from=None, save_checkpoint=None, save_best=None)
    files.run_directory(SimpleNamespace(profiler=named, training=training), "main")
    assert (tmp_path / "new").is_dir()


def test_whoever_writes_a_file_goes_through_the_one_that_notes_errors(tmp_path, monkeypatch):
    """Writers that find a file number, as those of pictures do, would go round it and hide a full disk."""
    with pytest.raises(UserError, match="cannot write"):
        files.write_atomically(tmp_path / "f", lambda file: os.write(file.fileno(), b"x"))
    class Full(io.FileIO):
        def write(self, data):
            raise OSError(28, "No space left on device")

    monkeypatch.setattr(files.io, "FileIO", Full)

    def hides_why(file):
        try:
            file.write(bytes(2 ** 20))
        except OSError:
            raise RuntimeError("unexpected pos 64") from None

    with pytest.raises(UserError, match="No space left on device"):
        files.write_atomically(tmp_path / "f", hides_why)
    assert list(tmp_path.iterdir()) == []


def test_a_write_that_fails_leaves_the_old_file_alone(tmp_path):
    (tmp_path / "x.json").write_text("old")
    for content, error in (({"a": float("nan")}, ValueError), ({"a": {1}}, TypeError)):
        with pytest.raises(error):
            files.write_json(tmp_path / "x.json", content)

    def stopped(file):
        file.write(b"half")
        raise KeyboardInterrupt
    with pytest.raises(KeyboardInterrupt):
        files.write_atomically(tmp_path / "x.json", stopped)
    assert [(p.name, p.read_text()) for p in tmp_path.iterdir()] == [("x.json", "old")]


def test_a_temporary_file_is_somebody_s_for_as_long_as_it_is_open(tmp_path, monkeypatch):
    path, handle = files.temporary_file(tmp_path, "c.pt")
    (tmp_path / "c.pt").write_text("")
    (tmp_path / "c.pt_12345678.part").write_text("of another file")
    (tmp_path / "c.ptabcdefg9.part").write_text("")
    own = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: own + 1)
    files.remove_leftovers(tmp_path, "c.pt")  # another user's stay
    assert len(list(tmp_path.iterdir())) == 4
    monkeypatch.undo()
    files.remove_leftovers(tmp_path, "c.pt")
    assert sorted(tmp_path.iterdir()) == sorted([
        tmp_path / os.path.basename(path), tmp_path / "c.pt", tmp_path / "c.pt_12345678.part"])
    os.close(handle)
    files.remove_leftovers(tmp_path, "c.pt")
    assert sorted(x.name for x in tmp_path.iterdir()) == ["c.pt", "c.pt_12345678.part"]


def test_a_temporary_file_that_was_cleared_away_is_made_again(tmp_path, monkeypatch):
    exists = os.path.exists
    monkeypatch.setattr(os.path, "exists", lambda path: len(list(tmp_path.iterdir())) > 1 and exists(path))
    closed, close = [], os.close
    monkeypatch.setattr(os, "close", lambda handle: closed.append(handle) or close(handle))
    path, handle = files.temporary_file(tmp_path, "c.pt")
    assert exists(path) and len(closed) == 1
    os.close(handle)


def test_the_longest_names_can_be_written(tmp_path):
    path = tmp_path / (63 * "\N{DNA DOUBLE HELIX}")  # of 252 of 255 bytes
    files.write_text(path, "x")
    assert path.read_text() == "x"


def test_what_takes_a_while_is_said_at_once_and_where_people_see_it(monkeypatch):
    class Stream(io.StringIO):
        terminal, flushed = False, None

        def isatty(self):
            return self.terminal

        def flush(self):
            self.flushed = self.getvalue()
    for terminal in (False, True, None):
        out, err = Stream(), Stream()
        err.terminal = terminal
        monkeypatch.setattr(sys, "stdout", out)
        monkeypatch.setattr(sys, "stderr", None if terminal is None else err)
        files.announce("compiling")
        assert (out.flushed, err.flushed) == ((None, "compiling\n") if terminal else ("compiling\n", None))

    def full(stream, text):
        raise OSError
    monkeypatch.setattr(Stream, "write", full)
    files.announce("compiling")  # the next line will tell


def test_dropped_output_goes_nowhere(monkeypatch):
    calls = []
    monkeypatch.setattr(os, "open", lambda *given: given)
    monkeypatch.setattr(os, "dup2", lambda *given: calls.append(given))
    monkeypatch.setattr(sys, "stdout", SimpleNamespace(fileno=lambda: 7))
    files.drop_output()
    assert calls == [((os.devnull, os.O_WRONLY), 7)]


def test_letters_that_an_output_lacks():
    name = "a\udc80\udcff\u00e9\n\udbff\ue000"
    assert name.encode("ascii", "shown") == b"a\x80\xff\\xe9\n\\udbff\\ue000"
    assert files.printable(name) == "a\udc80\udcff\u00e9\\n\\udbff\\ue000"


def test_numbers_of_endings_are_what_scripts_rely_on():
    names = "OK FAILED USAGE MISSING NO_GPU PROGRAM_FAILED NO_DATA TIMEOUT CLOSED_PIPE"
    assert [getattr(files, name) for name in names.split()] == [0, 1, 2, 3, 4, 5, 6, 124, 141]


def test_numbers_that_json_cannot_hold_become_none():
    inf, nan = float("inf"), float("nan")
    assert files.finite({"a": [1.5, nan, (inf, 2)], "b": {"c": -inf, "d": "x"}, "e": 3, "f": None}) == {
        "a": [1.5, None, [None, 2]], "b": {"c": None, "d": "x"}, "e": 3, "f": None}


def test_missing_packages_end_the_program(capsys):
    files.require_packages("p", "os", "sys")
    with pytest.raises(SystemExit) as caught:
        files.require_packages("p", "os", "no_such_a", "no_such_b")
    error = capsys.readouterr().err
    assert caught.value.code == 3
    assert error.startswith(f"p: error: {sys.executable} lacks no_such_a, no_such_b: pip")


def test_a_file_is_on_the_disk_before_it_gets_its_name(tmp_path, monkeypatch):
    events, path = [], tmp_path / "deep" / "x.bin"
    sync, rename = os.fsync, os.replace
    monkeypatch.setattr(os, "fsync", lambda handle: (events.append(("sync", os.fstat(handle).st_size)),
                                                     sync(handle)))
    monkeypatch.setattr(os, "replace", lambda old, new: (events.append(("rename", new)), rename(old, new)))
    umask = os.umask(0o027)
    try:
        files.write_atomically(path, lambda file: file.write(b"12345"))
        assert os.umask(0) == 0o027  # as it was
    finally:
        os.umask(umask)
    renamed = events.index(("rename", str(path)))
    assert events[:renamed] == [("sync", 5)] and path.read_bytes() == b"12345"
    assert stat.S_IMODE(path.stat().st_mode) == 0o640 and list(path.parent.iterdir()) == [path]
    link = tmp_path / "link"
    link.symlink_to(path)
    files.write_text(link, "é")
    assert link.is_symlink() and path.read_text(encoding="utf-8") == "é"


# --- Standard output that is full or knows few letters ---------------------------------------------------

def test_a_full_stdout_is_called_that():
    """Also where a flush has failed before, which throws away what it had."""
    code = ("import sys; from fusion_lab.training import files; "
            "sys.exit(files.exit_code(lambda _: print('said', flush=True), [], 'p'))")
    with open("/dev/full", "w") as full:
        done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, stdout=full, stderr=subprocess.PIPE,
                              text=True, timeout=PATIENCE, check=False)
    assert (done.returncode, done.stderr) == (1, "p: error: standard output: No space left on device\n")


@pytest.mark.parametrize("errors", ["strict", "surrogateescape"])  # of UTF-8, and of the POSIX locale
def test_letters_that_stdout_lacks_are_spelled_out(errors, monkeypatch):
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(io.BytesIO(), "ascii", errors))
    assert files.exit_code(lambda argv: print("8 \xc5 in \udcc3\udc84.a3m") or 0, [], "p") == 0
    assert sys.stdout.buffer.getvalue() == b"8 \\xc5 in \xc3\x84.a3m\n"
