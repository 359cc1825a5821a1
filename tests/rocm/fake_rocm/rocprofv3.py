"""Strict stand-in for rocprofv3 of ROCm 6.3 (SDK 0.5), 7.0 (1.0) and 10.1 (1.3)."""
import argparse
import os
import pathlib
import sys
import tempfile

import common

BOOLEANS = ["--hip-trace", "--marker-trace", "--kernel-trace", "--memory-copy-trace", "--runtime-trace",
            "--memory-allocation-trace", "--sys-trace", "--stats", "--kernel-rename"]
MARKERS = ("--marker-trace", "--runtime-trace", "--sys-trace")
EVALUATION = "my_own_kernel(float*)"  # runs after the measured steps only


def build_parser():
    formats = ["csv", "json", "pftrace", "otf2"] + ["rocpd"] * (not common.OLD)
    parser = argparse.ArgumentParser(prog="rocprofv3", allow_abbrev=common.OLD)
    parser.add_argument("--output-format", nargs="+", choices=formats)
    parser.add_argument("-d", "--output-directory", default=os.environ.get("ROCPROF_OUTPUT_PATH"))
    parser.add_argument("-o", "--output-file", default=os.environ.get("ROCPROF_OUTPUT_FILE_NAME"))
    parser.add_argument("--pmc", nargs="*", action="append" if common.NEW else "store")
    for name in BOOLEANS + ["--selected-regions"] * (not common.OLD):
        parser.add_argument(name, nargs="?", const=True, metavar="BOOL")
    return parser


def fatal(message):
    sys.exit(f"[rocprofv3] Fatal error: {message}")


def traced(options, *names):
    return any(getattr(options, name[2:].replace("-", "_"), None) for name in names)


def recorded_kernels(options, calls):
    """What is recorded, given the program's calls of roctxProfilerResume and Pause."""
    markers = traced(options, *MARKERS)
    if traced(options, "--selected-regions"):  # 7.0 to 7.2 hear the calls with markers only
        heard = (markers or common.NEW) and "resume" in calls
        return [(name, count // 2, time) for name, count, time in common.KERNELS] if heard else []
    if markers and calls[-1:] == ["pause"]:
        return [kernel for kernel in common.KERNELS if kernel[0] != EVALUATION]
    return common.KERNELS


def write_results(options, pid, formats, kernels, folder):
    directory = pathlib.Path(options.output_directory or ".", folder)
    directory.mkdir(parents=True, exist_ok=True)
    prefix = str(directory / (options.output_file or f"host_{pid}").replace("%pid%", str(pid)))
    known = [name for name in options.pmc if name in common.COUNTERS]
    for name in set(options.pmc) - set(known):  # a warning and no more
        sys.stderr.write(f"W20260131 12:00:00.000000 7 tool.cpp:700] Unable to find counter {name}\n")
    if "csv" in formats:
        common.write_trace(f"{prefix}_kernel_trace.csv", kernels=kernels)
        if options.stats:
            common.write_stats(f"{prefix}_kernel_stats.csv", kernels)
        if known:  # 7.0 to 7.12 count the whole run, whatever is selected or paused
            counted = common.KERNELS if common.RELEASE == "7.0" else kernels
            common.write_counters(f"{prefix}_counter_collection.csv", known, counted)
    if "rocpd" in formats:
        common.write_rocpd(f"{prefix}_results.db", kernels, known)
    if "pftrace" in formats:
        pathlib.Path(f"{prefix}_results.pftrace").write_bytes(b"\x0a\x02\x08\x01")


def run_once(options, app, formats, folder):
    """A run of the program, and what is written of it. Wheels of 10.1 have roctx as .so.1 only."""
    libraries = "librocprofiler-sdk-roctx.so.1" + " librocprofiler-sdk-roctx.so" * (not common.NEW)
    preloaded = " process" * traced(options, *MARKERS)
    with tempfile.NamedTemporaryFile("r") as log:
        code, pid = common.run_child(app, FAKE_ROCTX=libraries + preloaded, FAKE_ROCTX_LOG=log.name)
        kernels = recorded_kernels(options, log.read().split())
    if common.FAIL != "no_data" and kernels and code not in (-9, -11):
        write_results(options, pid, formats, kernels, folder)
    return code


def main():
    arguments = sys.argv[1:]
    cut = arguments.index("--") if "--" in arguments else len(arguments)
    options, app = build_parser().parse_args(arguments[:cut]), arguments[cut + 1:]
    if options.stats and not options.kernel_trace or not app or common.FAIL == "fatal":
        fatal("no tracing options, no application, or librocprofiler-sdk-tool.so does not exist")
    if common.FAIL == "crash":
        sys.exit(f'Traceback (most recent call last):\n  File "{sys.argv[0]}", line 1, in main\nKeyError: 1')
    passes = options.pmc if common.NEW and options.pmc else [options.pmc or []]
    if max(map(len, passes)) > 4:
        sys.stderr.write("F20260131 12:00:00.000000 7 tool.cpp:1036] Request exceeds the capabilities of the "
                         "hardware to collect :: SQ_WAVES\n")
        common.end_like(-6)
    formats = options.output_format or ["csv" if common.OLD else "rocpd"]
    formats += os.environ.get("ROCPROF_OUTPUT_FORMAT", "").split(",")
    if common.NEW and traced(options, "--runtime-trace", "--sys-trace"):
        formats.append("rocpd")  # OpenMP is in both of them, and is written there only
    for number, options.pmc in enumerate(passes, 1):
        folder = f"pass_{number}" if passes[1:] else ""
        code = run_once(options, app, formats, folder)
        if code and folder:
            fatal(f"Command '{app}' returned non-zero exit status {code}.")
    common.end_like(code)


if __name__ == "__main__":
    main()
