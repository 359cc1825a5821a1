"""Runs never mix: what one process holds no other one writes into, and a directory that moves stays right."""
import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest

import run_pytorch_profiler
from fusion_lab.study import results
from fusion_lab.training import files, locks
from fusion_lab.training.files import UserError
from fusion_lab.training.options import ProfilerConfig
from tests.support import PATIENCE, ROOT, wait_for

HOLDER = f"""
import sys, time
sys.path.insert(0, {str(ROOT)!r})
from fusion_lab.training import locks
for path in sys.argv[2:]:
    locks.hold_directory(path) if sys.argv[1] == "directory" else locks.hold_file(path)
print("held", flush=True)
time.sleep({PATIENCE})
"""


@pytest.fixture(autouse=True)
def nothing_is_held_before_or_afterwards():
    locks.release()  # what sessions of other tests hold in this process
    yield
    locks.release()


@contextlib.contextmanager
def held_by_another(kind, *paths):
    """Within, another process holds these."""
    command = [sys.executable, "-c", HOLDER, kind, *map(str, paths)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        assert process.stdout.readline() == b"held\n"
        try:
            yield process
        finally:
            process.kill()


def test_one_process_holds_a_directory_until_it_ends(tmp_path):
    with held_by_another("directory", tmp_path / "a"):
        with pytest.raises(BlockingIOError):
            locks.hold_directory(tmp_path / "a")
    locks.hold_directory(tmp_path / "a")
    locks.hold_directory(tmp_path / "a")  # its own
    assert len(locks.held) == 1
    locks.hold_directory(tmp_path / "b")
    locks.let_go(tmp_path / "a")
    assert [place.path for place in locks.held] == [str(tmp_path / "b")]
    with held_by_another("directory", tmp_path / "a"):
        locks.release()
    assert locks.held == [] and [*tmp_path.iterdir()] == [tmp_path / "a"]  # made by another one


def test_a_directory_that_was_made_for_nothing_goes(tmp_path):
    for name in ("a", "b"):
        locks.hold_directory(tmp_path / name)
    (tmp_path / "b" / "result").touch()
    locks.release()
    assert [path.name for path in tmp_path.iterdir()] == ["b"]


def test_one_process_holds_a_file_by_another_one_beside_it(tmp_path):
    path, link = tmp_path / "c.pt", tmp_path / "link"
    link.symlink_to(path)
    with held_by_another("file", path):
        for name in (path, link):
            with pytest.raises(BlockingIOError):
                locks.hold_file(name)
        locks.hold_file(tmp_path / "d.pt")
    assert (tmp_path / ".c.pt.lock").exists()  # of what was killed; the next one takes it
    locks.hold_file(path)
    locks.hold_file(path)
    assert len(locks.held) == 2 and not os.get_inheritable(locks.held[0].handle)
    locks.hold_file(tmp_path / "new")
    assert os.stat(tmp_path / ".new.lock").st_mode & 0o111 == 0
    locks.release()
    assert [*tmp_path.iterdir()] == [link]
    locks.hold_file(tmp_path / "no" / "such" / "directory")  # which whoever writes will say
    (tmp_path / ".e.lock").symlink_to(tmp_path / "elsewhere")
    locks.hold_file(tmp_path / "e")
    assert locks.held == [] and not (tmp_path / "elsewhere").exists()


@pytest.mark.parametrize("error", [OSError(38, "not implemented"), OSError(9, "Bad file descriptor")])
def test_where_a_file_system_has_no_locks_nothing_is_held(error, tmp_path, monkeypatch):
    def flock(*_):
        raise error
    monkeypatch.setattr(locks.fcntl, "flock", flock)
    with held_by_another("directory", tmp_path):
        locks.hold_directory(tmp_path)


def test_what_is_written_follows_a_directory_that_is_moved(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for path in ("a", tmp_path / "b"):
        locks.hold_directory(path)
        assert locks.present(path) == path and locks.present(f"{path}/x") == f"{path}/x"
        os.rename(path, f"{path}-moved")
        assert locks.present(path) == str(tmp_path / f"{os.path.basename(path)}-moved")
        os.mkdir(path)  # which is another one's
        files.write_text(f"{path}/x/y", "text")
        assert os.listdir(path) == [] and open(f"{path}-moved/x/y").read() == "text"
        assert locks.present(f"{path}x") == f"{path}x"
        aside = files.set_aside(f"{path}/x")
        assert os.path.dirname(aside) == str(tmp_path / f"{os.path.basename(path)}-moved")


def test_a_directory_that_is_deleted_is_made_anew(tmp_path):
    for taken, name in ((False, "a"), (True, "b_2")):
        path = tmp_path / name[0]
        locks.hold_directory(path)
        path.rmdir()
        if taken:
            path.mkdir()
        opened = len(os.listdir("/dev/fd"))
        for _ in range(2):
            files.write_text(path / "x", "text")
        assert len(os.listdir("/dev/fd")) == opened
        assert (tmp_path / name / "x").read_text() == "text"
        assert not taken or os.listdir(path) == []
        with pytest.raises(BlockingIOError), held_elsewhere():
            locks.hold_directory(tmp_path / name)


@contextlib.contextmanager
def held_elsewhere():
    """Within, this process is as another one: it knows nothing of what it holds."""
    mine, locks.held = locks.held, []
    try:
        yield
    finally:
        locks.held = mine


def test_without_proc_the_system_is_asked_otherwise(tmp_path, monkeypatch):
    (tmp_path / "there").mkdir()
    handle = os.open(tmp_path / "there", os.O_RDONLY)
    exists = os.path.exists
    monkeypatch.setattr(os.path, "exists", lambda path: path != "/proc/self/fd" and exists(path))
    path = os.fsencode(tmp_path / "there")
    monkeypatch.setattr(locks.fcntl, "fcntl", lambda number, what, room: path.ljust(len(room), b"\0")
                        if (number, what) == (handle, 50) else b"")
    assert locks.whereabouts(handle) == str(tmp_path / "there")
    os.close(handle)


# --- What a second run does --------------------------------------------------------------------------------

def test_a_second_run_takes_another_directory_unless_it_was_named(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    place = ProfilerConfig().profile_dir
    with held_by_another("directory", place, f"{place}_2"):
        (tmp_path / place / "metrics.jsonl").write_text("of the first")
        assert files.results_directory(place, default=True, fresh=True) == f"{place}_3"
        assert capsys.readouterr().out == (
            f"Another run is writing into {place}: the results of this one go into {place}_3\n")
        with pytest.raises(UserError, match="named: another run is writing into it; name another d"), \
                held_by_another("directory", "named"):
            files.results_directory("named", default=False)
        assert os.listdir(place) == ["metrics.jsonl"]
    assert files.results_directory(place, default=True, fresh=True) == place
    assert capsys.readouterr().out == "" and os.listdir(place) == []
    aside, = (path for path in tmp_path.iterdir() if ".old-" in path.name)
    assert (aside / "metrics.jsonl").read_text() == "of the first"


def settings_of(directory, **values):
    training = dict(dict(resume=None, init_from=None, save_checkpoint=None, save_best=None), **values)
    return SimpleNamespace(profiler=ProfilerConfig(profile_dir=str(directory)),
                           training=SimpleNamespace(**training))


def test_a_checkpoint_is_one_run_s_and_none_of_its_results(tmp_path):
    path = str(tmp_path / "c.pt")
    with held_by_another("file", path), \
            pytest.raises(UserError, match="--save-best .*c.pt: another run is writing it; name another"):
        files.run_directory(settings_of(tmp_path / "p", save_best=path), "main.json")
    (tmp_path / "link").symlink_to(tmp_path / "p" / "metrics.jsonl")
    for name in ("p/main.json", "p/metrics.jsonl", "p/../p/learning_curve.png", "link"):
        with pytest.raises(UserError, match="^--save-checkpoint .*: this run writes other results into it"):
            files.run_directory(settings_of(tmp_path / "p", save_checkpoint=tmp_path / name), "main.json")
    files.run_directory(settings_of(tmp_path / "p", save_checkpoint=path), "main.json")
    locks.release()
    assert not (tmp_path / ".c.pt.lock").exists()


def test_a_link_into_nowhere_makes_no_directory_there(tmp_path):
    (tmp_path / "link.pt").symlink_to(tmp_path / "no" / "such" / "c.pt")
    with pytest.raises(UserError, match="link.pt: a link into a directory that does not exist"):
        files.require_writable(tmp_path / "link.pt")
    with pytest.raises(UserError, match="link.pt: a link into a directory that does not exist"):
        files.write_text(tmp_path / "link.pt", "x")
    assert not (tmp_path / "no").exists()
    (tmp_path / "new.pt").symlink_to(tmp_path / "target.pt")  # of a file that is still to come
    files.require_writable(tmp_path / "new.pt")


def started(place, *flags):
    return subprocess.Popen(
        [sys.executable, ROOT / "tests" / "second_program.py", "--width", "8", "--batch-size", "2",
         "--device", "cpu", "--warmup-steps", "0", "--num-steps", "1000000", "--log-every", "100",
         *map(str, flags)],
        cwd=place, env=os.environ | dict(OMP_NUM_THREADS="1"), stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT, text=True)


def steps_in(path):
    with contextlib.suppress(OSError):
        return [json.loads(line)["step"] for line in path.read_text().splitlines(keepends=True)
                if line.endswith("\n")]
    return []


@pytest.mark.slow
def test_runs_that_overlap_are_killed_and_moved_never_mix(tmp_path):
    """The first is killed while the second one runs, the third begins anew in its place; the second's
    directory is moved while it runs."""
    base = tmp_path / "pytorch_profiles_v2"
    with started(tmp_path, "--seed", 1, "--save-checkpoint", "c.pt") as first:
        wait_for(lambda: len(steps_in(base / "metrics.jsonl")) > 10)
        with started(tmp_path, "--seed", 2) as second:
            wait_for(lambda: len(steps_in(tmp_path / f"{base.name}_2" / "metrics.jsonl")) > 10)
            with started(tmp_path, "--seed", 3, "--save-checkpoint", "c.pt") as third:
                said = third.communicate()[0]
            assert third.returncode == 2 and (
                "error: --save-checkpoint c.pt: another run is writing it; name another file\n") in said
            first.kill()
            first.communicate()
            killed = (base / "metrics.jsonl").read_bytes()
            os.rename(tmp_path / f"{base.name}_2", tmp_path / "moved")
            known = len(steps_in(tmp_path / "moved" / "metrics.jsonl"))
            with started(tmp_path, "--seed", 3, "--save-checkpoint", "c.pt", "--num-steps", 20) as third:
                said = third.communicate()[0]
            assert third.returncode == 0 and "Another run" not in said
            wait_for(lambda: len(steps_in(tmp_path / "moved" / "metrics.jsonl")) > known)
            second.send_signal(signal.SIGTERM)
            said = second.communicate()[0]
        assert second.returncode == 143 and "Another run is writing into ./pytorch_profiles_v2: " in said
    summary = tmp_path / "moved" / "performance_summary_mlp.json"
    assert json.loads(said.splitlines()[-1])["summary_file"] == str(summary) and summary.exists()
    assert steps_in(base / "metrics.jsonl") == [*range(1, 21)]
    moved = steps_in(tmp_path / "moved" / "metrics.jsonl")
    assert moved == [*range(1, len(moved) + 1)]
    aside, = tmp_path.glob(f"{base.name}.old-*")
    assert (aside / "metrics.jsonl").read_bytes() == killed
    assert {path.name for path in tmp_path.iterdir()} == {base.name, "moved", "c.pt", aside.name}


# --- Sessions and studies ----------------------------------------------------------------------------------

def test_sessions_and_studies_begin_beside_one_that_runs(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(time, "strftime", lambda form: "now")
    study = SimpleNamespace(as_dict=dict)
    default = ProfilerConfig().profile_dir
    with held_by_another("directory", default, "now", "named"):
        arguments = SimpleNamespace(ablation=False, force=False)
        assert run_pytorch_profiler.results_directory(arguments, ProfilerConfig()) == f"{default}_2"
        found = results.open_directory(SimpleNamespace(study_name=None), study, [])
        assert found == str(tmp_path / "now_2")
        with pytest.raises(UserError, match="named: this study is running already"):
            results.open_directory(SimpleNamespace(study_name="named"), study, [])
        assert os.listdir("named") == os.listdir("now") == []
    assert (tmp_path / "now_2" / "config.json").exists()
    assert capsys.readouterr().out.count("Another run is writing into") == 2
