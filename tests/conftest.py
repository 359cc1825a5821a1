"""Shared fixtures: where the ground truth lies, and how a program of this project is started."""
import json
import os
import pathlib
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).resolve().parent.parent
SHARED = ROOT.parent / "shared"  # reference values and real proteins; never copied into the project
sys.path.insert(0, str(ROOT))
# One OpenMP thread: two that spin on a core shared with another process are a hundred times slower.
os.environ.setdefault("OMP_NUM_THREADS", "1")


def require_shared(*parts):
    """Path below ../shared. Absent: skip with the reason, except in CI, where that is a failure."""
    path = SHARED.joinpath(*parts)
    if not path.exists():
        reason = f"ground truth not found: {path}"
        (pytest.fail if os.environ.get("CI") else pytest.skip)(reason)
    return path


@pytest.fixture(scope="session")
def families_dir():
    return require_shared("data", "families")


def pytest_collection_modifyitems(items):
    gpu_items = [item for item in items if item.get_closest_marker("gpu")]
    if gpu_items:
        import torch
        if not torch.cuda.is_available():
            for item in gpu_items:
                item.add_marker(pytest.mark.skip(reason="no CUDA or ROCm GPU"))


def run_program(program, *args, cwd=None, env=None, timeout=240):
    """Run a program of this project as a user does; returns CompletedProcess with text output."""
    command = [sys.executable, str(ROOT / program), *map(str, args)]
    return subprocess.run(command, cwd=cwd, env={**os.environ, "OMP_NUM_THREADS": "1", **(env or {})},
                          timeout=timeout, capture_output=True, text=True, check=False)


def last_json(result):
    """The contract of every run: its last stdout line is JSON of at most 1 kB, headline figures of the file
    that it names. Returns the content of that file."""
    text = result if isinstance(result, str) else result.stdout
    line = text.strip().splitlines()[-1]
    headline = json.loads(line)
    path = headline.pop("summary_file", None)
    if path is None:  # --check-flags, predictions: nothing but this line
        return headline
    assert len(line.encode()) <= 1024
    whole = json.loads(pathlib.Path(path).read_text(encoding="utf-8"))
    for key, value in headline.items():
        assert contains(whole[key], value), key
    return whole


def contains(whole, part):
    """Whether part says nothing that whole does not say in the same place."""
    if isinstance(part, dict):
        return all(key in whole and contains(whole[key], value) for key, value in part.items())
    if isinstance(part, list):
        return all(contains(a, b) for a, b in zip(whole, part, strict=False))
    return whole == part or isinstance(part, str) and whole.startswith(part)
