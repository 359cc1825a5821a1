"""Strict stand-in for rocprofv3 of ROCm 6.3 (SDK 0.5) to 10.1 (1.3), from packages and from pip wheels."""
import argparse
import os
import pathlib
import sys
import tempfile

import common

BOOLEANS = ["--hip-trace", "--hsa-trace", "--marker-trace", "--kernel-trace", "--memory-copy-trace",
            "--memory-allocation-trace", "--scratch-memory-trace", "--rccl-trace", "--runtime-trace",
            "--sys-trace", "--stats", "--summary", "--truncate-kernels", "--mangled-kernels",
            "--kernel-rename"]
MARKERS = ("--marker-trace", "--runtime-trace", "--sys-trace")
EVALUATION = "my_own_kernel(float*)"  # runs after the measured steps only


def truth(text):
    if text.lower() in ("y", "yes", "t", "true", "on", "1"):
        return True
    if text.lower() in ("n", "no", "f", "false", "off", "0"):
        return False
    raise ValueError(f"invalid truth value {text} (type=str)")


class Boolean(argparse.Action):
    """Raises a bare ValueError for `--kernel-trace python`, as the real one does without `--`."""

    def __call__(self, parser, namespace, value, option_string=None):
        setattr(namespace, self.dest, truth(value) if isinstance(value, str) else value)


def build_parser():
    modern = common.at_least("7.0")
    formats = ["csv", "json", "pftrace", "otf2"] + ["rocpd"] * modern
    parser = argparse.ArgumentParser(prog="rocprofv3", allow_abbrev=not modern)
    parser.add_argument(*["-f"] * modern, "--output-format", nargs="+", choices=formats, type=str.lower)
    parser.add_argument("-d", "--output-directory", default=os.environ.get("ROCPROF_OUTPUT_PATH"))
    parser.add_argument("-o", "--output-file", default=os.environ.get("ROCPROF_OUTPUT_FILE_NAME"))
    if common.at_least("7.12"):
        parser.add_argument("--pmc", nargs="*", action="append", help="multiple --pmc flags: multi-pass")
    else:
        parser.add_argument("--pmc", nargs="*")
    graphs = ["--hip-graph-trace"] * common.at_least("10.0")
    parser.add_argument("--collection-period", nargs="+")
    for name in BOOLEANS + ["--selected-regions"] * modern + graphs:
        prose = "newer releases also have --selected-regions" if name == "--stats" else None
        parser.add_argument(name, action=Boolean, nargs="?", const=True, metavar="BOOL", help=prose)
    if modern:
        parser.add_argument("-v", "--version", action="store_true")
    return parser


def fatal(message):
    sys.stderr.write(f"[rocprofv3] Fatal error: {message}\n")
    sys.exit(1)


def traced(options, *names):
    return any(getattr(options, name[2:].replace("-", "_")) for name in names)


def recorded_kernels(options, calls):
    """What is recorded, given the program's calls of roctxProfilerResume and Pause."""
    markers = traced(options, *MARKERS)
    if getattr(options, "selected_regions", None):
        heard = markers or common.at_least("7.13")  # before, the calls are listened to with markers only
        listed = heard and "resume" in calls
        return [(name, count // 2, time) for name, count, time in common.KERNELS] if listed else []
    if markers and calls[-1:] == ["pause"]:
        return [kernel for kernel in common.KERNELS if kernel[0] != EVALUATION]
    return common.KERNELS


def write_results(options, pid, formats, kernels, folder=""):
    directory = pathlib.Path(options.output_directory or ".", folder)
    directory.mkdir(parents=True, exist_ok=True)
    prefix = str(directory / (options.output_file or f"host/{pid}").replace("%pid%", str(pid)))
    pathlib.Path(prefix).parent.mkdir(parents=True, exist_ok=True)
    if "csv" in formats:
        common.write_trace(f"{prefix}_kernel_trace.csv", "7.0" if common.at_least("7.0") else "6.3", kernels)
        if options.stats:
            common.write_stats(f"{prefix}_kernel_stats.csv", kernels)
        write_counters(options, prefix, kernels)
        if traced(options, "--hip-trace", "--runtime-trace", "--sys-trace"):
            common.write_api_traces(prefix, kernels, traced(options, *MARKERS))
    if "rocpd" in formats:
        if known_counters(options) and counted_kernels(kernels) != kernels:  # counters of unknown dispatches
            sys.stderr.write("terminate called after throwing an instance of 'std::out_of_range'\n")
            common.end_like(-6)
        hip = traced(options, "--hip-trace", "--runtime-trace", "--sys-trace")
        common.write_rocpd(f"{prefix}_results.db", kernels, known_counters(options), calls=hip,
                           markers=hip and traced(options, *MARKERS), graphs=common.at_least("10.0"))
    if "pftrace" in formats:
        pathlib.Path(f"{prefix}_results.pftrace").write_bytes(b"\x0a\x02\x08\x01")


def known_counters(options):
    """An unknown counter is a warning and no more."""
    known = [name for name in options.pmc if name in common.COUNTERS]
    for name in set(options.pmc) - set(known):
        sys.stderr.write(f"W20260131 12:00:00.000000 7 tool.cpp:700] Unable to find counter {name}\n")
    return known


def counted_kernels(kernels):
    """7.0 to 7.12 count the whole run, whatever is selected or paused."""
    return common.KERNELS if common.at_least("7.0") and common.below("7.13") else kernels


def write_counters(options, prefix, kernels):
    if known_counters(options):
        common.write_counters(f"{prefix}_counter_collection.csv", known_counters(options),
                              counted_kernels(kernels))


def break_down():
    """Traps that end the tool before or in place of the program."""
    if common.FAIL == "fatal":
        fatal("librocprofiler-sdk-tool.so does not exist")
    if common.FAIL == "crash":
        sys.stderr.write(f'Traceback (most recent call last):\n  File "{sys.argv[0]}", line 1501, in main\n'
                         "KeyError: 'ROCPROF_OUTPUT'\n")
        sys.exit(1)


def main():
    arguments = sys.argv[1:]
    cut = arguments.index("--") if "--" in arguments else len(arguments)
    options, app = build_parser().parse_args(arguments[:cut]), arguments[cut + 1:]
    if getattr(options, "version", False):
        release = "7.14" if common.WHEELS else common.RELEASE.replace("next", "10.2")
        print(f"         version: 1.0.0\n    git_revision: abc\n    rocm_version: {release}.0")
        return
    traces = [name for name in BOOLEANS if name.endswith("-trace") and traced(options, name)]
    if not traces and not options.pmc and options.stats:
        fatal("No tracing options were enabled for --stats option")
    if not app:
        fatal("No application provided")
    break_down()
    passes = options.pmc if common.at_least("7.12") and options.pmc else [options.pmc or []]
    if max(map(len, passes)) > 4:
        sys.stderr.write("F20260131 12:00:00.000000 7 tool.cpp:1036] Request exceeds the capabilities of the "
                         "hardware to collect :: SQ_WAVES\n")
        common.end_like(-6)
    formats = options.output_format or ["rocpd" if common.at_least("7.0") else "csv"]
    formats += os.environ.get("ROCPROF_OUTPUT_FORMAT", "").split(",")
    if common.at_least("10.0") and traced(options, "--runtime-trace", "--sys-trace"):
        formats.append("rocpd")  # OpenMP is in both of them, and is written there only
    for number, options.pmc in enumerate(passes, 1):
        folder = f"pass_{number}" if passes[1:] else ""
        code = run_once(options, app, formats, folder)
        if code and folder:
            fatal(f"Command '{app}' returned non-zero exit status {code}.")
    common.end_like(code)


def run_once(options, app, formats, folder):
    """A run of the program, and what is written of it."""
    libraries = "librocprofiler-sdk-roctx.so.1" + " librocprofiler-sdk-roctx.so" * (not common.WHEELS)
    preloaded = " process" * traced(options, *MARKERS)
    with tempfile.TemporaryDirectory() as place:
        log = pathlib.Path(place, "calls")
        log.touch()
        code, pid = common.run_child(app, FAKE_ROCTX=libraries + preloaded, FAKE_ROCTX_LOG=str(log),
                                     FAKE_ROCTX_STRICT="1" * common.below("7.13"))
        kernels = recorded_kernels(options, log.read_text().split())
    if common.FAIL != "no_data" and kernels and code not in (-9, -11):
        write_results(options, pid, formats, kernels, folder)
    return code


if __name__ == "__main__":
    main()
