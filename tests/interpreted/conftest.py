"""Tests of this directory run Triton kernels in its interpreter, on the CPU: test_kernels.py starts them."""
import os
import pathlib
import sys

os.environ["TRITON_INTERPRET"] = "1"  # which kernels ask for when they are defined
sys.path[:0] = [str(pathlib.Path(__file__).resolve().parents[level]) for level in (2, 1)]

import triton_targets  # noqa: E402

triton_targets.mend_interpreter()
