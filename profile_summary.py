#!/usr/bin/env python3
"""What ran on the GPU, by kernel and by kind; see --help. The work: fusion_lab/rocm/kernel_summary.py."""
import os
import sys

sys.path.append(os.path.dirname(os.path.abspath(__file__)))  # which `python -I` leaves out
from fusion_lab.training import errors

errors.begin(__name__)

if __name__ == "__main__":
    from fusion_lab.rocm.kernel_summary import main

    sys.exit(main())
