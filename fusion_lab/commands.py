"""The console commands of the installed package. Each runs a module as a script: its flags are judged before
torch is imported, and Ctrl-C is one line, as if Python had been given the file."""
import functools
import os
import runpy
import sys

COMMANDS = {  # {command: (the file that starts the same in a clone, the module)}
    "tinyopenfold": ("tiny_openfold_v2.py", "tiny_openfold_v2"),
    "tinyopenfold-profile": ("run_pytorch_profiler.py", "fusion_lab.profiler.command"),
    "tinyopenfold-study": ("launch_performance_study.py", "fusion_lab.study.command")}
TYPED = {}  # {file: the command that the user typed for it}


def run(command):
    """Run the program of a command, under whatever name it was installed or linked."""
    file, module = COMMANDS[command]
    TYPED[file] = os.path.basename(sys.argv[0])
    runpy.run_module(module, run_name="__main__")


trainer, profile, study = (functools.partial(run, command) for command in COMMANDS)


def name(file):
    """What a program calls itself in its help and errors: what the user typed, command or file."""
    file = os.path.basename(file)
    return TYPED.get(file, file)
