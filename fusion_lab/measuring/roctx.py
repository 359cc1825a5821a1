"""AMD's roctx: tells rocprofv3 where the interesting part of a run begins and ends. Standard library only."""
import ctypes
import functools

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
