#!/usr/bin/env python3
"""Runs Python where there is a torch in range: environment.py [--dry-run] REQUIREMENTS [arguments of python]

An activated environment (venv or conda) that has a torch is used, and given what else REQUIREMENTS name;
without one, a venv `.venv` beside the Makefile, which sees the base Python's packages. A torch in range is
never replaced. The Makefile calls this; the standard library is enough.
"""
import signal

AT_START = signal.getsignal(signal.SIGINT)
if __name__ == "__main__" and AT_START is signal.default_int_handler:
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C before main() is no traceback either

import importlib.metadata
import importlib.util
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
VENV = ROOT / ".venv"


def requirements(file):
    """{name: condition, such as ">=2.10,<2.14"} of a requirements file and of those that it includes, on this
    platform: of markers it knows `sys_platform == "NAME"`."""
    found = {}
    for line in (raw.partition("#")[0].strip() for raw in file.read_text(encoding="utf-8").splitlines()):
        line, _, marker = map(str.strip, line.partition(";"))
        if line.startswith("-r "):
            found.update(requirements(file.parent / line[3:].strip()))
        elif line and (not marker or f'"{sys.platform}"' in marker):
            name = re.match(r"[\w.-]+", line).group()
            found[name] = line[len(name):].strip()
    return found


def installed(name):
    """Version of a package in this Python, or None."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def brought(name):
    """Whether a torch for GPUs has brought its own Triton, under whatever name."""
    return name == "triton" and importlib.util.find_spec(name) is not None


def in_range(version, condition):
    """By release numbers alone: builds such as 2.10.0a0+git1234 and 2.12.0+rocm7.1 count as 2.10 and 2.12."""
    def numbers(text):
        return tuple(map(int, re.search(r"\d+(?:\.\d+)*", text).group().split(".")))

    return all((numbers(version) >= numbers(bound)) == bound.startswith(">=")
               for bound in condition.split(","))


def activated():
    """Whether this Python belongs to an activated environment: `python3` is its own then."""
    conda = Path(os.environ.get("CONDA_PREFIX", "none"))
    return sys.prefix != sys.base_prefix or conda.resolve() == Path(sys.prefix).resolve()


def in_own_venv():
    return Path(sys.prefix).resolve() == VENV.resolve()


def say(text):
    print(text, file=sys.stderr, flush=True)


def fail(text, code):
    say(f"error: {text}")
    sys.exit(code)


def call(command, dry, failure):
    """Run a command, its output on stderr; a dry run shows it."""
    if dry:
        print("+", shlex.join(map(str, command)))
    elif subprocess.run(command, stdout=sys.stderr, check=False).returncode:
        fail(failure, 3)


def make_venv(dry):
    say(f"Making {VENV}, an environment of this project that also sees the packages of {sys.executable} "
        "(`make clean` removes it)")
    try:
        call([sys.executable, "-m", "venv", "--system-site-packages", "--clear", VENV], dry,
             "no environment could be made; on Debian and Ubuntu: apt install python3-venv")
    except BaseException:  # an interrupt, too: half an environment would be taken for a whole one
        shutil.rmtree(VENV, ignore_errors=True)
        raise


def install(lacking, torch, dry):
    """pip's own resolver, held to this torch by a constraint: what would need another one fails."""
    with tempfile.NamedTemporaryFile("w", prefix="keep-torch-", suffix=".txt") as constraint:
        print(f"torch=={torch}" if torch else "", file=constraint, flush=True)
        call([sys.executable, "-m", "pip", "install", *(["-c", constraint.name] if torch else []), *lacking],
             dry, f"pip could not install into {sys.prefix}; by hand: {', '.join(lacking)}")


def complete(wanted, dry):
    """Install what this Python lacks of `wanted`; a torch in range stays."""
    versions = {name: installed(name) for name in wanted}
    lacking = [name + condition for name, condition in wanted.items()
               if (versions[name] is None or not in_range(versions[name], condition)) and not brought(name)]
    torch, kept = versions["torch"], "torch" + wanted["torch"] not in lacking
    if not kept and not in_own_venv():
        fail(f"{sys.prefix} has torch {torch}, wanted is torch{wanted['torch']}: install such a one there "
             f"(README, Install), or leave that environment (deactivate): then {VENV.name} gets its own", 2)
    if lacking or not in_own_venv():
        say(f"Using {sys.prefix}" + (f" with its torch {torch}" if kept else "")
            + (f"; installing there: {', '.join(lacking)}" if lacking else ""))
    if not kept:
        say("torch comes from pip's index; PyPI's for Linux is a large CUDA build. For AMD GPUs, or a small "
            "one for CPU: README, Install")
    if lacking:
        install(lacking, torch if kept else None, dry)


def main(argv):
    dry = argv[:1] == ["--dry-run"]
    file, *arguments = argv[dry:]
    if sys.version_info < (3, 10):  # noqa: UP036  it runs before anything has checked that
        fail(f"{sys.executable} is older than Python 3.10; `make train PYTHON=python3.12` names another", 3)
    if in_own_venv() or activated() and installed("torch"):
        complete(requirements(ROOT / file), dry)
        command = [sys.executable, *arguments]
        if dry:
            return print("+", shlex.join(command))
        os.execv(command[0], command)
    python = VENV / "bin" / "python"
    if not python.exists():
        make_venv(dry)
    if python.exists():  # in a dry run it may not
        os.execv(python, [str(python), __file__, *argv])


if __name__ == "__main__":
    try:
        signal.signal(signal.SIGINT, AT_START)
        main(sys.argv[1:])
    except KeyboardInterrupt:
        sys.exit(130)
