"""Where Linux's own interfaces are missing, as on a Mac. Nothing here ran on a Mac."""
from tests.support import run_program

# sitecustomize.py, which every Python that is started runs first
LIKE_A_MAC = '''
import builtins, ctypes, io, os, sys
import sysconfig, urllib.request, uuid  # these look for modules of macOS's own Python
sysconfig.get_config_vars()
sys.platform = "darwin"
sys.modules["triton"] = None
del os.sched_getaffinity

def absent(path):
    return isinstance(path, (str, bytes)) and os.fsdecode(path).startswith(("/proc", "/sys/fs"))

def without(function, missing):
    def call(path, *rest, **named):
        return missing(path) if absent(path) else function(path, *rest, **named)
    return call

def refuse(path):
    raise FileNotFoundError(2, "No such file or directory", path)

builtins.open = io.open = without(open, refuse)
os.open, os.readlink, os.stat = (without(f, refuse) for f in (os.open, os.readlink, os.stat))
os.path.exists = without(os.path.exists, lambda path: False)

class Library(ctypes.CDLL):
    def __getattr__(self, name):
        if name in ("prctl", "mallopt"):
            raise AttributeError(name)
        return super().__getattr__(name)

ctypes.CDLL = Library
'''


def run_like_a_mac(directory, *flags):
    (directory / "sitecustomize.py").write_text(LIKE_A_MAC)
    found = run_program("tiny_openfold_v2.py", *flags, cwd=directory, env=dict(PYTHONPATH=str(directory)))
    assert "Traceback" not in found.stderr, found.stderr
    return found


def test_it_starts_without_what_linux_has(tmp_path):
    assert run_like_a_mac(tmp_path, "--help").returncode == 0
    found = run_like_a_mac(tmp_path, "--batchsize", "3")
    assert found.returncode == 2 and "--batchsize" in found.stderr
