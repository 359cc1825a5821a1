"""What the tests of the ROCm wrappers share: start a wrapper, read what it and the stand-ins recorded."""
import contextlib
import functools
import io
import json
import pathlib
import subprocess

import pytest

from fusion_lab.rocm import all_profilers, kernel_summary, profiled, session, wrappers
from fusion_lab.training import files
from tests.support import PATIENCE, ROOT

from . import common

FAKES = pathlib.Path(common.__file__).parent
GENERATIONS = ("6.3", "7.0", "10.1")
everywhere = pytest.mark.parametrize("generation", GENERATIONS)
RELEASES = ("6.3", "6.4", "7.0", "7.1", "7.2", "7.12", "7.13", "7.14", "10.0", "10.1", "wheels")
WRAPPERS = {"run_rocprofv3.sh": "rocprofv3", "run_rocprof_sys.sh": "rocprof-sys-python",
            "run_rocprof_compute.sh": "rocprof-compute"}
MAINS = {each.script: functools.partial(session.main, each) for each in wrappers.WRAPPERS.values()} | {
    all_profilers.SCRIPT: lambda argv: files.exit_code(all_profilers.run_all, argv, all_profilers.SCRIPT),
    "profile_summary.py": kernel_summary.main}
ODD_FLAGS = ["--data", "my files/a b", "--title=x  y", "--note", "it's \"quoted\" $HOME *", "-5",
             "--empty", "", "--text", "a\nEND_OF_FILE\ntouch PWNED\n"]
TINY = ["--msa-dim", "8", "--pair-dim", "8", "--num-blocks", "1", "--num-seqs", "4", "--seq-len", "8",
        "--batch-size", "1", "--num-steps", "2", "--warmup-steps", "1"]


def start_script(script, *arguments):
    return subprocess.run([ROOT / script, *map(str, arguments)], capture_output=True, text=True,
                          timeout=PATIENCE)


def start(script, *arguments):
    """The same in this process, which spares two shells and two Pythons."""
    profiled.probe_torch.cache_clear()
    streams = [io.TextIOWrapper(io.BytesIO(), "utf-8") for _ in range(2)]
    with contextlib.redirect_stdout(streams[0]), contextlib.redirect_stderr(streams[1]):
        try:
            code = MAINS[script](list(map(str, arguments)))
        except SystemExit as ended:
            code = ended.code
    for stream in streams:
        stream.seek(0)
    return subprocess.CompletedProcess(script, code, *(stream.read() for stream in streams))


def wrapper(name, *arguments):
    """The wrapper of this tool, as a command line makes it."""
    return wrappers.WRAPPERS[name].from_arguments(list(arguments))


def summary_of(directory):
    return json.loads((directory / "rocprofv3_summary.json").read_text())


def recorded(tmp_path):
    """argv and cwd of every run of the stand-in for the trainer."""
    return [json.loads(line) for line in (tmp_path / "record").read_text().splitlines()]


def manifest(directory):
    return json.loads((pathlib.Path(directory) / "manifest.json").read_text())


def interrupt(script, number, machine, *arguments):
    """Start, wait for the trainer's first step, send the signal; (exit code, directory)."""
    workplace = machine("7.0", FAKE_TRAINER="hang")
    process = subprocess.Popen([ROOT / script, "-o", "out", *arguments], stdout=subprocess.PIPE,
                               stderr=subprocess.STDOUT, text=True)
    try:
        for line in process.stdout:
            if line.startswith("step 1"):
                break
        process.send_signal(number)
        output = process.communicate(timeout=PATIENCE)[0]
    finally:
        process.kill()
    return process.returncode, workplace / "out", output


STATS = "Name,Calls,TotalDurationNs"


def csv(path, header, *rows):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join([header, *(",".join(map(str, row)) for row in rows)]) + "\n")


def run_of(directory, *kernels, **steps):
    """A result directory with these (name, calls, nanoseconds in all), and a manifest with its steps."""
    csv(directory / "7_kernel_stats.csv", STATS, *kernels)
    if steps:
        (directory / "manifest.json").write_text(json.dumps(dict(steps=steps)))
    return directory
