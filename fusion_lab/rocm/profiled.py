"""The program that is profiled: what it says of itself, its flags and its torch, in a process of its own."""
import contextlib
import functools
import os
import re
import subprocess
import sys
from dataclasses import dataclass, field

from fusion_lab.training.files import MISSING, USAGE, UserError
from fusion_lab.training.flags import QUESTION
from fusion_lab.training.program import DEFAULT_PROGRAM
from fusion_lab.training.reading import parse_json

VARIABLE = "TINYOPENFOLD_SCRIPT"  # names the program where --program does not
SECONDS = 120  # a first import of torch can take half a minute on a network file system
PROBE = """import sys
sys.path = [place for place in sys.path if place]  # not what lies in the user's directory
import json, torch
print(json.dumps({"torch": torch.__version__, "torch_path": torch.__file__, "hip": torch.version.hip,
                  "gpus": torch.cuda.device_count()}))"""


@dataclass(frozen=True)
class Profiled:
    """A program and its answer, {} where there is none; then `unjudged` says why."""
    path: str
    answer: dict = field(default_factory=dict)
    unjudged: str = ""
    no_torch: str = ""  # what it said where torch is missing

    def torch(self):
        """Its interpreter's torch: {"version", "hip", "gpus", "path"}, or {"error": ...}."""
        if self.no_torch:
            return {"error": self.no_torch}
        facts = self.answer or probe_torch()
        if "error" in facts:
            return facts
        return {"version": facts["torch"], "hip": facts["hip"], "path": facts.get("torch_path"),
                "gpus": facts["gpus"] if facts["hip"] else 0}

    def summary(self):
        """Name of the file with its results, or None where nobody knows."""
        return self.answer.get("summary")

    def sizes(self, flags):
        """Of pairs (flag, value), those whose flag the program has; all of them where it did not answer."""
        if not self.answer:
            return flags
        known = {**self.answer.get("config", {}), **self.answer.get("training_params", {})}
        return [(name, value) for name, value in flags if name[2:].replace("-", "_") in known]

    def short_name(self):
        """"tinyopenfold", of .../tiny_openfold_v2.py: for names that take letters and digits only."""
        stem = re.sub(r"_v\d+$", "", os.path.splitext(os.path.basename(self.path))[0])
        return re.sub(r"[\W_]", "", stem)[:20] or "program"

    def steps(self):
        """{"measured", "warmup"}, or None where nobody knows."""
        training = self.answer.get("training_params", {})
        if "num_steps" not in training or self.answer.get("asked"):  # a mode counts no steps
            return None
        return {"measured": training["num_steps"], "warmup": training.get("warmup_steps", 0)}


def chosen_program(option):
    """Path of the program: --program, else TINYOPENFOLD_SCRIPT, else the project's own."""
    return os.path.abspath(option or os.environ.get(VARIABLE) or DEFAULT_PROGRAM)


def start_python(*arguments):
    return subprocess.run([sys.executable, *arguments], stdin=subprocess.DEVNULL, capture_output=True,
                          text=True, errors="replace", timeout=SECONDS)


def last_line(text):
    return (text.strip().splitlines() or [""])[-1].strip()


def answer_in(output):
    """What a program's print_settings() says, its last line, if it has the types counted on here; or None."""
    answer = None
    with contextlib.suppress(ValueError):
        answer = parse_json(last_line(output))
    if not isinstance(answer, dict) or answer.get("mode") != "check_flags":
        return None
    kinds = dict(config=dict, training_params=dict, profiler_config=dict, summary=str, torch_path=str)
    if not all(isinstance(answer.get(key, kind()), kind) for key, kind in kinds.items()):
        return None
    training, profiler = answer.get("training_params", {}), answer.get("profiler_config", {})
    texts = (answer.get("torch"), answer.get("hip") or "", profiler.get("profile_dir", ""))
    counts = (answer.get("gpus"), training.get("num_steps", 0), training.get("warmup_steps", 0))
    usable = all(isinstance(text, str) for text in texts) and all(type(count) is int for count in counts)
    return answer if usable and "hip" in answer else None


def ask(path, program_flags):
    """Profiled. Raises UserError where the program refuses its flags."""
    if not os.access(path, os.R_OK):
        return Profiled(path, unjudged=f"cannot read {path}")
    try:
        done = start_python(path, *program_flags, QUESTION)
    except (OSError, subprocess.TimeoutExpired) as error:
        return Profiled(path, unjudged=str(error))
    said = re.sub(r"^\S+: (error: )?", "", last_line(done.stderr))
    answer = answer_in(done.stdout) if done.returncode == 0 else None
    if answer is not None:
        return Profiled(path, answer)
    if done.returncode == USAGE and said and QUESTION not in said:
        raise UserError(said)
    if done.returncode == MISSING:
        return Profiled(path, unjudged=said, no_torch=said)
    return Profiled(path, unjudged=f"{os.path.basename(path)} does not know {QUESTION}")


@functools.cache
def probe_torch():
    """The same facts from the interpreter itself, for a program that cannot be asked."""
    try:
        done = start_python("-c", PROBE)
        return parse_json(last_line(done.stdout))
    except (OSError, subprocess.TimeoutExpired) as error:
        return {"error": str(error)}
    except ValueError:
        return {"error": last_line(done.stderr) or f"exit code {done.returncode}"}
