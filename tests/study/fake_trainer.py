"""Stands in for a trainer in tests of the performance study: same flags and files, no torch. Run as a script.

FAKE_TRAINER is JSON: `crash` and `inaccurate`, flags that make it fail; `memory_mb`, above which it is out of
memory; `starts` {flag: seconds before that} and `seconds` that each run takes; `log`, a file with a line at
the start and end of each measurement; `deaf`, whether it hears no answer when it asks for its turn; `orphans`
{flag: seconds} that it sleeps before it asks to die with its parent, beside a child that never asks; `after`
{flag: lines of the log for which it waits};
`faster`, factors by which flags shorten a step; `both`, a further one for the first two of them together;
`program` and `suffix`, of messages and of file names.
"""
import json
import os
import pathlib
import random
import subprocess
import sys
import time

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2]))
from fusion_lab.measuring import turns  # noqa: E402

KNOBS = json.loads(os.environ.get("FAKE_TRAINER", "{}"))


def note(word, pid=None):
    if "log" in KNOBS:
        gpus = os.environ.get("CUDA_VISIBLE_DEVICES")
        with open(KNOBS["log"], "a", encoding="utf-8") as file:
            file.write(f"{word} {pid or os.getpid()} {gpus} {point_name()}\n")


def point_name():
    return os.path.basename(sys.argv[sys.argv.index("--profile-dir") + 1])


def value(flags, name, default=1):
    return int(flags[flags.index(name) + 1]) if name in flags else default


def enabled(flags):
    on = {flag for flag in flags if flag.startswith("--enable-")}
    if not {"--disable-all-fusion", "--enable-all-fusion"} & set(flags):
        on.add("defaults")
    return on


def lines_of_log():
    return pathlib.Path(KNOBS["log"]).read_bytes().count(b"\n") if os.path.exists(KNOBS["log"]) else 0


def most(knob, flags):
    """The largest of the knob's numbers whose flag is on."""
    return max([0, *(s for flag, s in KNOBS.get(knob, {}).items() if flag in enabled(flags))])


def cost(flags):
    """(step time in s, memory in MB)"""
    batch, rows = value(flags, "--batch-size"), value(flags, "--num-seqs")
    length = value(flags, "--seq-len", value(flags, "--width"))
    seconds, memory = 1e-3 + 2e-6 * batch * length ** 1.7 * rows ** 0.3, 2e-3 * batch * length ** 2 + rows
    faster, on = KNOBS.get("faster", {"defaults": 1.4, "--enable-all-fusion": 2.2}), enabled(flags)
    for name, factor in faster.items():
        if name in on:
            seconds, memory = seconds / factor, memory / factor ** 0.5
    if "both" in KNOBS and set(list(faster)[:2]) <= on:
        seconds /= KNOBS["both"]
    noise = random.Random(point_name()).gauss(0, KNOBS.get("noise", 0.01))
    return seconds * (1 + noise), memory


def fail(message):
    print(f"{KNOBS.get('program', 'tiny_openfold_v2.py')}: error: {message}", file=sys.stderr)
    return 1


def write(folder, name, content):
    name = f"{name}_{KNOBS.get('suffix', 'v2')}.json"
    with open(os.path.join(folder, name), "w", encoding="utf-8") as file:
        json.dump(content, file)


def main(flags):
    folder = flags[flags.index("--profile-dir") + 1]
    if lifetime := most("orphans", flags):
        note("orphan")
        note("orphan", subprocess.Popen(["sleep", str(lifetime)]).pid)
        time.sleep(lifetime)
    turns.die_with_parent()
    if "--verify-accuracy" in flags:
        wrong = bool(set(KNOBS.get("inaccurate", [])) & enabled(flags))
        write(folder, "accuracy", dict(failures=["distances: off by 1"] if wrong else []))
        return int(wrong)
    time.sleep(most("starts", flags))
    while "after" in KNOBS and lines_of_log() < most("after", flags):
        time.sleep(0.02)
    seconds, memory = cost(flags)
    if set(KNOBS.get("crash", [])) & enabled(flags):
        return fail("broken on purpose")
    if memory > KNOBS.get("memory_mb", float("inf")):
        note("full")
        return fail("out of memory: lower --batch-size")
    if KNOBS.get("deaf"):
        os.dup2(os.open(os.devnull, os.O_RDONLY), turns.INVITATION[1])
    with turns.turn():
        note("begin")
        time.sleep(KNOBS.get("seconds", 0))
        note("end")
    figures = dict(median_batch_time=seconds, p20_batch_time=0.97 * seconds, p80_batch_time=1.05 * seconds,
                   avg_training_speed=value(flags, "--batch-size") / seconds, peak_memory_mb=memory,
                   saved_activation_mb=0.6 * memory, launches_per_step=500, flops_per_step=10 ** 9, mfu=None,
                   first_step_time=0.1)
    write(folder, "performance_summary", dict(performance_summary=figures, system_info=dict(
        gpu_name=None, host_cpu="fake", torch_version="0", git_commit=None)))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
