"""Stand-in for tiny_openfold_v2.py: takes any flags, writes its summary, and fails as FAKE_TRAINER says."""
import json
import os
import pathlib
import signal
import sys
import time


def value(name, default):
    return sys.argv[sys.argv.index(name) + 1] if name in sys.argv else default


def write_summary(steps):
    directory = pathlib.Path(value("--profile-dir", "pytorch_profiles_v2"))
    directory.mkdir(parents=True, exist_ok=True)
    summary = {"training_params": {"num_steps": steps, "warmup_steps": int(value("--warmup-steps", 5))},
               "performance_summary": {"median_batch_time": 0.0125, "avg_training_speed": 160.0,
                                       "peak_memory_mb": 512.5, "launches_per_step": 39.0}}
    (directory / "performance_summary_v2.json").write_text(json.dumps(summary))
    print(json.dumps(summary), flush=True)


def main():
    behaviour = os.environ.get("FAKE_TRAINER", "")
    if "FAKE_RECORD" in os.environ:
        with open(os.environ["FAKE_RECORD"], "a") as file:
            file.write(json.dumps({"argv": sys.argv[1:], "cwd": os.getcwd()}) + "\n")
    if "--bad-flag" in sys.argv:
        sys.stderr.write("trainer.py: error: unrecognized arguments: --bad-flag\n")
        sys.exit(2)
    if behaviour == "raise":
        raise RuntimeError("HIP out of memory")
    if behaviour == "segv":
        os.kill(os.getpid(), signal.SIGSEGV)
    if behaviour == "exit3":
        sys.exit(3)
    if behaviour == "hang":  # one long step: a signal ends it in order, as in the real trainer
        asked = []
        signal.signal(signal.SIGINT, lambda number, frame: asked.append(number))
        print("step 1", flush=True)
        while not asked:
            time.sleep(0.02)
        write_summary(1)
        sys.exit(130)
    write_summary(int(value("--num-steps", 50)))


if __name__ == "__main__":
    main()
