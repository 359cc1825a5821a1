"""Runs a module of this project from any directory: start.py MODULE [arguments].

A file that is run has its own folder first on Python's path, where folders such as `study` would hide other
people's modules; here the project's root comes first instead, and the directory of the user never does.
"""
import os
import sys

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path[:] = [os.path.dirname(HERE), *(place for place in sys.path if os.path.abspath(place or ".") != HERE)]

from fusion_lab.training import interrupts  # noqa: E402  only now, with the path in order

interrupts.quiet(__name__)

import runpy  # noqa: E402

del sys.argv[0]
runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
