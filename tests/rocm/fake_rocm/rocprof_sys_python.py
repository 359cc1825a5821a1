"""Strict stand-in for rocprof-sys-python: runs the script in-process and returns 0 whatever becomes of it."""
import argparse
import os
import pathlib
import runpy
import sys
import traceback

import common


def build_parser():
    parser = argparse.ArgumentParser(prog="rocprofsys", allow_abbrev=not common.at_least("10.1"))
    parser.add_argument("-v", "--verbosity", type=int)
    parser.add_argument("-b", "--builtin", action="store_true")
    parser.add_argument("-c", "--config", metavar="FILE")
    parser.add_argument("-s", "--setup", metavar="FILE")
    parser.add_argument("--label", nargs="*", choices=("args", "file", "line"))
    for letter, name in (("-F", "--full-filepath"), ("-a", "--annotate-trace"), (None, "--trace-c")):
        parser.add_argument(*filter(None, (letter, name)), nargs="?", const=True, metavar="BOOL")
    for letter in "IER":
        words = {"I": "include", "E": "exclude", "R": "restrict"}
        parser.add_argument(f"-{letter}", f"--function-{words[letter]}", nargs="+", metavar="FUNC")
        parser.add_argument(f"-M{letter}", f"--module-{words[letter]}", nargs="+", metavar="FILE")
    return parser


def setting(name, default):
    return os.environ.get(f"ROCPROFSYS_{name}", default).lower() in ("on", "true", "1", "yes")


def write_results():
    newest = common.at_least("10.1")  # rocpd became the default, Perfetto and text have to be asked for
    rocpd = setting("USE_ROCPD", "on" if newest else "off") and common.at_least("7.1")
    if rocpd and common.RELEASE == "7.1":
        common.end_like(-11)
    trace = setting("TRACE", "off" if newest or "ROCPROFSYS_PROFILE" in os.environ else "on")
    profile = setting("PROFILE", "off" if newest or trace else "on")
    directory = pathlib.Path(os.environ.get("ROCPROFSYS_OUTPUT_PATH", "rocprofsys-trainer-output"))
    if setting("TIME_OUTPUT", "on"):
        directory /= "2026-01-31_12.00"
    directory.mkdir(parents=True, exist_ok=True)
    pid = os.getpid()
    (directory / f"metadata-{pid}.json").write_text("{}")
    (directory / f"functions-{pid}.json").write_text("{}")
    if trace:
        # Until 7.1 torch's own GPU libraries are found with the help of the environment only.
        gpu = common.at_least("7.2") or "torch/lib" in os.environ.get("LD_LIBRARY_PATH", "")
        content = b"\x0a\x02\x08\x01" * 64 + b"rocm_kernel_dispatch" * gpu
        (directory / f"perfetto-trace-{pid}.proto").write_bytes(content)
    if profile:
        for name in os.environ.get("ROCPROFSYS_TIMEMORY_COMPONENTS", "wall_clock").split():
            (directory / f"{name}-{pid}.txt").write_text("|0>>> main | 1 | 0 | wall_clock | sec | 0.98 |\n")
            (directory / f"{name}-{pid}.json").write_text('{"timemory": {}}')
    if rocpd:
        common.write_rocpd(directory / f"rocpd-{pid}.db")
    print(f"[rocprofsys][{pid}] Outputting results to '{directory}'")


def main():
    if common.FAIL == "crash":
        raise RuntimeError("rocprofsys could not be initialised")
    if common.FAIL == "bindings":
        sys.stderr.write("Traceback (most recent call last):\n"
                         "ModuleNotFoundError: No module named 'rocprofsys.libpyrocprofsys'\n")
        sys.exit(1)
    arguments = sys.argv[1:]
    cut = arguments.index("--") if "--" in arguments else len(arguments)
    build_parser().parse_args(arguments[:cut])
    argv = arguments[cut + 1:]
    if not argv:
        raise RuntimeError("Could not determine input script. Use '--' before the script and its arguments")
    if not os.path.isfile(argv[0]):
        sys.stderr.write(f"Could not find script {argv[0]}\n")
        sys.exit(1)
    print(f"[rocprofsys]> profiling: {argv}", flush=True)
    sys.argv = argv
    try:
        try:
            runpy.run_path(argv[0], run_name="__main__")
        except (KeyboardInterrupt, SystemExit):
            pass
    except Exception as error:
        traceback.print_exc()
        print(f"Exception - {error}")
    if common.FAIL != "no_data":
        write_results()


if __name__ == "__main__":
    main()
