#!/usr/bin/env python3
"""Check puzzles: python puzzles/check.py 3 [--answer FILE]

Runs the puzzle's `answer` in Triton's interpreter, or on a GPU if there is one, and compares each element
with `plain` in float64. In the interpreter it also counts the elements that kernels load and store. On a
GPU it gives times at a larger size. Exit code 0 if all is right, 1 if not.
"""
import contextlib
import importlib.util
import os
import pathlib
import sys
import traceback
import warnings
from unittest import mock

HERE = pathlib.Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))
from fusion_lab.training import files

files.quiet(__name__)

from fusion_lab.training.files import MISSING, UserError, exit_code, interpreter_fault, require_packages
from fusion_lab.training.flags import Parser

PUZZLES = {path.name[1]: path for path in sorted(HERE.glob("p*_*.py"))}


def parse(argv=None):
    parser = Parser(prog="check.py", description=__doc__)
    parser.add_argument("numbers", nargs="+", choices=PUZZLES, metavar="N", help="of puzzles: 1 to 8")
    parser.add_argument("--answer", type=pathlib.Path, metavar="FILE",
                        help="a file whose functions replace those of the same name (default: none)")
    arguments = parser.parse_args(argv)
    if arguments.answer and not arguments.answer.is_file():
        parser.error(f"argument --answer: {arguments.answer}: no such file")
    return arguments


if __name__ == "__main__":
    exit_code(parse, None, "check.py")  # for its errors, before torch and Triton are needed
require_packages("check.py", "torch", "triton")

import torch

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
if DEVICE == "cpu":
    os.environ["TRITON_INTERPRET"] = "1"  # which Triton reads where a kernel is defined

from torch.utils._python_dispatch import TorchDispatchMode

SMALL, LARGE = 2, 64  # sizes of inputs: to check, and to time
TOLERANCE = 1e-4  # of the largest element of a result; float32 is off by 1e-6, TF32 by 1e-3
FIXED = ("inputs", "plain", "answer", "torch", "triton", "tl", "MOST_PRODUCTS")  # of a puzzle
PRODUCTS = ("aten.mm.", "aten.bmm.", "aten.addmm.", "aten.baddbmm.")


def load(path):
    """The module of a file. UserError where it does not run."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except Exception as error:  # whatever stands in the user's file, or no file
        raise UserError(f"{path}: {type(error).__name__}: {error}") from error
    return module


class Watch(TorchDispatchMode):
    """Counts PyTorch's matrix products and, in the interpreter, the elements that kernels load and store.
    There it also refuses atomics, and addresses outside of all tensors before they break what lies there."""

    def __init__(self, tensors):
        super().__init__()
        self.products, self.loaded, self.stored, self.places = 0, 0, 0, []
        self.note(tensors)

    def note(self, tensors):
        storages = [t.untyped_storage() for t in tensors if isinstance(t, torch.Tensor)]
        self.places += [(s.data_ptr(), s.data_ptr() + s.nbytes()) for s in storages]

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.products += str(function).startswith(PRODUCTS)
        result = function(*args, **kwargs or {})
        self.note(result if isinstance(result, (tuple, list)) else [result])
        return result

    def counted(self, pointers, mask):
        addresses = pointers.data[mask.data]
        if not sum((start <= addresses) & (addresses < end) for start, end in self.places).all():
            raise IndexError("a kernel loads or stores outside of all tensors: is a mask missing?")
        return len(addresses)

    @contextlib.contextmanager
    def in_interpreter(self):
        from triton.runtime.interpreter import InterpreterBuilder as builder
        load, store = builder.create_masked_load, builder.create_masked_store

        def counted_load(own, pointers, mask, *rest):
            self.loaded += self.counted(pointers, mask)
            return load(own, pointers, mask, *rest)

        def counted_store(own, pointers, value, mask, *rest):
            self.stored += self.counted(pointers, mask)
            return store(own, pointers, value, mask, *rest)

        refuse = mock.Mock(side_effect=TypeError("atomics add up in any order: these puzzles do without"))
        with mock.patch.multiple(builder, create_masked_load=counted_load, create_masked_store=counted_store,
                                 create_atomic_rmw=refuse):
            yield


def as_tuple(result):
    return result if isinstance(result, tuple) else (result,)


def complaint(result, wanted, place):
    """What is wrong with a tensor, a line; None where nothing is."""
    if not isinstance(result, torch.Tensor) or result.shape != wanted.shape:
        shape = tuple(result.shape) if isinstance(result, torch.Tensor) else type(result).__name__
        return f"result{place} is {shape}, and should be {tuple(wanted.shape)}"
    error = (result.double() - wanted).abs()
    wrong = ~(error <= TOLERANCE * wanted.abs().max())  # NaN is wrong as well
    if not wrong.any():
        return None
    first = tuple(torch.nonzero(wrong)[0].tolist())
    return (f"{int(wrong.sum())} of {wrong.numel()} elements of result{place} are wrong; the first is "
            f"{list(first)}: {result[first]:.6g}, and should be {wanted[first]:.6g}; the largest error is "
            f"{error.max():.3g}")


def run(task):
    """Run the answer once: (complaints, lines of counts)."""
    torch.manual_seed(0)
    warnings.simplefilter("ignore", RuntimeWarning)  # NumPy's, within the interpreter: infinity - infinity
    inputs = {name: x.to(DEVICE) for name, x in task.inputs(SMALL).items()}
    wanted = as_tuple(task.plain(**{name: x.double() for name, x in inputs.items()}))
    watch = Watch(inputs.values())
    with watch, watch.in_interpreter() if DEVICE == "cpu" else contextlib.nullcontext():
        result = as_tuple(task.answer(**inputs))
    if len(result) != len(wanted):
        return [f"answer returns {len(result)} tensors, and should return {len(wanted)}"], []
    places = [f" {number}" for number in range(len(wanted))] if len(wanted) > 1 else [""]
    wrong = list(filter(None, map(complaint, result, wanted, places)))
    if watch.products > getattr(task, "MOST_PRODUCTS", watch.products):
        wrong.append(f"{watch.products} matrix products, and should be {task.MOST_PRODUCTS}")
    given, made = (sum(x.numel() for x in tensors) for tensors in (inputs.values(), wanted))
    return wrong, [f"kernels load {watch.loaded:,} elements (the inputs have {given:,}) and store "
                   f"{watch.stored:,} (the result has {made:,})"] * bool(watch.stored)


def times(task):
    """A line: milliseconds at a larger size, of answer, plain and compiled plain, in turn."""
    from triton.testing import do_bench
    inputs = {name: x.cuda() for name, x in task.inputs(LARGE).items()}
    functions = dict(yours=task.answer, plain=task.plain, compiled=torch.compile(task.plain))
    took = {name: do_bench(lambda function=function: function(**inputs), return_mode="median")
            for name, function in functions.items()}
    return "ms on this GPU: " + ", ".join(f"{name} {ms:.4f}" for name, ms in took.items())


def check(path, own, own_file):
    """Print what is said of a puzzle; whether it is solved. own: {name: function} of the user's file, which
    take the place of the puzzle's."""
    task, number = load(path), path.name[1]
    replaced = {name: value for name, value in own.items() if name in vars(task) and name not in FIXED}
    if own and not replaced:
        raise UserError(f"puzzle {number}: --answer has none of its kernels' names")
    vars(task).update(replaced)
    try:
        wrong, lines = run(task)
    except Exception as error:  # of a kernel that somebody is just learning to write
        cause = error.__cause__ or error  # the interpreter's error has the user's as its cause
        places = [f"{frame.filename}, line {frame.lineno}: " for frame in
                  traceback.extract_tb(cause.__traceback__) if frame.filename in (task.__file__, own_file)]
        wrong, lines = [f"{places[-1] if places else ''}{type(cause).__name__}: {cause}"], []
    if not wrong and DEVICE == "cuda":
        lines.append(times(task))
    print(*wrong, *lines, f"puzzle {number}: {'not yet' if wrong else 'solved'}", sep="\n")
    return not wrong


def main(argv=None):
    arguments = parse(argv)
    if DEVICE == "cpu" and (fault := interpreter_fault()):
        raise UserError(fault, MISSING)
    own = {name: value for name, value in vars(load(arguments.answer)).items()
           if not name.startswith("__")} if arguments.answer else {}
    return int(not all([check(PUZZLES[n], own, str(arguments.answer)) for n in arguments.numbers]))


if __name__ == "__main__":
    sys.exit(exit_code(main, None, "check.py"))
