"""roctx, by which a program tells the outer profiler when to record: from wherever it can be loaded."""

import pytest

from fusion_lab.measuring import roctx


class Loader:
    """ctypes.CDLL of a machine on which some names can be loaded; its libraries note what is called."""
    calls = []

    def __init__(self, *names):
        self.names = names

    def __call__(self, name):
        if name not in self.names and name is not None:
            raise OSError(f"{name}: cannot open shared object file")
        library = type("Library", (), {})()
        if name in self.names:
            library.roctxProfilerResume = lambda thread: self.calls.append((name, "resume", thread))
            library.roctxProfilerPause = lambda thread: self.calls.append((name, "pause", thread))
        return library


@pytest.mark.parametrize("names, used", [
    ((None, "librocprofiler-sdk-roctx.so.1", "librocprofiler-sdk-roctx.so"), None),
    (("librocprofiler-sdk-roctx.so.1",), "librocprofiler-sdk-roctx.so.1"),
    (("librocprofiler-sdk-roctx.so",), "librocprofiler-sdk-roctx.so"),
], ids=["preloaded", "wheels", "packages"])
def test_roctx_of_the_process_itself_comes_first(names, used, monkeypatch):
    monkeypatch.setattr("ctypes.CDLL", Loader(*names))
    monkeypatch.setattr(Loader, "calls", [])
    roctx.loaded.cache_clear()
    roctx.resume()
    roctx.pause()
    roctx.loaded.cache_clear()
    assert Loader.calls == [(used, "resume", 0), (used, "pause", 0)]


def test_children_do_not_inherit_what_blinds_their_profiler(monkeypatch):
    monkeypatch.setenv(roctx.INHERITED, "/opt/rocm/lib/librocprofiler-sdk.so")
    monkeypatch.setenv("KEPT", "1")
    environment = roctx.child_environment()
    assert roctx.INHERITED not in environment and environment["KEPT"] == "1"


def test_no_roctx_is_an_error_that_names_it(monkeypatch):
    monkeypatch.setattr("ctypes.CDLL", Loader())
    roctx.loaded.cache_clear()
    with pytest.raises(OSError, match="librocprofiler-sdk-roctx.so"):
        roctx.resume()
