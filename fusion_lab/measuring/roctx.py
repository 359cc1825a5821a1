"""AMD's roctx: tells rocprofv3 where the interesting part of a run begins and ends; and what AMD's profilers,
torch's own among them, do not record. Standard library only."""
import ctypes
import functools
import os

# HIP sets it where a process uses the GPU; a process that begins with it records no kernel.
INHERITED = "ROCPROFILER_REGISTER_LIBRARY"
BLIND = (f"Unset {INHERITED}, which a parent that used the GPU hands on to its children, and take torch and "
         "the profiler from one ROCm.")
GRAPHS = ("ROCm 7.0 to 7.14 lose kernels of graphs: set DEBUG_HIP_GRAPH_SEGMENT_SCHEDULING=0 (7.14), or "
          "profile with --disable-cuda-graphs, and without --torch-compile-mode reduce-overhead.")


def child_environment():
    """The environment of a process that is started here, without what would blind its profiler. HIP sets its
    variable behind Python's back: a process that is started without an environment of its own gets it."""
    return {name: value for name, value in os.environ.items() if name != INHERITED}


# First the process itself: rocprofv3 has preloaded the library that it listens to. Pip wheels of ROCm hold no
# name without a version.
NAMES = (None, "librocprofiler-sdk-roctx.so.1", "librocprofiler-sdk-roctx.so")


@functools.cache
def loaded():
    """The roctx library of rocprofiler-sdk. Raises OSError where there is none."""
    for name in NAMES:
        try:
            candidate = ctypes.CDLL(name)
            candidate.roctxProfilerPause  # noqa: B018  looked up here, or AttributeError
            return candidate
        except (OSError, AttributeError) as error:
            problem = error
    raise OSError(str(problem))


def resume():
    """An outer profiler records from here on. Raises OSError where there is no roctx."""
    loaded().roctxProfilerResume(0)


def pause():
    """An outer profiler does not record from here on. Raises OSError where there is no roctx."""
    loaded().roctxProfilerPause(0)
