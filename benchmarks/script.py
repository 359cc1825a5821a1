"""What the scripts of this folder share: where the project lies, common flags, the device, the result's file.

Importing it puts the project on the path. Then call begin(__name__), before torch is imported.
"""
import os
import pathlib
import shlex
import sys
import time

ROOT = pathlib.Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
from fusion_lab.training.errors import NO_GPU, UserError, begin
from fusion_lab.training.files import finite, write_json
from fusion_lab.training.flags import Parser, regular_expression, whole_number

__all__ = ["ROOT", "begin", "gpu_or_trial", "parser_of", "write_result"]


def parser_of(file, about, required=False, sizes=None, steps=None, only=None, quick=None):
    """A parser for a script with --out, which may be required, and with those other flags for which it names
    a default or a meaning."""
    parser = Parser(prog=os.path.basename(file), description=about)
    parser.add_argument("--out", type=pathlib.Path, required=required, help="directory for the results"
                        + " (default: none)" * (not required))
    if sizes:
        parser.add_argument("--sizes", nargs="+", type=whole_number(), default=sizes,
                            help="residues (default: %(default)s)")
    if steps:
        parser.add_argument("--steps", type=whole_number(), default=steps,
                            help="timed (default: %(default)s)")
    if only:
        parser.add_argument("--only", type=regular_expression, default="",
                            help=f"regular expression over {only} (default: all)")
    if quick:
        parser.add_argument("--quick", action="store_true", help=quick)
    return parser


def gpu_or_trial(trial=None):
    """The GPU, or the CPU for a trial; None: the script has no trial. Raises UserError where a GPU is needed
    and absent."""
    import torch

    from fusion_lab.training.machine import choose_device
    if not (trial or torch.cuda.is_available()):
        advice = "" if trial is None else "; --quick tries the script on a CPU"
        raise UserError(f"needs a GPU{advice}", code=NO_GPU)
    return choose_device("cpu" if trial else "cuda")


def write_result(path, device, **figures):
    """Figures as JSON, with the command, the date and the machine."""
    from fusion_lab.training.machine import system_info
    command = shlex.join(["python", os.path.relpath(sys.argv[0], ROOT), *sys.argv[1:]])
    write_json(path, finite(dict(figures, command=command, date=time.strftime("%F"),
                                 system_info=system_info(device))))
