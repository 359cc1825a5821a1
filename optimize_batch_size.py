#!/usr/bin/env python3
"""Which batch size? See --help. The work: fusion_lab/measuring/batch_size.py."""
import os
import sys

sys.path.append(os.path.dirname(os.path.abspath(__file__)))  # which `python -I` leaves out
from fusion_lab.training import errors

errors.begin(__name__, "torch", "numpy", "tqdm")

if __name__ == "__main__":
    from fusion_lab.measuring.batch_size import main

    sys.exit(main())
