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
    """The contract of every run: its last stdout line is its result as JSON."""
    return json.loads(result.stdout.strip().splitlines()[-1])
