"""Stands in for tiny_openfold_v2.py in tests of the performance study: same flags and files, no torch.

FAKE_TRAINER is JSON: `crash` and `inaccurate`, flags that make it fail; `memory_mb`, above which it is out of
memory; `starts` {flag: seconds before that} and `seconds` that each run takes; `log`, a file with a line at
the start and end of each measurement;
`faster`, factors by which flags shorten a step; `both`, a further one for the first two of them together.
"""
import json
import os
import random
import sys
import time

KNOBS = json.loads(os.environ.get("FAKE_TRAINER", "{}"))


def note(word):
    if "log" in KNOBS:
        with open(KNOBS["log"], "a", encoding="utf-8") as file:
            file.write(f"{word} {os.getpid()} {os.environ.get('CUDA_VISIBLE_DEVICES')} {point_name()}\n")


def point_name():
    return os.path.basename(sys.argv[sys.argv.index("--profile-dir") + 1])


def run_steps(flags):
    note("begin")
    time.sleep(KNOBS.get("seconds", 0))
    note("end")


def value(flags, name):
    return int(flags[flags.index(name) + 1])


def enabled(flags):
    on = {flag for flag in flags if flag.startswith("--enable-")}
    if not {"--disable-all-fusion", "--enable-all-fusion"} & set(flags):
        on.add("defaults")
    return on


def cost(flags):
    """(step time in s, memory in MB)"""
    batch, length, rows = (value(flags, name) for name in ("--batch-size", "--seq-len", "--num-seqs"))
    seconds, memory = 1e-3 + 2e-6 * batch * length ** 1.7 * rows ** 0.3, 2e-3 * batch * length ** 2 + rows
    faster, on = KNOBS.get("faster", {"defaults": 1.4, "--enable-all-fusion": 2.2}), enabled(flags)
    for name, factor in faster.items():
        if name in on:
            seconds, memory = seconds / factor, memory / factor ** 0.5
    if "both" in KNOBS and set(list(faster)[:2]) <= on:
        seconds /= KNOBS["both"]
    noise = random.Random(point_name()).gauss(0, KNOBS.get("noise", 0.01))
    return seconds * (1 + noise), memory


def main(flags):
    folder = flags[flags.index("--profile-dir") + 1]
    if "--verify-accuracy" in flags:
        wrong = bool(set(KNOBS.get("inaccurate", [])) & enabled(flags))
        with open(os.path.join(folder, "accuracy_v2.json"), "w", encoding="utf-8") as file:
            json.dump(dict(failures=["distances: off by 1"] if wrong else []), file)
        return int(wrong)
    time.sleep(max([0, *(s for flag, s in KNOBS.get("starts", {}).items() if flag in enabled(flags))]))
    seconds, memory = cost(flags)
    if set(KNOBS.get("crash", [])) & enabled(flags):
        print("tiny_openfold_v2.py: error: broken on purpose", file=sys.stderr)
        return 1
    if memory > KNOBS.get("memory_mb", float("inf")):
        note("full")
        print("tiny_openfold_v2.py: error: out of memory: lower --batch-size", file=sys.stderr)
        return 1
    run_steps(flags)
    figures = dict(median_batch_time=seconds, p20_batch_time=0.97 * seconds, p80_batch_time=1.05 * seconds,
                   avg_training_speed=value(flags, "--batch-size") / seconds, peak_memory_mb=memory,
                   saved_activation_mb=0.6 * memory, launches_per_step=500, flops_per_step=10 ** 9, mfu=None,
                   first_step_time=0.1)
    with open(os.path.join(folder, "performance_summary_v2.json"), "w", encoding="utf-8") as file:
        json.dump(dict(performance_summary=figures, system_info=dict(
            gpu_name=None, host_cpu="fake", torch_version="0", git_commit=None)), file)
    return 0
