#!/usr/bin/env python3
"""One PyTorch profiler session; see --help. The work: fusion_lab/profiler/command.py."""
import os
import runpy
import sys

sys.path.append(os.path.dirname(os.path.abspath(__file__)))  # which `python -I` leaves out

if __name__ == "__main__":
    runpy.run_module("fusion_lab.profiler.command", run_name="__main__")
