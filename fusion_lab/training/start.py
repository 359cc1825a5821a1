"""The first tenth of a second of a program, before torch is imported, which takes seconds: wrong flags and
missing packages are told at once, Ctrl-C ends without a traceback, a terminal sees a sign of life."""
import os
import signal
import sys

from fusion_lab.training.files import require_packages
from fusion_lab.training.flags import make_parser, parse, with_demo

# OpenMP's threads spin while they wait for each other; on cores that others use too, one that waits keeps the
# one that works from running (benchmarks/LOG.md).
PATIENCE = "OMP_WAIT_POLICY"


def begin(command_line):
    """Judge sys.argv by a program's CommandLine, and get ready for the import of torch. Ends the program
    where the flags are wrong."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # and not ignored, as in background
        signal.signal(signal.SIGINT, leave)
    os.environ.setdefault(PATIENCE, "PASSIVE")
    arguments = with_demo(sys.argv[1:])
    if not any(word.partition("=")[0] == "--program" for word in arguments):  # another one's flags
        parse(make_parser(command_line), command_line, arguments)
    require_packages(command_line.name, "torch", "numpy", "tqdm")
    if sys.stderr and sys.stderr.isatty():
        print(f"{command_line.name}: loading PyTorch ...", file=sys.stderr, flush=True)


def leave(number, _frame):
    """Ctrl-C while modules are imported: nothing is there yet that would have to be saved."""
    print("interrupted", file=sys.stderr, flush=True)
    os._exit(128 + number)


def ready():
    """From now on Ctrl-C is KeyboardInterrupt again."""
    if signal.getsignal(signal.SIGINT) is leave:
        signal.signal(signal.SIGINT, signal.default_int_handler)
