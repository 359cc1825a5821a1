"""The console commands of the installed package. Each runs its program's file as a script: flags are judged
before torch is imported, and Ctrl-C is one line, as if Python had been given the file."""
import os
import runpy

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))


def run(file):
    """Run a file of the project as __main__."""
    runpy.run_path(os.path.join(ROOT, file), run_name="__main__")


def trainer():
    run("tiny_openfold_v2.py")


def profile():
    run("run_pytorch_profiler.py")


def study():
    run("launch_performance_study.py")
