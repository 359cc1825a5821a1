"""The story of a wrapper's session, told to recorders: what is shown, set aside, written, run and judged."""
import contextlib
import json
import os
import pathlib
import sys
import time
from types import SimpleNamespace

import pytest

from fusion_lab.rocm import process, session
from fusion_lab.rocm.preflight import Problem
from fusion_lab.training.files import FAILED, MISSING, NO_DATA, NO_GPU, OK, UserError


def command(log="run.log", *argv):
    return process.Command(list(argv or ["tool", "a b"]), {"KEY": "value"}, ("GONE",), "/some/where", log)


class Wrapper:
    """What session.py asks of a wrapper, with answers that a test changes."""
    script, executable = "run_x.sh", "x"

    def __init__(self, place, **answers):
        self.directory, self.records, self.started = str(place), str(place / "records"), 0
        self.options = SimpleNamespace(dry_run=False, preflight=False, skip_preflight=False, timeout=9,
                                       output_dir="", force=False)
        self.tool = SimpleNamespace(path="/opt/x", version="1.2", rocm="7.0")
        self.torch, self.notes = dict(version="2.11"), ["a note"]
        self.profiled = SimpleNamespace(summary=lambda: "s")
        self.__dict__.update(dict(
            commands=lambda: [command()], script_text=lambda commands: f"  {len(commands)} commands \n\n",
            fresh_directory=lambda: False, problems=lambda: [], warnings=lambda commands: ["one", "two"],
            facts=lambda: ["a fact"], replaced=set, files=dict, steps=lambda: {"measured": 3},
            before=lambda release: release, judge=lambda log: (OK, f"saw {log}"),
            explain=lambda code, reason, log: (code, f"{reason}, {log}")) | answers)


@pytest.fixture
def ran(monkeypatch):
    """Commands that are run: they write their log and end as `ends` says."""
    found = SimpleNamespace(ends=[], calls=[])

    def run(command, directory, timeout):
        found.calls.append((command.log, directory, timeout))
        pathlib.Path(directory, command.log).write_text(f"\x1b[1mlog of {command.log}\x1b[0m")
        ended = dict(code=0, interrupted=None, timed_out=False) | (found.ends.pop(0) if found.ends else {})
        return SimpleNamespace(**ended)
    monkeypatch.setattr(session, "run", run)
    monkeypatch.setattr(session, "failure",
                        lambda ended, log: (5, f"failed: {ended.code}"))
    return found


def test_a_dry_run_shows_and_does_nothing(tmp_path, capsys):
    wrapper = Wrapper(tmp_path / "out", fresh_directory=pytest.fail)
    wrapper.options.dry_run = True
    assert session.profile(wrapper) == session.Outcome(OK, "dry run")
    assert capsys.readouterr().out == "  1 commands\n" and not (tmp_path / "out").exists()


@pytest.mark.parametrize("problems, code, reason, last", [
    ([], OK, "fine", "can profile here"),
    ([Problem(MISSING, "no tool", "install it"), Problem(NO_GPU, "no GPU", "buy one")], MISSING,
     "no tool; no GPU", "cannot profile here: ")])
def test_a_preflight_tells_everything(problems, code, reason, last, tmp_path, capsys):
    wrapper = Wrapper(tmp_path / "out", problems=lambda: problems)
    wrapper.options.preflight = True
    outcome, said = session.profile(wrapper), capsys.readouterr().out.splitlines()
    assert (outcome.code, outcome.reason) == (code, reason)
    assert said[:5] == ["x", "  ok       a fact", "  note     a note", "  warning  one", "  warning  two"]
    assert said[5:-1] == [f"  problem  {p.what}. {p.advice}" for p in problems]
    assert said[-1] == f"  {last}" + (session.MEANING[code] if problems else "")


def test_what_earlier_runs_left_is_set_aside(tmp_path, ran, capsys):
    place = tmp_path / "out"
    wrapper = Wrapper(place, fresh_directory=lambda: True)
    place.mkdir()
    (place / "old").touch()
    assert session.profile(wrapper).code == OK
    moved, = tmp_path.glob("out.old-*")
    assert (moved / "old").exists() and not (place / "old").exists()
    out = capsys.readouterr().out.splitlines()
    assert out[:5] == ["a note", "warning: one", "warning: two", f"earlier results are now in {moved}",
                       "tool 'a b'"]
    assert out[5] == f"run_x.sh: done in 0 s, saw log of run.log; in {place}" and len(out) == 6


def test_logs_and_files_that_come_anew_are_set_aside_one_by_one(tmp_path, ran):
    place = tmp_path / "out"
    place.mkdir()
    for name in ("run.log", "second.log", "report.txt", "mine"):
        (place / name).write_text(name)
    wrapper = Wrapper(place, replaced=lambda: {str(place / "report.txt")},
                      commands=lambda: [command(), command("second.log")])
    wrapper.options.skip_preflight, wrapper.problems = True, pytest.fail
    session.profile(wrapper)
    assert sorted(p.name.partition(".old-")[0] for p in place.glob("*.old-*")) == [
        "report.txt", "run.log", "second.log"] and (place / "mine").read_text() == "mine"
    assert len(wrapper.notes) == 4 and all(" is now " in note for note in wrapper.notes[1:])


def test_a_tool_that_is_not_there_is_refused_though_preflight_is_skipped(tmp_path, ran):
    wrapper = Wrapper(tmp_path / "out", problems=lambda: [Problem(MISSING, "no tool", "install it")])
    wrapper.options.skip_preflight, wrapper.tool.path = True, None
    with pytest.raises(UserError, match="no tool"):
        session.profile(wrapper)
    assert ran.calls == [] and not (tmp_path / "out").exists()


def test_commands_run_up_to_the_first_that_fails(tmp_path, ran, capsys):
    place = tmp_path / "out"
    path = place / "records" / "manifest.json"
    wrapper = Wrapper(place, commands=lambda: [command(f"{i}.log") for i in range(3)],  # known before judging
                      judge=lambda log: (OK, f"{log}, {json.loads(path.read_text())['exit_code']}"))
    ran.ends = [{}, dict(code=7)]
    outcome = session.profile(wrapper)
    assert ran.calls == [("0.log", str(place), 9), ("1.log", str(place), 9)]
    reason = "failed: 7, log of 1.log (what is there: log of 1.log, 5)"
    assert (outcome.code, outcome.reason, outcome.directory) == (5, reason, str(place))
    assert capsys.readouterr().err == (f"run_x.sh: {session.MEANING[5]}: {reason}. Its output: "
                                       f"{place / '0.log'}\n")
    manifest = json.loads(path.read_text())
    assert manifest["exit_code"] == 5 and manifest["steps"] is None and manifest["reason"] == reason


@pytest.mark.parametrize("end", [dict(interrupted=2), dict(timed_out=True)])
def test_an_interrupt_and_a_time_limit_are_failures(end, tmp_path, ran):
    ran.ends = [end]
    assert session.profile(Wrapper(tmp_path / "out", judge=lambda log: (NO_DATA, "nothing"))).reason == (
        "failed: 0, log of run.log")


@pytest.mark.parametrize("error", [UserError("row 3"), OSError("disk")])
def test_what_cannot_be_judged_is_no_data(error, tmp_path, ran):
    def judge(log):
        raise error
    outcome = session.profile(Wrapper(tmp_path / "out", judge=judge))
    assert (outcome.code, outcome.reason) == (NO_DATA, str(error))


def test_records_say_what_was_run_and_where(tmp_path, monkeypatch):
    for name in [name for name in os.environ if name != "PATH"]:
        monkeypatch.delenv(name)
    names = ("ROCM_PATH HIP_X HSA_X GPU_X AMD_X MIOPEN_X TORCH_X PYTORCH_X TRITON_X OMP_X LD_X PYTHONX "
             "VIRTUAL_ENV CUDA_VISIBLE_DEVICES").split()
    kept = {name: str(number) for number, name in enumerate(names)}
    for name, value in {**kept, "SECRET": "x", "HOME": "y"}.items():
        monkeypatch.setenv(name, value)
    answers = [(0, "abc\n"), (1, "not a repository")]
    monkeypatch.setattr(session.machine, "output_of", lambda tool, *asked: tool == "git" and answers.pop(0))
    wrapper = Wrapper(tmp_path, files=lambda: {"input.txt": "wanted"})
    for commit in ("abc", "None"):
        session.write_records(wrapper, [1, 2])
        lines = (tmp_path / "records" / "env.txt").read_text().splitlines()
        facts = dict(line[2:].split(": ", 1) for line in lines if line.startswith("# "))
        assert facts["git commit"] == commit and facts["interpreter"] == sys.executable
        assert {key: facts[key] for key in ("tool", "tool version", "ROCm of the tool", "torch version")} == {
            "tool": "/opt/x", "tool version": "1.2", "ROCm of the tool": "7.0", "torch version": "2.11"}
        assert lines[len(facts):] == sorted(f"{name}={value}" for name, value in {
            **kept, "PATH": os.environ["PATH"]}.items())
    assert (tmp_path / "records" / "command.txt").read_text() == "  2 commands \n\n"
    assert (tmp_path / "input.txt").read_text() == "wanted"


def test_a_manifest_names_every_file(tmp_path):
    (tmp_path / "sub").mkdir()
    (tmp_path / "records").mkdir()
    (tmp_path / "sub" / "trace").write_text("12345")
    wrapper = Wrapper(tmp_path)
    for outcome, status, steps in (
            (session.Outcome(None, "running"), "running", {"measured": 3}),
            (session.Outcome(OK, "fine", "", 1.23456), session.MEANING[OK], {"measured": 3}),
            (session.Outcome(FAILED, "no"), session.MEANING.get(FAILED, "running"), None)):
        session.write_manifest(wrapper, [command()], outcome)
        found = json.loads((tmp_path / "records" / "manifest.json").read_text())
        assert (found["status"], found["steps"], found["exit_code"]) == (status, steps, outcome.code)
        assert found["seconds"] == round(outcome.seconds, 3) and found["summary"] == "s"
    assert found["commands"] == [dict(argv=["tool", "a b"], cwd="/some/where", environment={"KEY": "value"},
                                      unset=["GONE"])]
    assert found["started"] == time.strftime("%Y-%m-%dT%H:%M:%S%z", time.localtime(0))
    files = {file["path"]: file["bytes"] for file in found["files"]}
    assert files.pop("sub/trace") == 5 and set(files) == {"records/manifest.json"}
    assert {key: found[key] for key in ("script", "tool", "tool_version", "rocm", "torch", "notes")} == dict(
        script="run_x.sh", tool="/opt/x", tool_version="1.2", rocm="7.0", torch=dict(version="2.11"),
        notes=["a note"])


@pytest.mark.parametrize("made, options, found", [
    (None, {}, False), ("empty", dict(output_dir="x"), False), ("full", {}, True),
    ("full", dict(output_dir="x"), "is not empty"), ("full", dict(output_dir="x", force=True), False),
    ("manifest.json", dict(output_dir="x", force=True), True), ("file", {}, "is not a directory")])
def test_whose_directory_it_is(made, options, found, tmp_path):
    place = tmp_path / "x"
    if made == "file":
        place.touch()
    elif made:
        place.mkdir()
        if made != "empty":
            (place / made).touch()
    options = SimpleNamespace(**{"output_dir": "", "force": False, **options})
    expected = pytest.raises(UserError, match=found) if isinstance(found, str) else contextlib.nullcontext()
    with expected:
        assert session.check_directory(str(place), options) is found
