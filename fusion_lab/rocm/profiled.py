"""The program that is profiled: what it says of itself, its flags and its torch, in a process of its own."""
import json
import os
import re
import subprocess
import sys
from dataclasses import dataclass, field

from fusion_lab.training.files import USAGE, UserError
from fusion_lab.training.flags import QUESTION
from fusion_lab.training.program import DEFAULT_PROGRAM

VARIABLE = "TINYOPENFOLD_SCRIPT"  # names the program where --program does not
SECONDS = 120  # a first import of torch can take half a minute on a network file system


@dataclass
class Profiled:
    """A program and its answer to --check-flags; {} where it has none, then `trouble` says why."""
    path: str
    answer: dict = field(default_factory=dict)
    trouble: str = ""

    def known(self, flags):
        """Words of those flags, (name, value) or (name,), that the program has; of all if it did not say."""
        own = {name for config in ("config", "training_params", "fusion_config")
               for name in self.answer.get(config, {})}
        return [word for words in flags for word in words
                if not own or words[0][2:].replace("-", "_").replace("disable_", "enable_") in own]

    def steps(self):
        """(measured, warm-up), or None where nobody knows: a mode counts no steps."""
        training = self.answer.get("training_params", {})
        return None if "num_steps" not in training or self.answer["asked"] else (
            training["num_steps"], training.get("warmup_steps", 0))


def chosen_program(option):
    """Path of the program: --program, else TINYOPENFOLD_SCRIPT, else the project's own."""
    return os.path.abspath(option or os.environ.get(VARIABLE) or DEFAULT_PROGRAM)


def ask(path, program_flags):
    """Profiled. Raises UserError where the program refuses its flags."""
    if not os.access(path, os.R_OK):
        return Profiled(path, trouble=f"cannot read {path}")
    try:
        done = subprocess.run([sys.executable, path, *program_flags, QUESTION], stdin=subprocess.DEVNULL,
                              capture_output=True, text=True, errors="replace", timeout=SECONDS)
        if done.returncode == 0:
            return Profiled(path, json.loads(done.stdout.splitlines()[-1]))
    except (OSError, ValueError, IndexError, subprocess.TimeoutExpired) as error:
        return Profiled(path, trouble=f"{os.path.basename(path)} does not answer {QUESTION}: {error}")
    said = re.sub(r"^\S+: (error: )?", "", (done.stderr.splitlines() or [f"exit {done.returncode}"])[-1])
    if done.returncode == USAGE:
        raise UserError(said)
    return Profiled(path, trouble=said)
