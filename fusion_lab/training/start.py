"""The first tenth of a second of a program, before torch is imported, which takes seconds: wrong flags and
missing packages are told at once, Ctrl-C ends without a traceback, and there is a sign of life."""
import os
import sys

from fusion_lab.training import interrupts, torchrun
from fusion_lab.training.files import UserError, announce, require_packages, say_why
from fusion_lab.training.flags import QUESTION, make_parser, parse, program_file, with_demo
from fusion_lab.training.program import DEFAULT_PROGRAM, load_program

# OpenMP's threads spin while they wait for each other; on cores that others use too, one that waits keeps the
# one that works from running. A tenth of GNU's usual number of turns costs nothing on an idle machine and
# spares a third on a busy one (benchmarks/FINDINGS.md).
TURNS = ("GOMP_SPINCOUNT", "30000")
# torch 2.13 prints two lines each time its profiler starts; 5, the default, shows them, and hides errors too.
PROFILER_WORDS = ("KINETO_LOG_LEVEL", "6")

waiting = {}  # {a program's file: what the tool that imports it does as soon as its CommandLine is known}


def begin(command_line, module):
    """A program's file calls this with its CommandLine and its __name__ before it imports torch: its flags
    are judged if it is run, a tool's if a tool imports it. Wrong ones end the process."""
    if module != "__main__":
        known = waiting.pop(os.path.realpath(command_line.file), None)
        return known(command_line) if known else None
    name, argv = command_line.name, sys.argv[1:]
    if program_file(argv, name):  # then these are the flags of another program
        return begin_tool(name, argv, judge_training)
    get_ready()
    go_on(name, judge_training, command_line)


def begin_tool(name, argv, judge):
    """The same for a tool that serves any program: judge(command_line) by the program that --program in argv
    names, or the project's own. That program is imported then."""
    get_ready()
    path = program_file(argv, name) or DEFAULT_PROGRAM
    waiting[os.path.realpath(path)] = lambda command_line: go_on(name, judge, command_line)
    try:
        load_program(path)
    except UserError as error:
        say_why(name, error.lines)
        raise SystemExit(error.code) from None
    waiting.clear()  # a program that does not call begin() is judged later


def get_ready():
    interrupts.quiet("__main__")  # for programs that have not done so as their first call
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault(*TURNS)
    os.environ.setdefault(*PROFILER_WORDS)


def go_on(name, judge, command_line):
    judge(command_line)
    require_packages(name, "torch", "numpy", "tqdm")
    if torchrun.first() and (QUESTION not in sys.argv or sys.stderr and sys.stderr.isatty()):
        announce(f"{name}: loading PyTorch ...")


def judge_training(command_line):
    parse(make_parser(command_line), command_line, with_demo(sys.argv[1:]))
