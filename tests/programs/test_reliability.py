"""Nothing lost, nothing silently wrong: Ctrl-C, kills, full disks, devices, names, earlier results."""
import dataclasses
import errno
import io
import json
import os
import resource
import signal
import subprocess
import sys

import pytest
import torch

import tiny_openfold_v2 as tof
from fusion_lab.measuring import summary
from fusion_lab.measuring.comparison import rungs
from fusion_lab.measuring.comparison.pace import Pace
from fusion_lab.measuring.guardian import Guardian
from fusion_lab.training import files
from fusion_lab.training.checkpoints import read_checkpoint
from fusion_lab.training.files import UserError
from proteins.files import read_alignment, read_structure
from tests.support import PATIENCE, ROOT, last_json

SMALL = ("--num-blocks 1 --msa-dim 8 --pair-dim 8 --msa-heads 2 --pair-heads 2 --outer-product-dim 4 "
         "--num-seqs 4 --seq-len 8 --batch-size 1 --warmup-steps 0 --num-steps 2 --device cpu").split()


def train(directory, *flags, program=tof.PROGRAM):
    return tof.main([*SMALL, "--profile-dir", str(directory), *map(str, flags)], program)


# --- The summary is there whatever fails after the training ------------------------------------------------

def test_a_failing_evaluation_or_comparison_leaves_the_summary(tmp_path, monkeypatch):
    def evaluate(*_, final=False):
        raise RuntimeError("no map today")

    with pytest.raises(RuntimeError, match="no map today"):
        train(tmp_path, program=dataclasses.replace(tof.PROGRAM, evaluate=evaluate))
    path = tmp_path / "performance_summary_v2.json"
    assert json.loads(path.read_text())["performance_summary"]["total_samples"] == 2
    path.unlink()
    (tmp_path / "v1.json").write_text(json.dumps(EARLIER))
    monkeypatch.setattr(summary, "print_against", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        train(tmp_path, "--compare-with-v1", tmp_path / "v1.json")
    assert json.loads(path.read_text())["performance_summary"]["total_samples"] == 2


EARLIER = dict(version="v1", performance_summary=dict(avg_training_speed=1e-3, peak_memory_mb=float("nan")))


@pytest.mark.parametrize("change, words", [
    (dict(system_info="A100"), "system_info must be an object"), (dict(performance_summary=None), "it lacks"),
    (dict(performance_summary=dict(avg_training_speed=1e-320)), "avg_training_speed = 1e-320: must be"),
    (dict(performance_summary=dict(avg_training_speed=10 ** 400)), "must be positive, and a number below"),
    (dict(performance_summary=dict(avg_training_speed=5, peak_memory_mb="nan")), "peak_memory_mb = 'nan'"),
    (dict(version="\ud800"), "surrogates"), (dict(config=json.loads("[" * 51 + "]" * 51)), "nested")])
def test_an_earlier_summary_is_judged_before_the_training(change, words, tmp_path, capsys):
    (tmp_path / "v1.json").write_text(json.dumps({**EARLIER, **change}))
    assert train(tmp_path / "p", "--compare-with-v1", tmp_path / "v1.json") == 2
    error = capsys.readouterr().err
    assert words in error and error.count("\n") == 1 and not (tmp_path / "p").exists()


def test_what_an_earlier_summary_says_is_printed_on_a_line(tmp_path, capsys):
    strange = dict(config={"msa_dim": "a\nb"}, version="v\n1", system_info={"gpu_name": "x" * 500})
    (tmp_path / "v1.json").write_text(json.dumps({**EARLIER, **strange}))
    assert train(tmp_path, "--compare-with-v1", tmp_path / "v1.json") == 0
    out = capsys.readouterr().out
    assert r"Against v\n1 of unknown date:" in out and "Peak memory: not measured in both runs" in out
    assert last_json(out)["compared_with_v1"]["differences"] == [
        r"msa_dim a\nb -> 8", f"gpu_name {'x' * 60} -> None"]


def written(stream):
    stream.seek(0)
    return stream.buffer.read().decode(errors="surrogateescape")


def test_names_of_any_bytes(tmp_path, monkeypatch):
    """Where the terminal takes UTF-8 only: names that are none, that break lines, that are mathematics."""
    pytest.importorskip("gemmi")
    from tests.proteins.structures import model
    place = tmp_path / os.fsdecode(b"dir \xe9\nx")
    place.mkdir()
    for name, letters in ((b"a$^$b", "MKTAYIAKQRQISFVKSHFS"), (b"\xe9\n", "GSWEDLKRTPYCHNMQVIFA")):
        (place / os.fsdecode(name + b".a3m")).write_text(f">q\n{letters}\n")
        (place / os.fsdecode(name + b".pdb")).write_text("\n".join([*model(letters), "END", ""]))
    (place / os.fsdecode(b"\xe8\n.a3m")).touch()
    flags = [*SMALL, "--data", str(place), "--profile-dir", str(place / "p"), "--save-checkpoint",
             str(place / "c.pt")]
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(io.BytesIO(), "utf-8", "strict"))
    monkeypatch.setattr(sys, "stderr", io.TextIOWrapper(io.BytesIO(), "utf-8", "backslashreplace"))
    assert tof.main([*flags, "--holdout", "a$^$b", "--plot-contacts", str(place / "maps")]) == 0
    text, error = written(sys.stdout), written(sys.stderr)
    assert error == ""
    assert ("\nData: 1 real proteins, 1 held out; 40 of 40 residues have coordinates; left out for want of a "
            "partner: \udce8\\n.a3m |") in text
    assert json.loads(text.splitlines()[-1])["summary_file"] == str(place / "p/performance_summary_v2.json")
    assert (place / "maps" / "a$^$b.png").exists()
    assert tof.main([*flags, "--holdout", os.fsdecode(b"\xff")]) == 2
    error = written(sys.stderr)
    assert error.count("\n") == 1 and r"--holdout \udcff: no such family in" in error and r"\udce9\n" in error


# --- Files -------------------------------------------------------------------------------------------------

def test_only_regular_files_are_read_and_replaced(tmp_path):
    fifo, link = tmp_path / "fifo", tmp_path / "link.a3m"
    os.mkfifo(fifo)
    link.symlink_to(fifo)
    for path in (fifo, link):
        for write in (files.require_writable, lambda path: files.write_text(path, "x")):
            with pytest.raises(UserError, match="cannot write .*: not a regular file"):
                write(path)
        with pytest.raises(UserError, match="not a regular file"):
            read_checkpoint(path, tof.PROGRAM, tof.TinyOpenFoldConfig())
        with pytest.raises(UserError, match="not a regular file"):
            summary.read_summary(path)
        for read in (read_alignment, read_structure):
            with pytest.raises(UserError, match="not a regular file"):
                read(path)
    assert fifo.is_fifo() and link.is_symlink()
    with pytest.raises(UserError, match="is a directory"):
        files.write_text(tmp_path, "x")


@pytest.fixture
def small_disk():
    """No file may become larger than 100 kB."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, hard))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_full_disk_is_said_in_the_systems_words(tmp_path, small_disk):
    """Not in torch's, which tells of positions in an archive, nor in those of a library for pictures."""
    pyplot = pytest.importorskip("matplotlib.pyplot")
    figure = pyplot.figure(figsize=(6, 6), dpi=100)
    figure.figimage(torch.rand(600, 600).numpy())
    for write in (lambda file: torch.save(torch.zeros(10 ** 6), file),
                  lambda file: figure.savefig(file, format="png")):
        (tmp_path / "x").write_text("old")
        with pytest.raises(UserError, match=f"cannot write .*: {os.strerror(errno.EFBIG)}$"):
            files.write_atomically(tmp_path / "x", write)
        assert [p.read_text() for p in tmp_path.iterdir()] == ["old"]
    pyplot.close(figure)


# --- Ctrl-C and kills --------------------------------------------------------------------------------------

PROGRAMS = {  # a program and a module that it imports early; the first is what comes right after quiet()
    "tiny_openfold_v2.py": ("dataclasses", "torch"), "run_pytorch_profiler.py": ("torch",),
    "profile_summary.py": ("csv",), "run_rocprofv3.sh": ("csv",), "run_all_profilers.sh": ("csv",),
    "run_pytorch_profiler.sh": ("torch",), "launch_performance_study.sh": ("torch",),
    **{f"benchmarks/{path.name}": ("torch",) for path in sorted((ROOT / "benchmarks").glob("*.py"))
       if "exit_code(" in path.read_text()}}


@pytest.mark.parametrize("program, module", [(program, module) for program, found in PROGRAMS.items()
                                             for module in found])
def test_ctrl_c_while_modules_are_imported(program, module, tmp_path):
    (tmp_path / f"{module}.py").write_text("import os, signal\nos.kill(os.getpid(), signal.SIGINT)\n"
                                           "import time\ntime.sleep(9)")
    environment = {**os.environ, "PYTHONPATH": str(tmp_path), "PYTHON": sys.executable}
    command = [str(ROOT / program)] if program.endswith(".sh") else [sys.executable, str(ROOT / program)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, cwd=tmp_path)
    assert done.returncode in (130, -signal.SIGINT) and "Traceback" not in done.stderr, done.stderr
    assert done.stderr == "interrupted\n"


@pytest.mark.parametrize("where, said", [("within", "p: error: interrupted\n"), ("after", "interrupted\n"),
                                         ("in words", "p: error: interrupted\n")])
def test_ctrl_c_during_and_after_the_work(where, said):
    code = f"""
import os, signal, sys
sys.path.insert(0, {str(ROOT)!r})
from fusion_lab.training import files
files.quiet(__name__)
from fusion_lab.training import files
def strike(*_):
    os.kill(os.getpid(), signal.SIGINT)
    for _ in range(1000):
        pass
def run(argv):
    if {where!r} == "within":
        strike()
    raise files.UserError("wrong")
if {where!r} == "in words":
    files.printable, whole = lambda text: (setattr(files, "printable", whole), strike()), files.printable
if {where!r} == "after":
    sys.stderr.write, write = lambda text: None, sys.stderr.write
code = files.exit_code(run, [], "p")
if {where!r} == "after":
    sys.stderr.write = write
    strike()
sys.exit(code)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (130, said)


def test_a_guardian_kills_what_a_killed_parent_leaves():
    child = subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"], start_new_session=True)
    guardian = Guardian()
    guardian.tell("+", child.pid)
    guardian.close()  # as when its parent ends
    assert child.wait(PATIENCE) == -signal.SIGKILL


def test_compiled_rungs_of_a_killed_comparison_are_known_to_the_guardian(monkeypatch):
    """Stopped processes would stay for ever."""
    told = []

    class Recorder:
        def tell(self, sign, group):
            told.append((sign, group))

        def close(self):
            told.append("closed")

    class Child:
        def __init__(self, _program, variant, _pace):
            self.variant, self.guest = variant, self
            self.process, self.pid = self, 10 + variant.number

        def end(self):
            told.append(("ended", self.pid))

    @dataclasses.dataclass
    class Variant:
        number: int
        reason: str | None = None

    monkeypatch.setattr(rungs, "Guardian", Recorder)
    monkeypatch.setattr(rungs, "Rung", Child)
    monkeypatch.setattr(rungs, "refuse_idle", lambda *_: None)
    monkeypatch.setattr(rungs, "free_memory", lambda device: 0)
    monkeypatch.setattr(rungs.os, "setpriority", lambda *_: None)
    with rungs.Rungs(None, [Variant(1), Variant(2, "idle"), Variant(3)], torch.device("cuda"), print,
                     Pace(1)) as both:
        both.begin()
        assert told == [("+", 11), ("+", 13)]
    assert told[2:] == [("ended", 11), ("-", 11), ("ended", 13), ("-", 13), "closed"]
    with rungs.Rungs(None, [Variant(1)], torch.device("cpu"), print, Pace(1)) as one:
        one.begin()
        assert len(told) == 7


@pytest.mark.slow
def test_results_of_an_interrupted_program_are_whole(tmp_path):
    """The second Ctrl-C comes at once, in the middle of whatever the first one began."""
    path = tmp_path / "c.pt"
    command = [sys.executable, "-u", str(ROOT / "tiny_openfold_v2.py"), *SMALL, "--num-steps", "100000",
               "--log-every", "1", "--profile-dir", str(tmp_path), "--save-checkpoint", str(path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert any(line.startswith("Step ") for line in process.stdout)
            process.send_signal(signal.SIGINT)
            process.send_signal(signal.SIGINT)
            _, err = process.communicate(timeout=PATIENCE)
        finally:
            process.kill()
    assert process.returncode == 130 and "Traceback" not in err
    if path.exists():
        assert read_checkpoint(path, tof.PROGRAM, tof.PROGRAM.settings(
            num_blocks=1, msa_dim=8, pair_dim=8, msa_heads=2, pair_heads=2, outer_product_dim=4).model)
    assert not list(tmp_path.glob("*.part"))
