"""Strict stand-in for rocprof-compute 3.0 (ROCm 6.3), 3.2 (7.0) and 3.9 (10.1)."""
import argparse
import os
import pathlib
import re
import shutil
import subprocess
import sys

import common

PASSES = {"pmc_perf_0": ("SQ_WAVES",), "pmc_perf_1": ("GRBM_COUNT", "SQ_BUSY_CYCLES")}


def die(message):
    print(f"\x1b[31mERROR\x1b[0m {message}")  # coloured, whatever it is written to
    sys.exit(1)


def build_parser():
    profile, analyze = (argparse.ArgumentParser(prog="tool", allow_abbrev=False) for _ in range(2))
    for flag in ("--no-roof", "--roof-only"):
        profile.add_argument(flag, action="store_true")
    profile.add_argument("-n", "--name")
    profile.add_argument("--device", type=int)
    profile.add_argument("remaining", nargs=argparse.REMAINDER)
    analyze.add_argument("-p", "--path", nargs="+", action="append")
    analyze.add_argument("--list-stats", action="store_true")
    analyze.add_argument("-d", "--dispatch", nargs="+", action="append")
    return {"profile": profile, "analyze": analyze}


def check(options, directory, words):
    """3.0 wants a path as the program, later ones a program; 3.5 and 3.6 abort on a shell."""
    if common.OLD and not re.fullmatch(r"\w{1,35}", options.name):
        die(f"{options.name}: letters, digits and _ only, at most 35 of them")
    if not words or not (os.path.isfile if common.OLD else shutil.which)(words[0]):
        die(f"Your command {' '.join(words)} doesn't point to a executable. Please verify.")
    if common.NEW and os.path.basename(words[0]) in ("bash", "sh"):
        sys.exit("ROCPROF_OUTPUT_PATH environment variable must be set")


def profile(options):
    directory = pathlib.Path(os.getcwd(), "workloads", options.name, "MI300X_A1")
    words = options.remaining[1:]
    check(options, directory, words)
    (directory / "perfmon").mkdir(parents=True)
    for name, counters in PASSES.items():  # its own input, which is there whatever becomes of the run
        (directory / "perfmon" / f"{name}.txt").write_text(f"pmc: {' '.join(counters)}\n\ngpu:\n")
    for name, counters in ({"roofline": ()} if options.roof_only else PASSES).items():  # one run for each
        if subprocess.run(" ".join(words).split()).returncode:
            die("Profiling execution failed.")
        if counters and common.FAIL != "no_data" and common.NEW:
            place = directory / "out" / name / "4711"
            place.mkdir(parents=True)
            common.write_rocpd(place / "4711.db", counters=counters)
    (directory / "sysinfo.csv").write_text("workload_name,gpu_model\nx,MI300X\n")
    (directory / "pmc_dispatch_info.csv").write_text("Dispatch_ID,Kernel_Name\n0,k\n")
    if not options.no_roof and common.FAIL == "no_roofline":
        print("INFO Skipping roofline")
    elif not options.no_roof and common.FAIL != "no_data":
        (directory / "roofline.csv").write_text("device,HBMBw\n0,4000\n")
    if common.FAIL == "pandas":  # 3 has no `object` columns, so until 3.4 nothing could be joined
        print(f"WARNING Cannot write results for {directory}/perfmon/pmc_perf_0.txt: no counter csv files")
    elif not (options.roof_only or common.FAIL == "no_data" or common.NEW):
        common.write_trace(directory / "pmc_perf.csv", "rocprof-compute")


def analyze(options):
    for (path,) in options.path or [[""]]:
        if not pathlib.Path(path, "sysinfo.csv").exists():
            die(f"Invalid directory {path}. Please try again.")
    print("Dispatch list\n 0  Cijk" if options.list_stats else f"0. Top Stats\ndispatch {options.dispatch}")


def main():
    if common.FAIL == "crash":
        raise KeyError("gpu_model")
    mode, *arguments = sys.argv[1:]
    {"profile": profile, "analyze": analyze}[mode](build_parser()[mode].parse_args(arguments))


if __name__ == "__main__":
    main()
