#!/usr/bin/env python3
"""AMD's profilers, as run_rocprofv3.sh, run_rocprof_sys.sh, run_rocprof_compute.sh and run_all_profilers.sh
start them. The work is in fusion_lab/rocm."""
import os
import sys

sys.path.append(os.path.dirname(os.path.abspath(__file__)))  # which `python -I` leaves out
from fusion_lab.training import errors

errors.begin(__name__)

if __name__ == "__main__":
    from fusion_lab.rocm.all_profilers import main

    sys.exit(main(sys.argv[1:]))
