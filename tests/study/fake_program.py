#!/usr/bin/env python3
"""A program for tests of the performance study: --compare-fusion ends at once, with figures made by formula.

FAKE is JSON: `failing`, variants with a reason in place of figures; `memory_mb`, above which it is out of
memory; `seconds` that a point takes; `log`, a file that gets its process id.
"""
import json
import math
import os
import sys
import time
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent))
from fusion_lab.training.options import Checked, Switches, TrainingConfig, option
from fusion_lab.training.program import Program


@dataclass(frozen=True)
class FakeConfig(Checked):
    """Sizes."""
    width: int = option(32, "channels", low=1)


@dataclass(frozen=True)
class FakeSwitches(Switches):
    """What runs fused."""
    enable_first: bool = option(True, "saves half", preset=True)
    enable_second: bool = option(True, "saves a tenth", preset=True)
    enable_third: bool = option(True, "saves nothing", preset=True)


PROGRAM = Program(file=__file__, about=__doc__, suffix="fake", version="fake", model_config=FakeConfig,
                  training_config=TrainingConfig, fusion_config=FakeSwitches,
                  axes=dict(batch_size="B", width="W"), model=None, data=None, trainer=None)
FACTORS = dict(first=2.0, second=1.1, third=1.0)  # of a step


def faster_by(name):
    """By how much a variant is faster than the baseline."""
    kind, _, switch = name.partition("-")
    without = switch if kind == "without" else None
    on = {"baseline": (), "only": (switch,)}.get(kind, [s for s in FACTORS if s != without])
    return math.prod(FACTORS[switch] for switch in on)


def main(flags):
    knobs, value = json.loads(os.environ.get("FAKE", "{}")), dict(zip(flags, flags[1:], strict=False))
    if "log" in knobs:
        with open(knobs["log"], "a", encoding="utf-8") as file:
            file.write(f"{os.getpid()}\n")
    time.sleep(knobs.get("seconds", 0))
    batch, width = int(value["--batch-size"]), int(value["--width"])
    memory = batch * width ** 2 / 1024
    if memory > knobs.get("memory_mb", memory):
        print("fake_program.py: error: out of memory: lower --batch-size", file=sys.stderr)
        return 1
    rows = []
    for name in value["--variants"].split():
        faster = faster_by(name)
        step = 1e-3 * batch * (width / 32) ** 1.5 / faster
        figures = dict(median_batch_time=step, speedup=faster, peak_memory_mb=memory / faster,
                       launches_per_step=100)
        rows.append(dict(name=name, reason="broken on purpose") if name in knobs.get("failing", ()) else
                    dict(name=name, reason=None, **figures))
    folder = Path(value["--profile-dir"])
    folder.mkdir()
    (folder / "fusion_comparison_fake.json").write_text(json.dumps(dict(variants=rows, system_info=dict(
        gpu_name=None, host_cpu="<CPU>", torch_version="0", git_commit=None))))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
