"""What the ROCm wrappers call, refuse and report, in this process: command lines against lists by hand."""
import contextlib
import json
import os
import pathlib
import signal
import sys
from dataclasses import replace
from types import SimpleNamespace

import pytest

from fusion_lab.rocm import failures, process, rocprof_sys, session
from fusion_lab.training.files import FAILED, MISSING, NO_DATA, OK, PROGRAM_FAILED, TIMEOUT, UserError
from tests.rocm.test_figures import compute_run, run_of, wrapper

pytest_plugins = ("tests.rocm.fake_rocm.plugin",)


def test_a_command_takes_its_environment_from_here(monkeypatch):
    monkeypatch.setenv("KEPT", "1")
    monkeypatch.setenv("GONE", "2")
    command = process.Command(["a b", "c"], {"SET": "x y", "KEPT": "3"}, ("GONE",), cwd="/d e")
    found = command.environment()
    assert (found["SET"], found["KEPT"]) == ("x y", "3") and "GONE" not in found and "PATH" in found
    assert command.script() == ["unset GONE", "export SET='x y'", "export KEPT=3", "cd '/d e'", "'a b' c"]
    assert process.Command(["a"]).script() == ["a"]


@pytest.mark.parametrize("name, flags", [
    ("rocprofv3", ["--num-steps", "10", "--warmup-steps", "3"]),
    ("rocprof-sys", ["--batch-size", "2", "--num-steps", "3", "--warmup-steps", "1", "--seq-len", "16"]),
    ("rocprof-compute", ["--batch-size", "2", "--num-steps", "2", "--warmup-steps", "1", "--seed", "42",
                         "--deterministic", "--seq-len", "32"])])
def test_which_flags_the_program_gets(name, flags, machine):
    """Those of the user come last, so that they win."""
    machine("7.0")
    found = wrapper(name, "-o", "out", "--num-steps", "7", "--", "--force")
    assert found.program_flags == ["--profile-dir", found.directory, "--enable-rocm-profiling", *flags,
                                   "--num-steps", "7", "--force"]
    assert found.own_flags == ["--num-steps", "7", "--force"] and not found.options.force


def test_releases_are_compared_as_numbers(machine):
    machine("7.2")
    found = wrapper("rocprofv3")
    assert [found.before(release) for release in ("6.4", "7.2", "7.13", "10.0")] == [False, False, True, True]
    assert found.tool_and_release() == "rocprofv3 of ROCm 7.2" and found.has("--kernel-trace")
    assert found.has("--selected-regions") and not found.has("--no-such-option")
    found.tool.rocm = None  # of a tool that does not say, the worst is assumed
    assert found.before("6.3") and found.tool_and_release() == "rocprofv3"
    dry = wrapper("rocprofv3", "--dry-run", "--rocm", "6.4")
    assert dry.release() == "6.4" and dry.has("--pmc") and not dry.has("--selected-regions")
    with pytest.raises(UserError, match="--rocm: chooses what --dry-run prints"):
        wrapper("rocprofv3", "--rocm", "6.4")


def test_advice_on_packages():
    text = "The 'pandas' package was not found"
    said, code, advice = failures.known_failure(text)
    assert (said, code) == (text, MISSING) and "'pandas<3' -r $ROCM_PATH/libexec" in advice
    assert failures.known_failure("all is well") is None


def test_what_goes_on_too_long_is_asked_then_told_then_killed(tmp_path, monkeypatch):
    sent, really = [], process.signal_group

    def signal_group(child, number):
        sent.append(number)
        if number == signal.SIGKILL:
            really(child, number)
    monkeypatch.setattr(process, "signal_group", signal_group)
    monkeypatch.setattr(process, "FLUSH_SECONDS", 0.05)
    ended = process.run(process.Command(["sleep", "600"]), str(tmp_path), 0.05)
    assert sent[:3] == [signal.SIGINT, signal.SIGTERM, signal.SIGKILL]
    assert (ended.timed_out, ended.interrupted, ended.code) == (True, 0, -signal.SIGKILL)
    assert process.run(process.Command(["sleep", "0.05"]), str(tmp_path), 0).code == 0  # no limit
    monkeypatch.setattr(process, "signal_group", really)
    monkeypatch.setattr(process, "caught_signals", lambda: contextlib.nullcontext([signal.SIGTERM]))
    ended = process.run(process.Command(["sleep", "600"]), str(tmp_path), 0)
    assert (ended.timed_out, ended.interrupted, ended.code) == (False, signal.SIGTERM, -signal.SIGINT)


# Sessions


@pytest.mark.parametrize("names, named, force, result", [
    (None, True, False, False), ([], True, False, False), (["x"], False, False, True),
    (["x"], True, False, "is not empty. Name a fresh one, or add --force"), (["x"], True, True, False),
    (["x", "manifest.json"], True, True, True)])
def test_which_earlier_results_are_set_aside(names, named, force, result, tmp_path):
    options = SimpleNamespace(output_dir="d" if named else None, force=force)
    path = tmp_path / "d"
    if names is not None:
        path.mkdir()
    for name in names or ():
        (path / name).write_text("")
    if isinstance(result, str):
        with pytest.raises(UserError, match=result):
            session.check_directory(str(path), options)
    else:
        assert session.check_directory(str(path), options) is result
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="file: is not a directory"):
        session.check_directory(str(tmp_path / "file"), options)


@pytest.mark.parametrize("ended, judged, code, reason, ran", [
    ([{}, {}], (OK, "fine"), OK, "fine", 2), ([{}, {}], (NO_DATA, "none"), NO_DATA, "none", 2),
    ([dict(code=1), {}], (OK, "some"), 9, "code 1 (what is there: some)", 1),
    ([{}, dict(code=3)], (NO_DATA, "none"), 9, "code 3", 2),
    ([dict(interrupted=2)], (NO_DATA, "none"), 9, "code 130", 1),
    ([dict(timed_out=True)], (NO_DATA, "none"), 9, f"code {TIMEOUT}", 1),
    ([{}], UserError("row 2 is damaged"), NO_DATA, "row 2 is damaged", 1),
    ([dict(code=1)], OSError(28, "disk full"), 9, "code 1", 1)])
def test_a_session_runs_up_to_the_first_failure_and_judges_what_is_there(ended, judged, code, reason, ran,
                                                                        tmp_path, monkeypatch):
    (tmp_path / "run.log").write_text("\x1b[31msaid\x1b[0m\n")
    ends, told = iter(ended), []

    def judge(log):
        assert log == "said\n"
        if isinstance(judged, Exception):
            raise judged
        return judged
    made = SimpleNamespace(
        directory=str(tmp_path), options=SimpleNamespace(timeout=7), judge=judge, before=lambda release: True,
        explain=lambda code, reason, log: (9, f"code {code if code != PROGRAM_FAILED else reason[-1]}"))
    commands = [process.Command([name]) for name in "ab"[:len(ended)]]
    monkeypatch.setattr(session, "run", lambda command, directory, timeout: told.append(
        (command.argv, directory, timeout)) or process.Ended(**next(ends)))
    monkeypatch.setattr(session, "write_manifest", lambda wrapper, commands, outcome: told.append(
        (outcome.code, outcome.reason)))
    found = session.execute(made, commands)
    assert (found.code, found.reason, found.directory) == (code, reason, str(tmp_path))
    runs = [(["a"], str(tmp_path), 7), (["b"], str(tmp_path), 7)][:ran]
    failed = [(9, reason.partition(" (")[0])] if code == 9 else []  # before what is judged may fail
    assert told == [(None, "running"), *runs, *failed]


@pytest.mark.parametrize("code, status, known", [
    (None, "running", True), (OK, "done", True), (PROGRAM_FAILED, "the profiled program failed", False)])
def test_the_manifest_of_a_session(code, status, known, machine):
    """Of how many steps its figures are, nobody knows where the program failed."""
    machine("7.0")
    found = wrapper("rocprofv3", "-o", "out", "--num-steps", "4")
    os.makedirs(found.directory)
    pathlib.Path(found.directory, "some.csv").write_text("four")
    command = process.Command(["a", "b"], {"SET": "1"}, ("GONE",), "/d")
    session.write_manifest(found, [command], session.Outcome(code, "why", seconds=1.23456))
    read = json.loads(pathlib.Path(found.directory, "manifest.json").read_text())
    assert (read["status"], read["exit_code"], read["reason"]) == (status, code, "why")
    assert read["seconds"] == 1.235
    assert read["steps"] == (dict(measured=4, warmup=3, selected_regions=False, ends_with_steps=False)
                             if known else None)
    assert read["commands"] == [dict(argv=["a", "b"], cwd="/d", environment={"SET": "1"}, unset=["GONE"])]
    assert read["files"] == [dict(path="some.csv", bytes=4)]
    assert (read["script"], read["rocm"]) == ("run_rocprofv3.sh", "7.0")


# rocprof-compute


@pytest.mark.parametrize("arguments, parts", [
    ([], ["counters", "roof"]), (["--mode", "profile"], ["counters", "roof"]), (["--no-roof"], ["counters"]),
    (["--mode", "roof"], ["roof"]), (["--roof-only"], ["roof"]),
    (["--roof-only", "--mode", "roof"], ["roof"]),
    (["--mode", "analyze"], None), (["--list-stats"], None), (["--dispatch", "0"], None),
    (["--mode", "analyze", "--list-stats", "--dispatch", "1"], None)])
def test_what_rocprof_compute_is_to_do(arguments, parts, machine):
    machine("7.0")
    found = wrapper("rocprof-compute", *arguments)
    assert (found.analyze, found.runs_program) == (parts is None, parts is not None)
    assert parts is None or found.parts == parts
    name = "analysis" if parts is None else "rocprof_compute_profiles_v2"
    assert os.path.basename(found.records) == name


@pytest.mark.parametrize("device, flags", [([], []), (["--device", "3"], ["--device", "3"])])
def test_how_rocprof_compute_is_called(device, flags, machine):
    machine("7.0")
    found = wrapper("rocprof-compute", "--output-name", "w", *device)
    commands, number = found.commands(), "3" if device else "0"
    program = ["--", sys.executable, "workload.py"]
    assert [command.argv[1:] for command in commands] == [
        ["profile", "--name", "w_counters", "--no-roof", *program],
        ["profile", "--name", "w_roof", "--roof-only", "--device", number, *program]]
    assert all(command.cwd == found.directory for command in commands) and found.own_flags == flags
    found.has = "--roofline".__eq__
    assert found.commands()[1].argv[4:] == ["--roofline", "--roofline-device", number, *program]


@pytest.mark.parametrize("arguments, words", [
    (["--roof-only", "--no-roof"], "contradicts"), (["--mode", "roof", "--no-roof"], "contradicts"),
    *((["--mode", "analyze", more], "are for") for more in ("--roof-only", "--no-roof")),
    (["--mode", "profile", "--list-stats"], "are for"), (["--roof-only", "--list-stats"], "are for"),
    (["--no-roof", "--dispatch", "1"], "are for"),
    (["--output-name", "a-b"], "allowed are letters"), (["--output-name", "a" * 27], "at most 26"),
    (["-o", "a..b"], "refuses a path")])
def test_what_contradicts_itself_is_refused(arguments, words, machine):
    machine("7.0")
    with pytest.raises(UserError, match=words):
        wrapper("rocprof-compute", *arguments)


def test_which_reports_rocprof_compute_writes(machine):
    """One a workload, or of the first workload what was asked for; the list of kernels is shown as well."""
    machine("7.0")
    _, place = compute_run()
    report = ["analyze", "--path", place]

    def reports(*arguments):
        found = wrapper("rocprof-compute", "-o", "out", "--mode", "analyze", *arguments)
        return [(command.argv[1:], command.log, command.echo) for command in found.commands()]
    assert reports() == [(report, "analysis_counters.txt", False)]
    assert reports("--list-stats", "--dispatch", "0", "--dispatch", "12") == [
        ([*report, "--list-stats"], "list_stats.txt", True),
        ([*report, "--dispatch", "0"], "dispatch_0.txt", False),
        ([*report, "--dispatch", "12"], "dispatch_12.txt", False)]
    roof = place.replace("counters", "roof")
    os.makedirs(roof)
    open(os.path.join(roof, "sysinfo.csv"), "w").close()
    assert reports()[1] == (["analyze", "--path", roof], "analysis_roof.txt", False)
    found = wrapper("rocprof-compute", "-o", "out", "--mode", "analyze", "--dry-run", "--output-name", "x")
    assert found.commands()[0].argv[-1] == os.path.join(found.directory, "workloads/x_counters/GPU_MODEL")
    assert found.notes == ["GPU_MODEL stands for the folder that profiling creates"]
    found.options.dry_run = False
    with pytest.raises(UserError, match="no workload x_\\* there. Run ./run_rocprof_compute.sh first"):
        found.commands()
    assert found.judge(" ") == (NO_DATA, "the report is empty") and found.steps() is None
    assert found.judge("a table") == (OK, f"wrote {found.reports}")
    found = wrapper("rocprof-compute", "--roof-only", "--num-steps", "2")
    assert found.steps()["measured"] == 2 and found.amount(None) == "roof collected"


def test_failures_of_rocprof_compute_are_told_from_those_of_the_program(machine):
    machine("6.4")
    explain = wrapper("rocprof-compute").explain
    assert explain(TIMEOUT, "late", "x") == (TIMEOUT, "late")
    assert explain(PROGRAM_FAILED, "said", "execution failed") == (PROGRAM_FAILED, "said")
    begins = "rocprof-compute itself failed: "
    assert explain(PROGRAM_FAILED, "", "ERROR a\nERROR b\nlast\n") == (FAILED, f"{begins}ERROR b")
    assert explain(PROGRAM_FAILED, "", f"first\n{'l' * 201}") == (FAILED, begins + "l" * 200)
    assert explain(PROGRAM_FAILED, "", "") == (FAILED, f"{begins}it printed nothing")
    nothing = "AttributeError: 'NoneType' object"
    assert explain(PROGRAM_FAILED, "", nothing)[1].startswith(f"{begins}{nothing}. ")
    machine("7.0")
    assert wrapper("rocprof-compute").explain(PROGRAM_FAILED, "", nothing)[1] == begins + nothing


# rocprofv3


@pytest.mark.parametrize("release, arguments, expected, notes", [
    ("7.0", [], [], []), ("7.0", ["--hip-trace", "--sys-trace"], ["--hip-trace", "--sys-trace"], []),
    ("7.0", ["--memory-trace"], ["--memory-copy-trace", "--memory-allocation-trace"], []),
    ("7.0", ["--pmc", " A, B "], ["--pmc", "A", "B"], []),
    ("7.0", ["--selected-regions"], ["--marker-trace", "--selected-regions"], []),
    ("7.0", ["--selected-regions", "--marker-trace", "--pmc", "A"],
     ["--marker-trace", "--pmc", "A", "--selected-regions"],
     ["rocprofv3 of ROCm 7.0 counts the whole run, whatever is selected"]),
    ("10.0", ["--pmc", "A B", "--pmc", "C"], ["--hip-graph-trace", "--pmc", "A", "B", "--pmc", "C"], []),
    ("6.4", ["--selected-regions"], [], [
        " has no --selected-regions: the whole run is recorded, start-up and warm-up included"])])
def test_how_rocprofv3_is_called(release, arguments, expected, notes, machine):
    machine(release)
    found = wrapper("rocprofv3", "-o", "out", *arguments)
    command, = found.commands()
    paused = {"--selected-regions", "--pmc"} <= set(arguments)  # which rocpd cannot hold before 7.13
    csv = release == "6.4" or paused
    form = ["--kernel-trace", *["--stats"] * csv], ["--output-format", "csv" if csv else "rocpd"]
    assert command.argv[1:] == [
        *form[0], *expected, *form[1], "--output-directory", found.directory, "--output-file",
        f"{found.profiled.short_name()}_%pid%", "--", sys.executable, found.profiled.path,
        *found.program_flags]
    assert command.unset_env == ("ROCPROF_OUTPUT_FORMAT", "ROCPROF_OUTPUT_PATH", "ROCPROF_OUTPUT_FILE_NAME")
    assert all(note.endswith(words) for note, words in zip(found.notes, notes, strict=True))
    assert found.selected == (release == "7.0" and "--selected-regions" in arguments)


@pytest.mark.parametrize("switch, until_the_end", [
    ("--marker-trace", True), ("--runtime-trace", True), ("--sys-trace", True), ("--hip-trace", False)])
def test_with_markers_recording_ends_with_the_steps(switch, until_the_end, machine):
    machine("7.0")
    found = wrapper("rocprofv3", "-o", "out", switch, "--pftrace")
    steps = found.steps()
    assert steps["ends_with_steps"] is until_the_end and steps["selected_regions"] is False
    assert found.commands()[0].argv[3:6] == ["--output-format", "rocpd", "pftrace"]


def test_rocprofv3_refuses_what_would_mix_results(machine, tmp_path):
    machine("7.0")
    with pytest.raises(UserError, match="--pmc: given twice"):
        wrapper("rocprofv3", "--pmc", "A", "--pmc", "B")
    with pytest.raises(UserError, match="--compare: .*absent: no such directory"):
        wrapper("rocprofv3", "--compare", "absent")
    found = wrapper("rocprofv3", "-o", "out")
    os.makedirs(found.directory)
    assert found.replaced() == set()
    run_of(pathlib.Path(found.directory), ("k", 3, 1_500_000))
    with pytest.raises(UserError, match="holds kernel records \\(7_kernel_stats.csv\\)"):
        found.replaced()
    again = wrapper("rocprofv3", "-o", "more", "--compare", "out")
    os.makedirs(again.directory)
    run_of(pathlib.Path(again.directory), ("k", 6, 1_500_000))
    assert again.judge("") == (OK, "6 kernel launches, 1.500 ms of kernels")
    summary = json.loads(pathlib.Path(again.directory, "rocprofv3_summary.json").read_text())
    assert summary["comparison"]["rows"][0]["change_percent"] == 100
    assert pathlib.Path(again.directory, "rocprofv3_summary.txt").read_text().count("Compared with") == 1


# rocprof-sys


LEFT_OUT = "rocprof-sys-python of ROCm {} writes no rocpd database, 7.2 does: left out"
FROM_START = ("from ROCm 7.13 on the GPU side covers the measured steps only, because rocprof-sys hears the "
              "program's start and stop")


@pytest.mark.parametrize("release, arguments, modules, rocpd, notes", [
    ("7.0", [], ["trainer", "torch/nn/modules", "torch/optim"], "OFF", []),
    ("7.0", ["--rocpd", "--modules", "a", "--modules", "b"], ["a", "b"], "OFF", [LEFT_OUT.format("7.0")]),
    ("7.1", ["--rocpd"], None, "OFF", [LEFT_OUT.format("7.1")]),
    ("7.2", ["--rocpd"], None, "ON", []), ("7.13", ["--rocpd"], None, "ON", [FROM_START])])
def test_how_rocprof_sys_is_called(release, arguments, modules, rocpd, notes, machine, monkeypatch):
    machine(release)
    found = wrapper("rocprof-sys", "-o", "out", *arguments, "--seed", "3")
    found.profiled = replace(found.profiled, path="/x/trainer.py",
                             answer=dict(torch_path="/t/torch/__init__.py"))
    monkeypatch.setenv("LD_LIBRARY_PATH", "/own")
    monkeypatch.setattr(rocprof_sys, "versioned_python", lambda: "/usr/bin/python3.11")
    command, = found.commands()
    modules = modules or ["trainer", "torch/nn/modules", "torch/optim"]
    assert command.argv == [found.tool.command, "--module-restrict", *modules, "--function-exclude",
                            "_call_impl", "--", "/x/trainer.py", *found.program_flags]
    assert command.argv[-2:] == ["--seed", "3"] and command.cwd is None
    assert command.set_env == dict(
        ROCPROFSYS_TRACE="ON", ROCPROFSYS_PROFILE="ON", ROCPROFSYS_USE_ROCPD=rocpd,
        ROCPROFSYS_TIMEMORY_COMPONENTS="wall_clock trip_count cpu_clock peak_rss page_rss",
        ROCPROFSYS_OUTPUT_PATH=found.directory, ROCPROFSYS_TIME_OUTPUT="OFF", ROCPROFSYS_USE_PID="ON",
        PYTHON_EXECUTABLE="/usr/bin/python3.11", LD_LIBRARY_PATH="/t/torch/lib:/own")
    assert command.unset_env == ("ROCPROFSYS_OUTPUT_PREFIX", "ROCPROFSYS_CONFIG_FILE")
    assert found.notes == notes
    assert list(found.facts())[-1] == "torch's own libraries will be found: LD_LIBRARY_PATH=/t/torch/lib:/own"
    monkeypatch.delenv("LD_LIBRARY_PATH")
    assert found.loader_path() == dict(LD_LIBRARY_PATH="/t/torch/lib")
    found.profiled = replace(found.profiled, answer={})
    assert found.loader_path() == {} and not any("libraries" in fact for fact in found.facts())


def test_what_the_program_itself_says_comes_first(machine):
    machine("7.0")
    found = wrapper("rocprof-sys", "-o", "out")
    name = os.path.basename(found.profiled.path)
    said = f"x\n{name}: error: {'a' * 201}\nException - b\n"
    assert found.judge(said) == (PROGRAM_FAILED, "a" * 200)
    assert found.judge(said.replace(name, f"not {name}")) == (PROGRAM_FAILED, "it raised an exception: b")


@pytest.mark.parametrize("name, words", [
    ("a.proto", "timeline, open at https://ui.perfetto.dev"), ("wall.txt", "call stack, read in any editor"),
    ("x y/a.db", "rocpd, read with: python profile_summary.py 'x y'"),
    ("wall.json", "the same for programs")])
def test_how_results_of_rocprof_sys_are_opened(name, words):
    assert rocprof_sys.how_to_open(pathlib.Path(name)) == words


@pytest.mark.parametrize("contents, seen", [
    (dict(), True), ({"a.txt": b"x"}, True), ({"a.proto": b"x"}, False), ({"a.txt": b"device_hip"}, True),
    ({"a.proto": b"x device_hip"}, True), ({"a.proto": b"x", "b.proto": b"kernel_dispatch"}, True)])
def test_kernels_in_a_timeline(contents, seen, tmp_path):
    for name, content in contents.items():
        (tmp_path / name).write_bytes(content)
    assert rocprof_sys.sees_gpu([tmp_path / name for name in contents]) is seen
