"""The first tenth of a second of a program, before torch is imported, which takes seconds: wrong flags and
missing packages are told at once, a terminal sees a sign of life."""
import os
import sys

from fusion_lab.training.interrupts import quiet  # noqa: F401  the first call of a program

# OpenMP's threads spin while they wait for each other; on cores that others use too, one that waits keeps the
# one that works from running. A tenth of GNU's usual number of turns costs nothing on an idle machine and
# spares a third on a busy one (benchmarks/LOG.md).
TURNS = ("GOMP_SPINCOUNT", "30000")


def begin(command_line):
    """Judge sys.argv by a program's CommandLine, and get ready for the import of torch. Ends the program
    where the flags are wrong."""
    from fusion_lab.training.files import require_packages  # not above: quiet() comes before all of that
    from fusion_lab.training.flags import contradictions, make_parser, parse, with_demo
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault(*TURNS)
    arguments = with_demo(sys.argv[1:])
    if not any(word.partition("=")[0] == "--program" for word in arguments):  # another one's flags
        parse(make_parser(command_line), command_line, arguments)
        for pair in contradictions(command_line, arguments):
            print(f"{command_line.name}: note: {pair}: the later one wins", file=sys.stderr)
    require_packages(command_line.name, "torch", "numpy", "tqdm")
    if sys.stderr and sys.stderr.isatty():
        print(f"{command_line.name}: loading PyTorch ...", file=sys.stderr, flush=True)
