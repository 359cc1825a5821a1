"""Stand-in for tiny_openfold_v2.py: takes nearly any flags, fails as FAKE_TRAINER says."""
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
    sys.exit(sys.stderr.write(f"trainer.py: error: {message}\n") and code)


def check_flags():
    """One line of JSON about the flags and about torch, as the trainer answers."""
    if "FAKE_QUESTIONS" in os.environ:
        with open(os.environ["FAKE_QUESTIONS"], "a") as file:
            file.write("asked\n")
    hip = os.environ.get("FAKE_HIP", "7.0.1") or None
    print(json.dumps({
        "mode": "check_flags", "summary": SUMMARY, "asked": next((m for m in MODES if m in sys.argv), None),
        "config": {"num_blocks": 4, "num_seqs": 16, "seq_len": 64},
        "fusion_config": {"enable_cuda_graphs": "--enable-cuda-graphs" in sys.argv},
        "training_params": {"num_steps": int(value("--num-steps", 50)),
                            "warmup_steps": int(value("--warmup-steps", 5))},
        "profiler_config": {"profile_dir": value("--profile-dir", "pytorch_profiles_v2")},
        "torch": "2.13.0", "torch_path": "/site/torch/__init__.py", "hip": hip,
        "gpus": int(os.environ.get("FAKE_GPUS", "1"))}))


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
               "performance_summary": {"median_batch_time": 0.0125, "launches_per_step": 39.0}}
    (directory / SUMMARY).write_text(json.dumps(summary))
    print(json.dumps(summary), flush=True)


def main():
    behaviour = os.environ.get("FAKE_TRAINER", "")
    if "--bad-flag" in sys.argv:
        refuse("unrecognized arguments: --bad-flag")
    if "--check-flags" in sys.argv:
        return refuse("needs torch: pip install", 3) if behaviour == "no_torch" else check_flags()
    with open(os.environ["FAKE_RECORD"], "a") as file:
        file.write(json.dumps({"argv": sys.argv[1:], "cwd": os.getcwd(),
                               "inherited": "ROCPROFILER_REGISTER_LIBRARY" in os.environ}) + "\n")
    outer = "--enable-rocm-profiling" in sys.argv
    if outer:
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
    if outer:
        switch_outer_profiler("pause")
    write_summary(int(value("--num-steps", 50)))


if __name__ == "__main__":
    main()
