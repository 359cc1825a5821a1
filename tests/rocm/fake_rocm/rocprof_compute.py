"""Strict stand-in for rocprof-compute 3.0 (ROCm 6.3) to 3.9 (10.1) and what is announced next."""
import argparse
import csv
import locale
import os
import pathlib
import re
import shutil
import subprocess
import sys

import common

VERSIONS = {"6.3": "3.0.0", "6.4": "3.1.0", "7.0": "3.2.3", "7.1": "3.3.0", "7.2": "3.4.0", "7.13": "3.6.0",
            "10.1": "3.9.0"}
PASSES = {"pmc_perf_0": ("SQ_WAVES",), "pmc_perf_1": ("GRBM_COUNT", "SQ_BUSY_CYCLES")}
LONG = ("GPU_ID", "Dispatch_ID", "Grid_Size", "Workgroup_Size", "Kernel_Name", "Start_Timestamp",
        "End_Timestamp", "Kernel_ID", "Counter_Name", "Counter_Value")


def die(message):
    """Its errors are coloured, whatever they are written to."""
    print(f"\x1b[31mERROR\x1b[0m {message}")
    sys.exit(1)


def add_profile(modes):
    parser = modes.add_parser("profile", prog="tool", allow_abbrev=False)
    parser.add_argument("-v", "--version", action="version",
                        version=f"rocprof-compute version: {VERSIONS.get(common.RELEASE, '3.10.0')}")
    parser.add_argument("-n", "--name")
    parser.add_argument("-k", "--kernel", nargs="+")
    parser.add_argument("-b", "--block", nargs="+")
    parser.add_argument("--no-roof", action="store_true")
    parser.add_argument("--roofline-data-type", nargs="+", help="types to plot")
    following = common.at_least("next")
    parser.add_argument(*["--roofline"] * following, "--roof-only", dest="roof_only", action="store_true")
    parser.add_argument(*["--roofline-device"] * following, "--device", dest="device", type=int)
    if common.at_least("7.13"):
        parser.add_argument(*["-d"] * following, "--output-directory")
    if common.at_least("10.1"):
        parser.add_argument("--overwrite", action="store_true")
    else:
        parser.add_argument("-p", "--path", help="in newer releases --output-directory and --overwrite")
    if common.below("7.2"):
        parser.add_argument("--kernel-names", action="store_true")
    if common.at_least("7.0") and common.below("10.1"):
        parser.add_argument("--format-rocprof-output", choices=("json", "csv", "rocpd"))
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
    if common.at_least("7.1"):
        parser.add_argument("--output-format", choices=("stdout", "txt", "csv", "db"))


def check_name(name):
    if common.below("7.0") and not re.fullmatch(r"\w{1,35}", name):
        die(f"{name}: letters, digits and _ only, at most 35 of them")


def check_command(words):
    """3.0 wants a path, later ones a program; 3.5 and 3.6 set variables that a shell does not hand on."""
    known = os.path.isfile if common.below("6.4") else shutil.which
    if not words or not known(words[0]):
        die(f"Your command {' '.join(words)} doesn't point to a executable. Please verify.")
    if common.RELEASE == "7.13" and os.path.basename(words[0]) in ("bash", "sh"):
        sys.stderr.write("ROCPROF_OUTPUT_PATH environment variable must be set\n")
        os.abort()


def profile(options):
    name = options.name or die("--name is required")
    check_name(name)
    if common.FAIL == "arch":
        die("Cannot find a supported arch in rocminfo.")
    directory = pathlib.Path(os.getcwd(), "workloads", name, "MI300X_A1")
    if ".." in str(directory):
        die("Access denied. Cannot access parent directories in path (i.e. ../)")
    if directory.exists() and any(directory.iterdir()) and common.at_least("10.1") and not options.overwrite:
        die(f"{directory} is not empty. Use --overwrite.")
    words = options.remaining[1:]
    check_command(words)
    (directory / "perfmon").mkdir(parents=True, exist_ok=True)
    (directory / "perfmon" / "SQ_IFETCH_LEVEL.txt").write_text("pmc: SQ_WAVES\n")
    for name, counters in PASSES.items():  # its own input
        (directory / "perfmon" / f"{name}.txt").write_text(f"pmc: {' '.join(counters)}\n\ngpu:\n")
    passes = {"roofline": ()} if options.roof_only else PASSES
    for name, counters in passes.items():  # one run for each counter file
        if subprocess.run(" ".join(words).split()).returncode:
            die("Profiling execution failed.")
        if common.FAIL != "no_data" and not options.roof_only:
            write_pass(directory, name, counters)
    (directory / "sysinfo.csv").write_text("workload_name,gpu_model\nx,MI300X\n")
    (directory / "log.txt").write_text("log\n")
    if common.FAIL != "no_data" and not options.no_roof:
        (directory / "roofline.csv").write_text("device,HBMBw\n0,4000\n")
    if common.FAIL != "no_data" and not options.roof_only and common.below("7.13"):
        join_passes(directory)


def write_pass(directory, name, counters):
    """From 3.5 on a row for each dispatch and counter, in the next release a database for each pass."""
    if common.at_least("next"):
        place = directory / "out" / name / "4711"
        place.mkdir(parents=True)
        common.write_rocpd(place / "4711.db", counters=counters)
    elif common.at_least("7.13"):
        with open(directory / f"results_{name}.csv", "w", newline="") as file:
            writer = csv.writer(file)
            writer.writerow(LONG)
            for place, (kernel, start, end) in enumerate(common.dispatches(), 1):
                writer.writerows((0, place, 64, 64, kernel, start, end, 1, counter,
                                  common.counter_value(counter)) for counter in counters)


def join_passes(directory):
    """Until 3.4 one row for each dispatch; pandas 3 has no `object` columns, so nothing can be joined."""
    if common.FAIL != "pandas" or common.RELEASE == "6.3":
        common.write_trace(directory / "pmc_perf.csv", "rocprof-compute")
        return
    if common.RELEASE == "6.4":
        raise AttributeError("'NoneType' object has no attribute 'columns'")
    for name in PASSES:
        print("\x1b[31mERROR\x1b[0m Error converting results: You are trying to merge on str and int64 "
              "columns for key 'Agent_Id'. If you wish to proceed you should use pd.concat\n"
              f"WARNING Cannot write results for {directory}/perfmon/{name}.txt: no counter csv files "
              "generated")


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
    if common.FAIL == "locale" and common.below("6.4"):
        raise locale.Error("unsupported locale setting")
    if common.FAIL == "crash":
        raise KeyError("gpu_model")
    parser = argparse.ArgumentParser(prog="tool")
    modes = parser.add_subparsers(dest="mode", required=True)
    add_profile(modes)
    add_analyze(modes)
    options = parser.parse_args()
    {"profile": profile, "analyze": analyze}[options.mode](options)


if __name__ == "__main__":
    main()
