#!/usr/bin/env python3
"""What ran on the GPU, by kernel and by kind; see --help. The work: fusion_lab/rocm/kernel_summary.py."""
from fusion_lab.training import files

files.quiet(__name__)

import sys

if __name__ == "__main__":
    from fusion_lab.rocm.kernel_summary import main

    sys.exit(main())
