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

VERSIONS = {"6.3": "3.0.0", "6.4": "3.1.0", "7.0": "3.2.3", "7.1": "3.3.0", "7.2": "3.4.0", "7.12": "3.5.0",
            "7.13": "3.6.0", "7.14": "3.7.0", "10.0": "3.8.0", "10.1": "3.9.0", "wheels": "3.7.0"}
PASSES = {"pmc_perf_0": ("SQ_WAVES",), "pmc_perf_1": ("GRBM_COUNT", "SQ_BUSY_CYCLES")}
ACCUMULATED = {"pmc_perf_SQ_IFETCH_LEVEL_ACCUM": ("SQ_IFETCH_LEVEL_ACCUM",)}  # in results of another name
RENAMED = "SQ_ACCUM_PREV_HIRES"
PINNED = "the 'numpy==1.26.4' distribution does not meet version requirements to use rocprofiler-compute."
GPUS = {"gfx1150": "7.14", "gfx1151": "7.13", "gfx1152": "7.14", "gfx1153": "10.0"}  # RDNA that is supported
ROOFLINES = {"gfx942": "6.4", "gfx1150": "10.0", "gfx1151": "10.0", "gfx1152": "10.0"}
NO_ROOFLINE = ("gfx908", "gfx1153", "gfx1250")
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
    if common.at_least("7.1"):
        parser.add_argument("--set")
    if common.at_least("7.12"):
        parser.add_argument("--iteration-multiplexing", nargs="?", choices=("kernel", "kernel_launch_params"))
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
    if common.RELEASE in ("7.12", "7.13") and os.path.basename(words[0]) in ("bash", "sh"):
        sys.stderr.write("ROCPROF_OUTPUT_PATH environment variable must be set\n")
        os.abort()


def profile(options):
    name = options.name or die("--name is required")
    check_name(name)
    name_of_gpu = common.gpu()
    rdna = name_of_gpu.startswith(("gfx10", "gfx11", "gfx12")) and name_of_gpu != "gfx1250"
    if common.FAIL == "arch" or rdna and common.below(GPUS.get(name_of_gpu, "next")):
        die("Cannot find a supported arch in rocminfo.")
    directory = pathlib.Path(os.getcwd(), "workloads", name, "MI300X_A1")
    if ".." in str(directory):
        die("Access denied. Cannot access parent directories in path (i.e. ../)")
    if directory.exists() and any(directory.iterdir()) and common.at_least("10.1") and not options.overwrite:
        die(f"{directory} is not empty. Use --overwrite.")
    words = options.remaining[1:]
    check_command(words)
    sets = {**PASSES, **(ACCUMULATED if common.at_least("7.0") else {})}
    write_lists(directory / "perfmon", sets)  # its own input
    passes = {"roofline": ()} if options.roof_only else sets
    for name, counters in passes.items():  # one run for each counter file
        if subprocess.run(" ".join(words).split()).returncode:
            die("Profiling execution failed.")
        if common.FAIL != "no_data" and not options.roof_only:
            write_pass(directory, name, counters)
    (directory / "sysinfo.csv").write_text("workload_name,gpu_model\nx,MI300X\n")
    (directory / "log.txt").write_text("log\n")
    (directory / "pmc_dispatch_info.csv").write_text("Dispatch_ID,Kernel_Name\n0,k\n")
    if not options.no_roof:
        draw_roofline(directory, name_of_gpu)
    if common.FAIL != "no_data" and not options.roof_only and common.below("7.12"):
        join_passes(directory)


def write_lists(directory, sets):
    """Lists of counters, and definitions of some; both are YAML from 7.13 on."""
    directory.mkdir(parents=True, exist_ok=True)
    for name, counters in sets.items():
        if common.at_least("7.13"):
            lines = ["jobs:", "- pmc:", *(f"  - {counter}" for counter in counters)]
            (directory / f"{name}.yaml").write_text("\n".join(lines) + "\n")
            (directory / f"counter_def_{name[9:]}.yaml").write_text("rocprofiler-sdk:\n  counters:\n  - X\n")
        else:
            (directory / f"{name}.txt").write_text(f"pmc: {' '.join(counters)}\n\ngpu:\n")


def draw_roofline(directory, name_of_gpu):
    if name_of_gpu == "gfx908":
        die("gfx908 does not support roofline analysis")
    if name_of_gpu in NO_ROOFLINE or common.below(ROOFLINES.get(name_of_gpu, "6.3")):
        print("INFO Skipping roofline")
    elif common.FAIL != "no_data":
        (directory / "roofline.csv").write_text("device,HBMBw\n0,4000\n")


def write_pass(directory, name, counters):
    """From 3.5 on a row for each dispatch and counter, in the next release a database for each pass."""
    if common.RELEASE == "7.12":
        counters = [RENAMED if counter.endswith("_ACCUM") else counter for counter in counters]
    if common.at_least("next"):
        place = directory / "out" / name / "4711"
        place.mkdir(parents=True)
        common.write_rocpd(place / "4711.db", counters=counters)
    elif common.at_least("7.12"):
        with open(directory / f"results_{name}.csv", "w", newline="") as file:
            writer = csv.writer(file)
            writer.writerow(LONG)
            for place, (kernel, start, end) in enumerate(common.dispatches(), 1):
                writer.writerows((0, place, 64, 64, kernel, start, end, 1, counter,
                                  common.counter_value(counter)) for counter in counters)


def join_passes(directory):
    """Until 3.4 one row for each dispatch; pandas 3 has no `object` columns, so nothing can be joined."""
    if common.FAIL != "pandas" or common.RELEASE == "6.3":
        generation = "rocprof-compute" if common.below("7.0") else "rocprof-compute 3.2"
        common.write_trace(directory / "pmc_perf.csv", generation)
        return
    if common.RELEASE == "6.4":
        raise AttributeError("'NoneType' object has no attribute 'columns'")
    for name in PASSES:
        print("\x1b[31mERROR\x1b[0m Error converting results: You are trying to merge on str and int64 "
              "columns for key 'Agent_Id'. If you wish to proceed you should use pd.concat\n"
              f"WARNING Cannot write results for {directory}/perfmon/{name}.txt: no counter csv files "
              "generated")


def analyze(options):
    if common.FAIL == "pins" and common.at_least("7.12"):
        die(PINNED)
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
    if common.FAIL == "pins" and common.RELEASE == "7.12":
        die(PINNED)
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
