"""The beginning and the end of a run: flags judged before torch, the demonstration, the result line,
metrics, what a second and a resumed run say."""
import os
import subprocess
import sys

import pytest

import tiny_openfold_v2 as tof
from tests.support import PATIENCE, ROOT, run_program

SMALL = ("--num-blocks 1 --msa-dim 8 --pair-dim 8 --msa-heads 2 --pair-heads 2 --outer-product-dim 4 "
         "--num-seqs 6 --seq-len 16 --batch-size 2 --warmup-steps 1 --device cpu").split()


def train(directory, *flags):
    return tof.main([*SMALL, "--profile-dir", str(directory), *map(str, flags)])


# What people start, with the line of flags that a wrong one is told by
TRAINER, SESSION, SECOND = "tiny_openfold_v2.py", "run_pytorch_profiler.py", "tests/second_program.py"
SESSION_SH, STUDY = "run_pytorch_profiler.sh", "launch_performance_study.sh"


def begun(program, *flags, torch, directory):
    """CompletedProcess of a program in whose place of torch there is a module with this text, if any."""
    if torch:
        (directory / "torch.py").write_text(torch)
    environment = dict(os.environ, PYTHON=sys.executable, PYTHONPATH=str(directory))
    command = [*([sys.executable] if program.endswith(".py") else []), str(ROOT / program), *flags]
    return subprocess.run(command, env=environment, cwd=directory, capture_output=True, text=True,
                          timeout=PATIENCE, check=False)


@pytest.mark.parametrize("program, flags, code, words", [
    (TRAINER, ["--batchsize", "3"], 2, "unrecognized arguments: "),
    (TRAINER, ["query.a3m"], 2, "--contacts"),
    (TRAINER, ["--version"], 0, "TinyOpenFold 2"), (TRAINER, ["--help"], 0, "--demo"),
    (TRAINER, ["--seq-len", "0"], 2, "must be at least 1"),
    (SECOND, ["--width", "0"], 2, "must be at least 1"), (SECOND, ["--help"], 0, "--width")])
def test_flags_are_judged_before_torch_is_imported(program, flags, code, words, tmp_path):
    done = begun(program, *flags, torch="raise SystemExit('torch was imported')", directory=tmp_path)
    assert done.returncode == code and words in done.stdout + done.stderr, done.stderr
    assert code == 0 or done.stderr.count("\n") == 1 and done.stdout == ""


def test_a_working_directory_that_was_deleted_is_one_line(tmp_path):
    code = f"import os, sys; os.rmdir(os.getcwd()); os.execv({sys.executable!r}, ['python', *sys.argv[1:]])"
    done = subprocess.run([sys.executable, "-c", code, str(ROOT / TRAINER)], cwd=tmp_path, check=False,
                          capture_output=True, text=True, timeout=PATIENCE)
    assert done.returncode == 2 and done.stderr.count("\n") == 1 and "directory" in done.stderr, done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("program, flags, code, words", [
    (TRAINER, ["--program", SECOND, "--widt", "3"], 2, "unrecognized arguments: "),
    (TRAINER, ["--program", "nowhere.py"], 2, "no such Python file"),
    (SESSION_SH, ["--validate-setup"], 2, "belongs to tiny_openfold_v2.py"),
    (STUDY, ["--", "--contacts", "x"], 2, "not allowed with argument"),
    (SESSION, ["--program", SECOND, "--profile-steps", "0"], 2, "must be at least 1"),
    (STUDY, ["--num-run", "3"], 2, "unrecognized arguments: "),
    (STUDY, ["--", "--msa-heads", "5"], 2, "must divide"),
    (STUDY, ["--program", SECOND, "--widths", "x"], 2, "argument --widths")])
def test_wrong_flags_of_tools_are_one_line(program, flags, code, words, tmp_path):
    flags = [str(ROOT / word) if word == SECOND else word for word in flags]
    done = begun(program, *flags, torch=None, directory=tmp_path)
    assert done.returncode == code and words in done.stdout + done.stderr, done.stderr
    assert code == 0 or done.stderr.count("\n") == 1
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("program", [TRAINER, SECOND])
def test_a_sign_of_life_comes_before_torch_and_ctrl_c_meanwhile_is_one_line(program, tmp_path):
    done = begun(program, "--num-steps", "1", directory=tmp_path,
                 torch="import os, signal\nos.kill(os.getpid(), signal.SIGINT)")
    assert done.returncode == 130 and done.stderr == "interrupted\n"
    assert done.stdout == f"{os.path.basename(program)}: loading PyTorch ...\n"


@pytest.mark.parametrize("given, expected", [
    ({}, "30000"), ({"GOMP_SPINCOUNT": "7"}, "7"), ({"OMP_WAIT_POLICY": "ACTIVE"}, None)])
def test_threads_wait_less_unless_the_user_decides(given, expected, tmp_path, monkeypatch):
    monkeypatch.delenv("GOMP_SPINCOUNT", raising=False)  # which a program started in this process has set
    shown = "str(os.environ.get('GOMP_SPINCOUNT'))"
    (tmp_path / "torch.py").write_text(f"import os\nraise SystemExit({shown})")
    environment = {"PYTHONPATH": str(tmp_path), **given}
    result = run_program("tiny_openfold_v2.py", "--num-steps", "1", env=environment)
    assert result.stderr == f"{expected}\n"


def test_a_shell_that_ignores_ctrl_c_in_the_background_is_obeyed(tmp_path):
    """As it has it for what runs behind &: the program goes on to torch."""
    (tmp_path / "torch.py").write_text("import os, signal\nos.kill(os.getpid(), signal.SIGINT)\n"
                                       "raise SystemExit('went on')")
    done = subprocess.run(["bash", "-c", f"trap '' INT; {sys.executable} {ROOT / TRAINER} --num-steps 1"],
                          env=dict(os.environ, PYTHONPATH=str(tmp_path)), capture_output=True, text=True,
                          timeout=PATIENCE, check=False)
    assert done.stderr == "went on\n"


def on_a_terminal(*flags):
    """(exit code, output) of the trainer on a pseudo-terminal."""
    leader, follower = os.openpty()
    process = subprocess.Popen([sys.executable, str(ROOT / "tiny_openfold_v2.py"), *map(str, flags)],
                               stdin=follower, stdout=follower, stderr=follower)
    os.close(follower)
    output = b""
    while True:
        try:
            part = os.read(leader, 65536)
        except OSError:  # the other end is closed
            break
        if not part:
            break
        output += part
    os.close(leader)
    return process.wait(), output.decode().replace("\r\n", "\n")


@pytest.mark.slow
def test_people_on_a_terminal_read_a_table(tmp_path):
    """And JSON on demand, by test_summary.py."""
    code, out = on_a_terminal(*SMALL, "--num-steps", 1, "--profile-dir", tmp_path / "a")
    assert code == 0 and "loading PyTorch" in out and "{" not in out
    assert out.strip().splitlines()[-1] == f"Results: {tmp_path / 'a' / 'performance_summary_v2.json'}"


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
