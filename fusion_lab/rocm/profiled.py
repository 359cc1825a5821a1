"""The program that is profiled: what it says of itself, its flags and its torch, in a process of its own."""
import json
import os
import re
import subprocess
import sys

from fusion_lab.training.files import USAGE, UserError
from fusion_lab.training.flags import QUESTION
from fusion_lab.training.program import DEFAULT_PROGRAM

VARIABLE = "TINYOPENFOLD_SCRIPT"  # names the program where --program does not
SECONDS = 120  # a first import of torch can take half a minute on a network file system


def chosen_program(option):
    """Path of the program: --program, else TINYOPENFOLD_SCRIPT, else the project's own."""
    return os.path.abspath(option or os.environ.get(VARIABLE) or DEFAULT_PROGRAM)


def ask(path, program_flags):
    """(answer of a program to --check-flags, ""), or ({}, why there is none). Raises UserError where it
    refuses its flags."""
    if not os.access(path, os.R_OK):
        return {}, f"cannot read {path}"
    try:
        done = subprocess.run([sys.executable, path, *program_flags, QUESTION], stdin=subprocess.DEVNULL,
                              capture_output=True, text=True, errors="replace", timeout=SECONDS)
        if done.returncode == 0:
            return json.loads(done.stdout.splitlines()[-1]), ""
    except (OSError, ValueError, IndexError, subprocess.TimeoutExpired) as error:
        return {}, f"{os.path.basename(path)} does not answer {QUESTION}: {error}"
    said = re.sub(r"^\S+: (error: )?", "", (done.stderr.splitlines() or [f"exit {done.returncode}"])[-1])
    if done.returncode == USAGE:
        raise UserError(said)
    return {}, said


def known(answer, flags):
    """Words of those flags, (name, value) or (name,), that the program has; of all if it did not answer."""
    own = {name for part in ("config", "training_params", "fusion_config") for name in answer.get(part, {})}
    return [word for words in flags for word in words
            if not own or words[0][2:].replace("-", "_").replace("disable_", "enable_") in own]
