"""Runs a module of this project from any directory: start.py MODULE [arguments].

A file that is run has its own folder first on Python's path, where its neighbours (statistics.py, say) would
hide modules of the standard library; here the project's root comes first instead.
"""
import os
import runpy
import sys

sys.path[0] = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
del sys.argv[0]
runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
