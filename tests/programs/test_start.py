"""The beginning and the end of a run: flags judged before torch, the demonstration, the result line,
metrics, what a second and a resumed run say."""
import contextlib
import os
import subprocess
import sys

import pytest

import tiny_openfold_v2 as tof
from tests.support import PATIENCE, ROOT

SMALL = ("--num-blocks 1 --msa-dim 8 --pair-dim 8 --msa-heads 2 --pair-heads 2 --outer-product-dim 4 "
         "--num-seqs 6 --seq-len 16 --batch-size 2 --warmup-steps 1 --device cpu").split()


def train(directory, *flags):
    return tof.main([*SMALL, "--profile-dir", str(directory), *map(str, flags)])


TRAINER, SESSION, SECOND = "tiny_openfold_v2.py", "run_pytorch_profiler.py", "tests/second_program.py"


def begun(program, *flags, directory, **modules):
    """CompletedProcess of a program which finds modules with these texts in place of others."""
    for name, text in modules.items():
        (directory / f"{name}.py").write_text(text)
    environment = dict(os.environ, PYTHON=sys.executable, PYTHONPATH=str(directory))
    command = [*([sys.executable] if program.endswith(".py") else []), str(ROOT / program), *map(str, flags)]
    return subprocess.run(command, env=environment, cwd=directory, capture_output=True, text=True,
                          timeout=PATIENCE, check=False)


@pytest.mark.parametrize("program, flags, code, words", [
    (TRAINER, ["--batchsize", "3"], 2, "--batchsize"), (TRAINER, ["--seq-len", "0"], 2, "--seq-len"),
    (TRAINER, ["--compare-fusion", "--variants", "foo"], 2, "--variants"),
    (TRAINER, ["query.a3m"], 2, "--contacts"), (TRAINER, ["--help"], 0, "--demo"),
    (SECOND, ["--width", "0"], 2, "--width")])
def test_flags_are_judged_before_torch_is_imported(program, flags, code, words, tmp_path):
    done = begun(program, *flags, torch="raise SystemExit('torch was imported')", directory=tmp_path)
    assert done.returncode == code and words in done.stdout + done.stderr, done.stderr
    assert code == 0 or done.stderr.count("\n") == 1 and done.stdout == ""


def test_a_rank_that_a_shell_leaked_is_one_line(tmp_path, monkeypatch):
    monkeypatch.setenv("RANK", "1")
    done = begun(TRAINER, "--demo", torch="raise SystemExit('torch was imported')", directory=tmp_path)
    assert done.returncode == 2 and "RANK" in done.stderr and done.stderr.count("\n") == 1


def test_a_working_directory_that_was_deleted_is_one_line(tmp_path):
    code = f"import os, sys; os.rmdir(os.getcwd()); os.execv({sys.executable!r}, ['python', *sys.argv[1:]])"
    done = subprocess.run([sys.executable, "-c", code, str(ROOT / TRAINER)], cwd=tmp_path, check=False,
                          capture_output=True, text=True, timeout=PATIENCE)
    assert done.returncode == 2 and done.stderr.count("\n") == 1 and "directory" in done.stderr, done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("program, flags, words", [
    ("run_pytorch_profiler.sh", ["--validate-setup"], "--validate-setup"),
    (SESSION, ["--program", ROOT / SECOND, "--profile-steps", "0"], "--profile-steps"),
    ("launch_performance_study.sh", ["--", "--msa-heads", "5"], "msa")])
def test_wrong_flags_of_tools_are_one_line(program, flags, words, tmp_path):
    done = begun(program, *flags, directory=tmp_path)
    assert done.returncode == 2 and words in done.stderr and done.stderr.count("\n") == 1, done.stderr
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("program, module", [
    (TRAINER, "torch"), (SECOND, "torch"), (SESSION, "torch"), ("profile_summary.py", "csv"),
    ("run_rocprofv3.sh", "csv"), ("launch_performance_study.sh", "torch")])
def test_ctrl_c_while_modules_are_imported_is_one_line(program, module, tmp_path):
    """Those that take long to load say so first."""
    done = begun(program, *["--num-steps", "1"] * (program in (TRAINER, SECOND)), directory=tmp_path, **{
        module: "import os, signal\nos.kill(os.getpid(), signal.SIGINT)\nimport time\ntime.sleep(9)"})
    assert done.returncode == 130 and done.stderr == "interrupted\n"
    assert program not in (TRAINER, SECOND) or "loading PyTorch" in done.stdout


@pytest.mark.parametrize("given, expected", [
    ({}, "30000"), ({"GOMP_SPINCOUNT": "7"}, "7"), ({"OMP_WAIT_POLICY": "ACTIVE"}, None)])
def test_threads_wait_less_unless_the_user_decides(given, expected, tmp_path, monkeypatch):
    for name in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY"):  # which a program started in this process has set
        monkeypatch.delenv(name, raising=False)
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    done = begun(TRAINER, "--num-steps", "1", directory=tmp_path,
                 torch="import os\nraise SystemExit(str(os.environ.get('GOMP_SPINCOUNT')))")
    assert done.stderr == f"{expected}\n"


def test_a_shell_that_ignores_ctrl_c_in_the_background_is_obeyed(tmp_path):
    """As it has it for what runs behind &: the program goes on to torch."""
    (tmp_path / "torch.py").write_text("import os, signal\nos.kill(os.getpid(), signal.SIGINT)\n"
                                       "raise SystemExit('went on')")
    done = subprocess.run(["bash", "-c", f"trap '' INT; {sys.executable} {ROOT / TRAINER} --num-steps 1"],
                          env=dict(os.environ, PYTHONPATH=str(tmp_path)), capture_output=True, text=True,
                          timeout=PATIENCE, check=False)
    assert done.stderr == "went on\n"


@pytest.mark.slow
def test_people_on_a_terminal_read_a_table(tmp_path):
    """And JSON on demand, by test_summary.py."""
    leader, follower = os.openpty()
    flags = *SMALL, "--num-steps", "1", "--profile-dir", str(tmp_path / "a")
    process = subprocess.Popen([sys.executable, str(ROOT / TRAINER), *flags],
                               stdin=follower, stdout=follower, stderr=follower)
    os.close(follower)
    output = b""
    with contextlib.suppress(OSError):  # raised where the other end is closed
        while part := os.read(leader, 65536):
            output += part
    os.close(leader)
    text = output.decode().replace("\r\n", "\n")
    assert process.wait() == 0 and "loading PyTorch" in text and "{" not in text
    assert text.strip().splitlines()[-1] == f"Results: {tmp_path / 'a' / 'performance_summary_v2.json'}"


@pytest.mark.slow
def test_a_second_run_sets_the_first_aside(tmp_path, monkeypatch, capsys):
    """In the default directory; one that was named is refused, unless it is forced."""
    monkeypatch.chdir(tmp_path)
    flags = [*SMALL, "--num-steps", "1"]
    assert tof.main(flags) == tof.main(flags) == 0
    assert len(list(tmp_path.glob("pytorch_profiles_v2.old-*"))) == 1
    os.rename("pytorch_profiles_v2", "mine")
    before = (tmp_path / "mine/metrics.jsonl").read_bytes()
    capsys.readouterr()
    assert train("mine", "--num-steps", 1) == 2
    error = capsys.readouterr().err
    assert "mine is not empty" in error and "--force" in error and error.count("\n") == 1
    assert train("mine", "--num-steps", 1, "--force") == 0
    old, = tmp_path.glob("mine.old-*")
    assert old.name in capsys.readouterr().out and (old / "metrics.jsonl").read_bytes() == before
