"""Stand-in for tiny_openfold_v2.py: takes nearly any flags, fails as FAKE_TRAINER says.

It answers --check-flags as the trainer does; FAKE_TRAINER=unaware is a program that does not know the flag.
"""
import json
import os
import pathlib
import signal
import sys
import time

SUMMARY = os.environ.get("FAKE_SUMMARY", "performance_summary_v2.json")
MODES = ("--validate-setup", "--verify-accuracy", "--compare-fusion")


def value(name, default):
    """The last one counts, as in argparse."""
    places = [place for place, word in enumerate(sys.argv[:-1]) if word == name]
    return sys.argv[places[-1] + 1] if places else default


def refuse(message, code=2):
    sys.stderr.write(f"trainer.py: error: {message}\n")
    sys.exit(code)


def check_flags(behaviour):
    """One line of JSON about the flags and about torch, which is a stand-in as well."""
    if "FAKE_QUESTIONS" in os.environ:
        with open(os.environ["FAKE_QUESTIONS"], "a") as file:
            file.write("asked\n")
    if behaviour == "no_torch":
        refuse("needs torch: pip install -r requirements.txt", 3)
    import torch
    print(json.dumps({
        "mode": "check_flags", "program": "trainer.py", "summary": SUMMARY,
        "asked": next((word for word in sys.argv if word in MODES), None),
        "config": {"num_blocks": 4, "num_seqs": 16, "seq_len": 64},
        "training_params": {"num_steps": int(value("--num-steps", 50)),
                            "warmup_steps": int(value("--warmup-steps", 5))},
        "profiler_config": {"profile_dir": value("--profile-dir", "pytorch_profiles_v2")},
        "torch": torch.__version__, "torch_path": torch.__file__, "hip": torch.version.hip, "cuda": None,
        "gpus": torch.cuda.device_count()}))


def switch_outer_profiler(word):
    """By the project's own code, on a stand-in for the library."""
    import roctx as library
    library.install()
    sys.path.append(str(pathlib.Path(library.__file__).resolve().parents[3]))
    from fusion_lab.measuring import roctx
    try:
        getattr(roctx, word)()
    except OSError as error:
        print(f"no profiler start and stop ({error})")


def write_summary(steps):
    directory = pathlib.Path(value("--profile-dir", "pytorch_profiles_v2"))
    directory.mkdir(parents=True, exist_ok=True)
    summary = {"training_params": {"num_steps": steps, "warmup_steps": int(value("--warmup-steps", 5))},
               "performance_summary": {"median_batch_time": 0.0125, "avg_training_speed": 160.0,
                                       "peak_memory_mb": 512.5, "launches_per_step": 39.0}}
    (directory / SUMMARY).write_text(json.dumps(summary))
    print(json.dumps(summary), flush=True)


def main():
    behaviour = os.environ.get("FAKE_TRAINER", "")
    unknown = {"--bad-flag", *["--check-flags"] * (behaviour == "unaware")}.intersection(sys.argv)
    if unknown:
        refuse(f"unrecognized arguments: {' '.join(sorted(unknown))}")
    if "--check-flags" in sys.argv:
        check_flags(behaviour)
        return
    if "FAKE_RECORD" in os.environ:
        with open(os.environ["FAKE_RECORD"], "a") as file:
            file.write(json.dumps({"argv": sys.argv[1:], "cwd": os.getcwd()}) + "\n")
    if "--enable-rocm-profiling" in sys.argv:
        switch_outer_profiler("resume")
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
    if "--enable-rocm-profiling" in sys.argv:
        switch_outer_profiler("pause")
    write_summary(int(value("--num-steps", 50)))


if __name__ == "__main__":
    main()
