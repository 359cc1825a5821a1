"""Strict stand-in for rocprofv3 of ROCm 6.3 (SDK 0.5), 7.0 (1.0) and 10.1 (1.3)."""
import argparse
import os
import pathlib
import sys

import common

BOOLEANS = ["--hip-trace", "--hsa-trace", "--marker-trace", "--kernel-trace", "--memory-copy-trace",
            "--memory-allocation-trace", "--scratch-memory-trace", "--rccl-trace", "--runtime-trace",
            "--sys-trace", "--stats", "--summary", "--truncate-kernels", "--mangled-kernels",
            "--kernel-rename"]


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
    if common.at_least("10.1"):
        parser.add_argument("--pmc", nargs="*", action="append", help="multiple --pmc flags: multi-pass")
    else:
        parser.add_argument("--pmc", nargs="*")
    for name in BOOLEANS + ["--selected-regions"] * modern:
        prose = "newer releases also have --selected-regions" if name == "--stats" else None
        parser.add_argument(name, action=Boolean, nargs="?", const=True, metavar="BOOL", help=prose)
    if modern:
        parser.add_argument("-v", "--version", action="store_true")
    return parser


def fatal(message):
    sys.stderr.write(f"[rocprofv3] Fatal error: {message}\n")
    sys.exit(1)


def write_results(options, pid, formats):
    directory = pathlib.Path(options.output_directory or ".")
    directory.mkdir(parents=True, exist_ok=True)
    prefix = str(directory / (options.output_file or f"host/{pid}").replace("%pid%", str(pid)))
    pathlib.Path(prefix).parent.mkdir(parents=True, exist_ok=True)
    kernels = common.KERNELS
    if getattr(options, "selected_regions", None):
        kernels = [(name, calls // 2, time) for name, calls, time in kernels]
    if "csv" in formats and common.FAIL != "rocpd_only":
        common.write_trace(f"{prefix}_kernel_trace.csv", "7.0" if common.at_least("7.0") else "6.3", kernels)
        if options.stats:
            common.write_stats(f"{prefix}_kernel_stats.csv", kernels)
        if options.pmc:
            pathlib.Path(f"{prefix}_counter_collection.csv").write_text(
                '"Kernel_Name","Counter_Name","Counter_Value"\n' + '"k, 1","SQ_WAVES",32\n' * 2)
    if "rocpd" in formats or common.FAIL == "rocpd_only":
        common.write_rocpd(f"{prefix}_results.db", kernels)
    if "pftrace" in formats:
        pathlib.Path(f"{prefix}_results.pftrace").write_bytes(b"\x0a\x02\x08\x01")


def main():
    arguments = sys.argv[1:]
    cut = arguments.index("--") if "--" in arguments else len(arguments)
    options, app = build_parser().parse_args(arguments[:cut]), arguments[cut + 1:]
    if getattr(options, "version", False):
        print("         version: 1.0.0\n    git_revision: abc\n    rocm_version: " + common.GENERATION + ".0")
        return
    traces = [name for name in BOOLEANS
              if name.endswith("-trace") and getattr(options, name[2:].replace("-", "_"))]
    if not traces and not options.pmc and options.stats:
        fatal("No tracing options were enabled for --stats option")
    if not app:
        fatal("No application provided")
    if common.FAIL == "fatal":
        fatal("librocprofiler-sdk-tool.so does not exist")
    formats = options.output_format or ["rocpd" if common.at_least("7.0") else "csv"]
    formats += os.environ.get("ROCPROF_OUTPUT_FORMAT", "").split(",")
    code, pid = common.run_child(app)
    blind = getattr(options, "selected_regions", None) and "--enable-rocm-profiling" not in app
    if common.FAIL != "no_data" and not blind and code not in (-9, -11):
        write_results(options, pid, formats)
    common.end_like(code)


if __name__ == "__main__":
    main()
