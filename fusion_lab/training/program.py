"""The seam between the lab and a model. Needs no torch.

A Program is three configs whose fields are flags, and Model, Data and Trainer classes. What the lab asks of a
model and its data are methods with defaults here; tests/second_program.py is small and overrides few. Also by
name: Trainer's attributes and methods, and train() in its module (tiny_openfold_v2.py); the fields `dropout`
(accuracy.py) and `enable_triton_*`, `enable_triton_weight_gradients` among them (retune.py); split_packed()
and adapt() of modules with packed weights (checkpoints.py).
Every model's file ends in `PROGRAM = Program(...)`, and the lab's tools get it from there (`--program FILE`).
"""
import importlib
import importlib.util
import os
import sys
from collections.abc import Callable
from dataclasses import asdict, astuple, dataclass, field, fields, replace
from typing import Any, NamedTuple

from fusion_lab import commands
from fusion_lab.training.errors import UserError
from fusion_lab.training.options import Checked, ProfilerConfig, Switches, TrainingConfig

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
DEFAULT_PROGRAM = os.path.join(ROOT, "tiny_openfold_v2.py")
PARTS = ("model", "training", "fusion", "profiler")


class Loss(NamedTuple):
    """A summand of a model's loss: a mean over `count` parts of a batch. Ranks weigh their means by the
    count."""
    value: Any  # both (), tensors
    count: Any
    weight: float = 1

    def weighted(self):
        return self.value if self.weight == 1 else self.weight * self.value


class Model:
    """What the lab asks of a model beside torch.nn.Module: class Mine(nn.Module, Model). It is made by
    Mine(config, fusion); forward takes a batch's entries by name and returns a dict of tensors with
    "loss". For several ranks it adds "losses", {name: Loss}, unless the loss is a mean over samples."""
    SUBLAYERS = ()  # their names, in the order in which a step runs them

    def sublayers(self):
        """(name, module) pairs to put hooks on, none where they are compiled."""
        return []

    def for_loss(self, **batch):
        """forward() for a training step, which needs the loss alone."""
        return self(**batch)

    def defined(self, output, batch):
        """{name: tensor} of what forward returned, 0 where a mask of the batch hides it."""
        return {name: tensor for name, tensor in output.items() if name != "losses"}

    def shake(self):
        """Called after noise was added to the weights: move the inputs of kinks, such as a ReLU's, away from
        0, where rounding would decide on which side they are."""

    def in_words(self, dtype):
        """For the start-up lines of training in this dtype: sizes=text, remarks={switch: text}, last=line;
        each may be missing."""
        return {}

    def count_as(self, training, on_gpu):
        """Called before FLOPs are counted on tensors without values: multiply in the order that such a
        training would choose on a GPU or elsewhere."""

    def costs(self, training):
        """{sub-layer: Cost} of one training step, summed over all blocks."""
        return {}

    @staticmethod
    def least_bytes(settings):
        """A lower bound of the memory that a training step in these settings needs; 0 if it is not known."""
        return 0

    def statistics(self):
        """Nominal counts, JSON, or None."""


class Data:
    """What a program trains on: Mine(settings). A subclass adds batch(step), a pure function of (seed, step)
    that returns {name: tensor} on the CPU, and describe(), a few words."""
    names = ()       # of the real things, such as proteins, that a model learns from
    held_out = ()    # names of those that it does not learn from, so that they can test it
    choosing = ()    # names of those whose evaluations choose the best weights
    sequences = {}   # {name: plain values}, to find relatives of what a model has learned from
    chooses = False  # whether its evaluations have a score to choose by

    def part(self, step, rank, size):
        """The samples of one of several ranks among batch(step), which has those of all: a step does not
        depend on how many share it. A subclass may make these alone, where that is cheaper."""
        batch = self.batch(step)
        if size == 1:
            return batch
        count = len(next(iter(batch.values()))) // size
        return {key: value[rank * count:(rank + 1) * count] for key, value in batch.items()}

    def check_batch(self):
        """A batch in which every mask masks something."""
        return self.batch(0)

    def evaluate(self, trainer, stop):
        """An Evaluation of the trainer's weights; None: there is nothing to evaluate. Ends early once
        stop.signal is set."""

    def finish(self, trainer, evaluations):
        """After a run: last words and pictures, from {step or "final": Evaluation}."""


@dataclass(frozen=True)
class Cost:
    """What one sub-layer needs at least, by formulas: FLOPs of its forward pass, of which backward takes
    twice as many, and bytes moved forward and backward; None if there is no formula. Tests compare the FLOPs
    with counts."""
    flops: float | None = None
    forward_bytes: float | None = None
    backward_bytes: float | None = None

    @classmethod
    def of(cls, module, forward, backward, element):
        """The Cost of a module, from the bytes that its activations move forward and backward. Its weights,
        of `element` bytes each, are read in both passes and get a gradient in backward."""
        weights = element * sum(parameter.numel() for parameter in module.parameters())
        return cls(None, forward + weights, backward + 2 * weights)

    def times(self, count):
        """The Cost of `count` such modules."""
        return Cost(*(None if value is None else count * value for value in astuple(self)))


@dataclass(frozen=True)
class Settings:
    """The four configs of a run."""
    model: Checked
    training: TrainingConfig
    fusion: Switches
    profiler: ProfilerConfig = ProfilerConfig()

    def having(self, **values: object) -> "Settings":
        """A copy with other values of fields, whichever config each belongs to: having(seq_len=2, seed=0)."""
        changed = {}
        for part in PARTS:
            config = getattr(self, part)
            own = {f.name: values.pop(f.name) for f in fields(config) if f.name in values}
            changed[part] = replace(config, **own) if own else config
        if values:
            raise ValueError(f"{next(iter(values))}: no config has this field")
        return replace(self, **changed)

    def get(self, name):
        """The value of a field, whichever config it belongs to."""
        configs = (getattr(self, part) for part in PARTS)
        return next(getattr(config, name) for config in configs if hasattr(config, name))

    def idle_reasons(self, on_gpu):
        """Why switches that are on change nothing here, in sentences."""
        return list(dict.fromkeys(self.fusion.idle(self, on_gpu).values()))

    def in_use(self, on_gpu):
        """Names of the switches that are on and do something here."""
        idle = self.fusion.idle(self, on_gpu)
        return [name for name in self.fusion.names() if getattr(self.fusion, name) and name not in idle]

    def as_dict(self):
        """The configs under the names that result files use."""
        return dict(config=asdict(self.model), training_params=asdict(self.training),
                    fusion_config=asdict(self.fusion), profiler_config=asdict(self.profiler))


@dataclass(frozen=True, kw_only=True)
class Program:
    """All that the lab knows of a model. Its last part needs torch; flags can be parsed without it."""
    file: str                      # the model's file; a process of its own runs it by this path
    about: str                     # its docstring, the text of --help
    suffix: str                    # of result files: "v2" makes performance_summary_v2.json
    version: str                   # in them: "v2_fused"
    model_config: type
    training_config: type
    fusion_config: type
    axes: dict = field(default_factory=lambda: dict(batch_size="B"))  # sizes that a study varies: letters
    demo: dict = field(default_factory=dict)  # what --demo sets: a first run that learns in a minute or two
    model: type | None = None      # class Mine(nn.Module, Model)
    data: Callable | None = None   # data(settings) -> Data: a subclass, or a function that makes one
    trainer: type | None = None    # tiny_openfold_v2.Trainer, which the lab does not import, or a subclass
    # {its own mode's flag: mode(program, settings) -> exit code, or where it is, "module:function"}; a field
    # of training_config with takes=(...) makes the flag, as `contacts` does for tiny_openfold_v2.py
    modes: dict = field(default_factory=dict)

    @property
    def name(self):
        """What the user typed to start it: a file, or a command of the installed package."""
        return commands.name(self.file)

    @property
    def stem(self):
        """Its name in the files that it saves: the same however it was started."""
        return os.path.basename(self.file).removesuffix(".py")

    def settings(self, **values: object) -> Settings:
        """The defaults, with other values of some fields."""
        plain = Settings(self.model_config(), self.training_config(), self.fusion_config())
        return plain.having(**values)

    def result(self, kind):
        """File name of a result: result("accuracy") -> "accuracy_v2.json"."""
        return f"{kind}_{self.suffix}.json"

    def sample(self, settings):
        """The sizes of a batch by their letters: "B 4, N 16, S 64"."""
        return ", ".join(f"{letter} {settings.get(axis)}"
                         for letter, axis in sorted((letter, axis) for axis, letter in self.axes.items()))


def load_program(path=DEFAULT_PROGRAM):
    """The PROGRAM of a model's file, which is imported as a module. Raises UserError."""
    path = os.path.abspath(path)
    directory, file = os.path.split(path)
    name, ending = os.path.splitext(file)
    if not os.path.isfile(path) or ending != ".py":
        raise UserError(f"--program {path}: no such Python file")
    for place in (directory, ROOT):
        if place not in sys.path:
            sys.path.append(place)
    known = sys.modules.get(name)  # was imported, or is the script, for which find_spec() would fail
    there = known or (None if "." in name else importlib.util.find_spec(name))  # a dot would mean a package
    origin = getattr(there, "__file__" if known else "origin", None)
    if origin and os.path.realpath(origin) == os.path.realpath(path):
        module = importlib.import_module(name)
    else:  # a homonym, a module of the same name, or no module can have it
        specification = importlib.util.spec_from_file_location(f"program_{name}", path)
        module = sys.modules[specification.name] = importlib.util.module_from_spec(specification)
        specification.loader.exec_module(module)
    program = getattr(module, "PROGRAM", None)
    if not isinstance(program, Program):
        raise UserError(f"--program {path}: it has no PROGRAM = Program(...)")
    return program
