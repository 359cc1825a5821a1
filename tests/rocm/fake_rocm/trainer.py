"""Stand-in for tiny_openfold_v2.py: takes nearly any flags, fails as FAKE_TRAINER says."""
import argparse
import ctypes
import json
import os
import pathlib
import signal
import sys
import time

BEHAVIOUR = os.environ.get("FAKE_TRAINER", "")


def value(name, default):
    """The last one counts, as in argparse."""
    places = [place for place, word in enumerate(sys.argv[:-1]) if word == name]
    return sys.argv[places[-1] + 1] if places else default


DIRECTORY = pathlib.Path(value("--profile-dir", "pytorch_profiles_v2"))
TRAINING = {"num_steps": int(value("--num-steps", 50)), "warmup_steps": int(value("--warmup-steps", 5))}


def check_flags():
    """One line of JSON about the flags and about torch, as the trainer answers."""
    print(json.dumps({
        "asked": None, "config": {"num_blocks": 4, "num_seqs": 16, "seq_len": 64},
        "training_params": TRAINING, "fusion_config": {"enable_cuda_graphs": False},
        "torch": "2.13.0", "torch_path": "/site/torch/__init__.py",
        "hip": os.environ.get("FAKE_HIP", "7.0.1") or None, "gpus": int(os.environ.get("FAKE_GPUS", "1"))}))


def switch_outer_profiler(word):
    """By the project's own code, on a stand-in for the library."""
    import roctx as library
    ctypes.CDLL = library.Library
    sys.path.append(str(pathlib.Path(library.__file__).resolve().parents[3]))
    from fusion_lab.measuring import roctx
    try:
        getattr(roctx, word)()
    except OSError as error:
        print(f"no profiler start and stop ({error})")


def write_summary():
    DIRECTORY.mkdir(parents=True)
    summary = {"performance_summary": {"median_batch_time": 0.0125, "launches_per_step": 39.0}}
    (DIRECTORY / "performance_summary_v2.json").write_text(json.dumps(summary))
    print(json.dumps(summary), flush=True)


def main():
    if "--bad-flag" in sys.argv:
        argparse.ArgumentParser().error("unrecognized arguments: --bad-flag")
    if BEHAVIOUR == "no_torch":
        sys.stderr.write("trainer.py: error: needs torch\n")
        sys.exit(3)
    if "--check-flags" in sys.argv:
        return check_flags()
    if DIRECTORY.exists():
        if "--force" not in sys.argv:
            sys.exit(f"trainer.py: error: {DIRECTORY} is not empty")
        DIRECTORY.rename(f"{DIRECTORY}.old-{time.time()}")
    with open(os.environ["FAKE_RECORD"], "a") as file:
        file.write(json.dumps({"argv": sys.argv[1:], "cwd": os.getcwd(),
                               "inherited": "ROCPROFILER_REGISTER_LIBRARY" in os.environ}) + "\n")
    outer = "--enable-rocm-profiling" in sys.argv
    if outer:
        switch_outer_profiler("resume")
    if BEHAVIOUR == "raise":
        raise RuntimeError("HIP out of memory")
    if BEHAVIOUR == "segv":
        os.kill(os.getpid(), signal.SIGSEGV)
    if BEHAVIOUR == "exit3":
        sys.exit(3)
    if BEHAVIOUR == "hang":  # one long step: a signal ends it in order, as in the real trainer
        asked = []
        signal.signal(signal.SIGINT, lambda number, frame: asked.append(number))
        print("step 1", flush=True)
        while not asked:
            time.sleep(0.02)
        write_summary()
        sys.exit(130)
    if outer:
        switch_outer_profiler("pause")
    write_summary()


if __name__ == "__main__":
    main()
