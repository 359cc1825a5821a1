"""Strict stand-in for rocprof-sys-python: runs the script in-process and returns 0 whatever becomes of it."""
import argparse
import os
import pathlib
import runpy
import sys
import traceback

import common


def setting(name, default):
    return os.environ.get(f"ROCPROFSYS_{name}", default).lower() in ("on", "true", "1", "yes")


def write_results():
    """10.1 made rocpd the default: Perfetto and text have to be asked for. 7.0 knows no rocpd."""
    trace = setting("TRACE", "off" if common.NEW or "ROCPROFSYS_PROFILE" in os.environ else "on")
    profile = setting("PROFILE", "off" if common.NEW or trace else "on")
    directory = pathlib.Path(os.environ.get("ROCPROFSYS_OUTPUT_PATH", "rocprofsys-trainer-output"))
    if setting("TIME_OUTPUT", "on"):
        directory /= "2026-01-31_12.00"
    directory.mkdir(parents=True, exist_ok=True)
    prefix, pid = os.environ.get("ROCPROFSYS_OUTPUT_PREFIX", ""), os.getpid()
    (directory / f"{prefix}metadata-{pid}.json").write_text("{}")
    if trace:
        seen = b"rocm_kernel_dispatch" * ("torch" in os.environ.get("LD_LIBRARY_PATH", "") or common.NEW)
        (directory / f"{prefix}perfetto-trace-{pid}.proto").write_bytes(b"\x0a\x02" + seen)
    if profile:
        for component in os.environ.get("ROCPROFSYS_TIMEMORY_COMPONENTS", "wall_clock").split():
            for ending in ("txt", "json"):
                (directory / f"{prefix}{component}-{pid}.{ending}").write_text("{}")
    if setting("USE_ROCPD", "on") and common.NEW:
        common.write_rocpd(directory / f"{prefix}rocpd-{pid}.db")


def main():
    if common.FAIL == "crash":
        raise RuntimeError("rocprofsys could not be initialised")
    arguments = sys.argv[1:]
    cut = arguments.index("--") if "--" in arguments else len(arguments)
    parser = argparse.ArgumentParser(prog="rocprofsys", allow_abbrev=not common.NEW)
    for name in ("--module-restrict", "--function-exclude"):
        parser.add_argument(name, nargs="+")
    parser.parse_args(arguments[:cut])
    sys.argv = arguments[cut + 1:]
    if not os.path.isfile(sys.argv[0]):
        sys.exit(f"Could not find script {sys.argv[0]}")
    try:
        try:
            runpy.run_path(sys.argv[0], run_name="__main__")
        except (KeyboardInterrupt, SystemExit):
            pass
    except Exception as error:
        traceback.print_exc()
        print(f"Exception - {error}")
    if common.FAIL != "no_data":
        write_results()


if __name__ == "__main__":
    main()
