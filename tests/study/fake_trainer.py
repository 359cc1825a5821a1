"""Stands in for a trainer in tests of the performance study: same flags and files, no torch. Run as a script.

FAKE_TRAINER is JSON: `crash`, flags that make it fail; `memory_mb`, above which it is out of memory;
`seconds` that each run takes; `log`, a file with a line "PID point" for each run; `faster`, factors by which
flags shorten a step; `noise`, relative; `program` and `suffix`, of messages and of file names.
"""
import json
import os
import random
import sys
import time

KNOBS = json.loads(os.environ.get("FAKE_TRAINER", "{}"))


def value(flags, name, default=1):
    return int(flags[flags.index(name) + 1]) if name in flags else default


def enabled(flags):
    on = {flag for flag in flags if flag.startswith("--enable-")}
    if not {"--disable-all-fusion", "--enable-all-fusion"} & set(flags):
        on.add("defaults")
    return on


def cost(flags, name):
    """(step time in s, memory in MB) of the run with this name"""
    batch, rows = value(flags, "--batch-size"), value(flags, "--num-seqs")
    length = value(flags, "--seq-len", value(flags, "--width"))
    seconds, memory = 1e-3 + 2e-6 * batch * length ** 1.7 * rows ** 0.3, 2e-3 * batch * length ** 2 + rows
    for flag, factor in KNOBS.get("faster", {"defaults": 1.4, "--enable-all-fusion": 2.2}).items():
        if flag in enabled(flags):
            seconds, memory = seconds / factor, memory / factor ** 0.5
    return seconds * (1 + random.Random(name).gauss(0, KNOBS.get("noise", 0.01))), memory


def fail(message):
    print(f"{KNOBS.get('program', 'tiny_openfold_v2.py')}: error: {message}", file=sys.stderr)
    return 1


def main(flags):
    folder = flags[flags.index("--profile-dir") + 1]
    name = os.path.basename(os.path.dirname(folder))
    if "log" in KNOBS:
        with open(KNOBS["log"], "a", encoding="utf-8") as file:
            file.write(f"{os.getpid()} {name}\n")
    seconds, memory = cost(flags, name)
    if set(KNOBS.get("crash", [])) & enabled(flags):
        return fail("broken on purpose")
    if memory > KNOBS.get("memory_mb", float("inf")):
        return fail("out of memory: lower --batch-size")
    time.sleep(KNOBS.get("seconds", 0))
    figures = dict(median_batch_time=seconds, p20_batch_time=0.97 * seconds, p80_batch_time=1.05 * seconds,
                   avg_training_speed=value(flags, "--batch-size") / seconds, peak_memory_mb=memory,
                   saved_activation_mb=0.6 * memory, launches_per_step=500, flops_per_step=10 ** 9, mfu=None,
                   first_step_time=0.1)
    os.makedirs(folder, exist_ok=True)
    summary = os.path.join(folder, f"performance_summary_{KNOBS.get('suffix', 'v2')}.json")
    with open(summary, "w", encoding="utf-8") as file:
        json.dump(dict(performance_summary=figures, system_info=dict(
            gpu_name=None, host_cpu="fake", torch_version="0", git_commit=None)), file)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
