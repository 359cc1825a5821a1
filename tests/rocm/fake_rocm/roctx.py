"""Stand-in for librocprofiler-sdk-roctx, as far as the trainer's stand-in can load it.

The profiler's stand-in says in FAKE_ROCTX which names the loader finds ("process": preloaded), in
FAKE_ROCTX_LOG where calls are noted, and in FAKE_ROCTX_STRICT that a second pause in a row aborts.
"""
import ctypes
import os


class Library:
    def __init__(self, name):
        if (name or "process") not in os.environ.get("FAKE_ROCTX", "").split():
            if name is None:
                return  # the process itself can always be opened, but has no such symbol
            raise OSError(f"{name}: cannot open shared object file: No such file or directory")
        self.roctxProfilerResume = lambda thread: note("resume")
        self.roctxProfilerPause = lambda thread: note("pause")


def note(word):
    with open(os.environ["FAKE_ROCTX_LOG"], "a+") as log:
        log.seek(0)
        if os.environ.get("FAKE_ROCTX_STRICT") and word == "pause" and log.read().endswith("pause\n"):
            os.abort()
        log.write(word + "\n")


def install():
    ctypes.CDLL = Library
