"""Strict stand-in for rocprof-compute 3.0 (ROCm 6.3), 3.2 (7.0), 3.9 (10.1) and what is announced next."""
import argparse
import os
import pathlib
import shutil
import subprocess
import sys

import common


def die(message):
    print(f"[ERROR] {message}")
    sys.exit(1)


def add_profile(modes):
    parser = modes.add_parser("profile", prog="tool", allow_abbrev=False)
    parser.add_argument("-v", "--version", action="version", version="rocprof-compute version: 3.2.3")
    parser.add_argument("-n", "--name")
    parser.add_argument("-k", "--kernel", nargs="+")
    parser.add_argument("-b", "--block", nargs="+")
    parser.add_argument("--no-roof", action="store_true")
    parser.add_argument("--roofline-data-type", nargs="+", help="types to plot")
    following = common.at_least("next")
    parser.add_argument(*["--roofline"] * following, "--roof-only", dest="roof_only", action="store_true")
    parser.add_argument(*["--roofline-device"] * following, "--device", dest="device", type=int)
    if common.at_least("10.1"):
        parser.add_argument(*["-d"] * following, "--output-directory")
        parser.add_argument("--overwrite", action="store_true")
    else:
        parser.add_argument("-p", "--path", help="in newer releases --output-directory and --overwrite")
        parser.add_argument("--kernel-names", action="store_true")
    if common.GENERATION == "7.0":
        parser.add_argument("--format-rocprof-output", choices=("json", "csv"))
    if not following:
        parser.add_argument("-d", "--dispatch", nargs="+")
    parser.add_argument("remaining", nargs=argparse.REMAINDER)


def add_analyze(modes):
    parser = modes.add_parser("analyze", prog="tool", allow_abbrev=False)
    parser.add_argument("-p", "--path", nargs="+", action="append")
    parser.add_argument("--list-stats", action="store_true")
    parser.add_argument("-d", "--dispatch", nargs="+", action="append")
    parser.add_argument("-k", "--kernel", nargs="+", type=int)
    parser.add_argument("-b", "--block", nargs="+")
    if common.at_least("10.1"):
        parser.add_argument("--output-format", choices=("stdout", "txt", "csv", "db"))


def profile(options):
    directory = pathlib.Path(os.getcwd(), "workloads", options.name or die("--name is required"), "MI300X_A1")
    if ".." in str(directory):
        die("Access denied. Cannot access parent directories in path (i.e. ../)")
    if directory.exists() and any(directory.iterdir()) and common.at_least("10.1") and not options.overwrite:
        die(f"{directory} is not empty. Use --overwrite.")
    directory.mkdir(parents=True, exist_ok=True)
    words = options.remaining[1:]
    if not words or not shutil.which(words[0]):
        die(f"Your command {' '.join(words)} doesn't point to a executable. Please verify.")
    for _ in range(1 if options.roof_only else 2):  # one run for each counter file
        if subprocess.run(" ".join(words).split()).returncode:
            die("Profiling execution failed.")
    (directory / "sysinfo.csv").write_text("workload_name,gpu_model\nx,MI300X\n")
    (directory / "log.txt").write_text("log\n")
    if common.FAIL == "no_data":
        return
    if not options.no_roof:
        (directory / "roofline.csv").write_text("device,HBMBw\n0,4000\n")
    if not options.roof_only:
        numbers = ("_0", "_1") if common.at_least("10.1") else ("",)
        for number in numbers:
            common.write_trace(directory / f"pmc_perf{number}.csv", "rocprof-compute")


def analyze(options):
    for (path,) in options.path or [[""]]:
        if not pathlib.Path(path, "sysinfo.csv").exists():
            die(f"Invalid directory {path}. Please try again.")
    if options.list_stats:
        print("Dispatch list\n 0  Cijk_Ailk_Bljk_SB  GPU 4")
    else:
        print("0. Top Stats\n" + "metric  value\n" * 50 + f"dispatch {options.dispatch}")


def main():
    if common.FAIL == "packages":
        die("The 'astunparse==1.6.2' package was not found in the current execution environment.")
    parser = argparse.ArgumentParser(prog="tool")
    modes = parser.add_subparsers(dest="mode", required=True)
    add_profile(modes)
    add_analyze(modes)
    options = parser.parse_args()
    {"profile": profile, "analyze": analyze}[options.mode](options)


if __name__ == "__main__":
    main()
