#!/usr/bin/env python3
"""What ran on the GPU, by kernel and by kind; see --help. The work: fusion_lab/rocm/kernel_summary.py."""
import sys

from fusion_lab.training.files import quiet_interrupts

if __name__ == "__main__":
    quiet_interrupts()
    from fusion_lab.rocm.kernel_summary import main

    sys.exit(main())
