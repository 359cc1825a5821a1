#!/usr/bin/env python3
"""Speed and memory of fusion settings over sizes; see --help. The work: fusion_lab/study/command.py."""
from fusion_lab.training import files

files.quiet(__name__)

import runpy

if __name__ == "__main__":
    runpy.run_module("fusion_lab.study.command", run_name="__main__", alter_sys=True)
