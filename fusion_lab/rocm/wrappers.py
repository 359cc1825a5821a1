"""The three ROCm profilers by name, and the command line behind their scripts."""
import sys

from fusion_lab.rocm import session
from fusion_lab.rocm.rocprof_compute import RocprofCompute
from fusion_lab.rocm.rocprof_sys import RocprofSys
from fusion_lab.rocm.rocprofv3 import Rocprofv3

WRAPPERS = {"rocprofv3": Rocprofv3, "rocprof-sys": RocprofSys, "rocprof-compute": RocprofCompute}

if __name__ == "__main__":
    if len(sys.argv) < 2 or sys.argv[1] not in WRAPPERS:
        sys.exit(f"usage: {{{','.join(WRAPPERS)}}} [options] [--] [flags of the program]")
    sys.exit(session.main(WRAPPERS[sys.argv[1]], sys.argv[2:]))
