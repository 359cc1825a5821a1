#!/usr/bin/env python3
"""Check puzzles: python puzzles/check.py 3 [--answer FILE] [--picture FILE.svg]

Runs the puzzle's `answer` in Triton's interpreter, or on a GPU if there is one, and compares each element
with `plain` in float64. In the interpreter it also counts the elements that kernels load and store, and can
draw them. On a GPU it gives times at a larger size. Exit code 0 if all is right, 1 if not.
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
from fusion_lab.training import errors

errors.begin(__name__)

from fusion_lab.training.errors import MISSING, UserError, exit_code, require_packages
from fusion_lab.training.flags import Parser

PUZZLES = {path.name[1]: path for path in sorted(HERE.glob("p*_*.py"))}


def parse(argv=None):
    parser = Parser(prog="check.py", description=__doc__)
    parser.add_argument("numbers", nargs="+", choices=PUZZLES, metavar="N", help="of puzzles: 1 to 8")
    parser.add_argument("--answer", type=pathlib.Path, metavar="FILE",
                        help="a file whose functions replace those of the same name (default: none)")
    parser.add_argument("--picture", metavar="FILE.svg", help="draw into this file which elements each "
                        "program loads and stores, in the interpreter; for one puzzle (default: no picture)")
    arguments = parser.parse_args(argv)
    if arguments.picture and len(arguments.numbers) > 1:
        parser.error("argument --picture: draws one puzzle at a time")
    if arguments.answer and not arguments.answer.is_file():
        parser.error(f"argument --answer: {arguments.answer}: no such file")
    return arguments


PICTURE = None
if __name__ == "__main__":  # here for its errors, before torch and Triton are needed
    PICTURE = exit_code(parse, None, "check.py").picture
require_packages("check.py", "torch", "triton")

import torch

DEVICE = "cuda" if torch.cuda.is_available() and not PICTURE else "cpu"
if DEVICE == "cpu":
    os.environ["TRITON_INTERPRET"] = "1"  # which Triton reads where a kernel is defined

from torch.utils._python_dispatch import TorchDispatchMode

from puzzles.interpreter import interpreter_fault
from puzzles.picture import Launch, draw

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


def addresses_of(tensor):
    """Of its elements, one for each."""
    storage, size = tensor.untyped_storage(), tensor.element_size()
    places = torch.arange(storage.nbytes() // size)
    return storage.data_ptr() + size * places.as_strided(tensor.shape, tensor.stride(),
                                                         tensor.storage_offset()).flatten().numpy()


class Watch(TorchDispatchMode):
    """Records PyTorch's matrix products and, in the interpreter, launches of kernels with the elements that
    they load and store. There it also refuses atomics, and addresses outside of all tensors before they break
    what lies there. inputs: {name: tensor}; launches: the list that it fills."""

    def __init__(self, inputs, launches):
        super().__init__()
        self.launches, self.places = launches, []
        self.names = {tensor.untyped_storage().data_ptr(): name for name, tensor in inputs.items()}
        self.note(inputs.values())

    def note(self, tensors):
        storages = [t.untyped_storage() for t in tensors if isinstance(t, torch.Tensor)]
        self.places += [(s.data_ptr(), s.data_ptr() + s.nbytes()) for s in storages]

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **kwargs or {})
        if str(function).startswith(PRODUCTS):
            operands = {self.names.get(t.untyped_storage().data_ptr(), f"operand {number}"): t
                        for number, t in enumerate(args, 1) if isinstance(t, torch.Tensor)}
            touched = [("loaded", "0", addresses_of(t)) for t in operands.values()]
            self.launches.append(Launch(f"{function} of PyTorch", operands | {"result": result},
                                        [*touched, ("stored", "0", addresses_of(result))]))
        self.note(result if isinstance(result, (tuple, list)) else [result])
        return result

    def record(self, what, builder, pointers, mask):
        addresses = pointers.data[mask.data]
        last = max(axis * (size > 1) for axis, size in enumerate(builder.grid_dim))  # the grid has three
        program = ",".join(map(str, builder.grid_idx[:last + 1]))
        self.launches[-1].touched.append((what, program, addresses))
        if not sum((start <= addresses) & (addresses < end) for start, end in self.places).all():
            raise IndexError("a kernel loads or stores outside of all tensors: is a mask missing?")

    def count(self, what):
        """How many elements Triton's kernels loaded or stored."""
        return sum(len(addresses) for launch in self.launches if not launch.name.startswith(PRODUCTS)
                   for each, _, addresses in launch.touched if each == what)

    @contextlib.contextmanager
    def in_interpreter(self):
        from triton.runtime.interpreter import GridExecutor
        from triton.runtime.interpreter import InterpreterBuilder as builder
        load, store, launch = builder.create_masked_load, builder.create_masked_store, GridExecutor.__call__

        def recorded_launch(own, *args, **kwargs):
            given = dict(zip(own.arg_names, args, strict=False)) | kwargs
            tensors = {name: value for name, value in given.items() if isinstance(value, torch.Tensor)}
            self.launches.append(Launch(own.fn.__name__, tensors))
            return launch(own, *args, **kwargs)

        def recorded_load(own, pointers, mask, *rest):
            self.record("loaded", own, pointers, mask)
            return load(own, pointers, mask, *rest)

        def recorded_store(own, pointers, value, mask, *rest):
            self.record("stored", own, pointers, mask)
            return store(own, pointers, value, mask, *rest)

        refuse = mock.Mock(side_effect=TypeError("atomics add up in any order: these puzzles do without"))
        with (mock.patch.object(GridExecutor, "__call__", recorded_launch),
              mock.patch.multiple(builder, create_masked_load=recorded_load,
                                  create_masked_store=recorded_store, create_atomic_rmw=refuse)):
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


def run(task, launches):
    """Run the answer once: (complaints, lines of counts). launches: the list that it fills."""
    torch.manual_seed(0)
    warnings.simplefilter("ignore", RuntimeWarning)  # NumPy's, within the interpreter: infinity - infinity
    inputs = {name: x.to(DEVICE) for name, x in task.inputs(SMALL).items()}
    wanted = as_tuple(task.plain(**{name: x.double() for name, x in inputs.items()}))
    watch = Watch(inputs, launches)
    with watch, watch.in_interpreter() if DEVICE == "cpu" else contextlib.nullcontext():
        result = as_tuple(task.answer(**inputs))
    if len(result) != len(wanted):
        return [f"answer returns {len(result)} tensors, and should return {len(wanted)}"], []
    places = [f" {number}" for number in range(len(wanted))] if len(wanted) > 1 else [""]
    wrong = list(filter(None, map(complaint, result, wanted, places)))
    products = sum(launch.name.startswith(PRODUCTS) for launch in launches)
    if products > getattr(task, "MOST_PRODUCTS", products):
        wrong.append(f"{products} matrix products, and should be {task.MOST_PRODUCTS}")
    given, made = (sum(x.numel() for x in tensors) for tensors in (inputs.values(), wanted))
    loaded, stored = watch.count("loaded"), watch.count("stored")
    return wrong, [f"kernels load {loaded:,} elements (the inputs have {given:,}) and store "
                   f"{stored:,} (the result has {made:,})"] * bool(stored)


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
    task, number, launches = load(path), path.name[1], []
    replaced = {name: value for name, value in own.items() if name in vars(task) and name not in FIXED}
    if own and not replaced:
        raise UserError(f"puzzle {number}: --answer has none of its kernels' names")
    vars(task).update(replaced)
    try:
        wrong, lines = run(task, launches)
    except Exception as error:  # of a kernel that somebody is just learning to write
        cause = error.__cause__ or error  # the interpreter's error has the user's as its cause
        places = [f"{frame.filename}, line {frame.lineno}: " for frame in
                  traceback.extract_tb(cause.__traceback__) if frame.filename in (task.__file__, own_file)]
        wrong, lines = [f"{places[-1] if places else ''}{type(cause).__name__}: {cause}"], []
    if not wrong and DEVICE == "cuda":
        lines.append(times(task))
    verdict = f"puzzle {number}: {'not yet' if wrong else 'solved'}"
    if PICTURE:
        pathlib.Path(PICTURE).write_text(draw(launches, verdict), encoding="utf-8")
    print(*wrong, *lines, verdict, sep="\n")
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
