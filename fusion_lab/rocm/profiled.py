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


@dataclass(frozen=True)
class Profiled:
    """A program and its answer; {} where it has none, then `trouble` says why."""
    path: str
    answer: dict = field(default_factory=dict)
    trouble: str = ""

    def torch(self):
        """Its interpreter's torch: {"version", "hip", "gpus", "path"}, or {}."""
        facts = self.answer
        return facts and {"version": facts["torch"], "hip": facts["hip"], "path": facts["torch_path"],
                          "gpus": facts["gpus"] if facts["hip"] else 0}

    def known(self, flags):
        """Words of those flags, (name, value) or (name,), that the program has; of all if it did not say."""
        own = {name for config in ("config", "training_params", "fusion_config")
               for name in self.answer.get(config, {})}
        return [word for words in flags for word in words
                if not own or words[0][2:].replace("-", "_").replace("disable_", "enable_") in own]

    def short_name(self):
        """"tinyopenfold", of .../tiny_openfold_v2.py: for names that take letters and digits only."""
        stem = re.sub(r"_v\d+$", "", os.path.splitext(os.path.basename(self.path))[0])
        return re.sub(r"[\W_]", "", stem)[:20] or "program"

    def steps(self):
        """{"measured", "warmup"}, or None where nobody knows."""
        training = self.answer.get("training_params", {})
        if "num_steps" not in training or self.answer["asked"]:  # a mode counts no steps
            return None
        return {"measured": training["num_steps"], "warmup": training.get("warmup_steps", 0)}


def chosen_program(option):
    """Path of the program: --program, else TINYOPENFOLD_SCRIPT, else the project's own."""
    return os.path.abspath(option or os.environ.get(VARIABLE) or DEFAULT_PROGRAM)


def last_line(text):
    return (text.strip().splitlines() or [""])[-1].strip()


def ask(path, program_flags):
    """Profiled. Raises UserError where the program refuses its flags."""
    if not os.access(path, os.R_OK):
        return Profiled(path, trouble=f"cannot read {path}")
    try:
        done = subprocess.run([sys.executable, path, *program_flags, QUESTION], stdin=subprocess.DEVNULL,
                              capture_output=True, text=True, errors="replace", timeout=SECONDS)
        said = re.sub(r"^\S+: (error: )?", "", last_line(done.stderr))
        if done.returncode == 0:
            return Profiled(path, json.loads(last_line(done.stdout)))
    except (OSError, ValueError, subprocess.TimeoutExpired) as error:
        return Profiled(path, trouble=f"{os.path.basename(path)} does not answer {QUESTION}: {error}")
    if done.returncode == USAGE:
        raise UserError(said)
    return Profiled(path, trouble=said or f"{os.path.basename(path)} {QUESTION}: exit {done.returncode}")
