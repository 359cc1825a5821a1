"""The seam between the lab and a model: a Program says what the lab must know of it, Settings how it is run.

Every model's file ends in `PROGRAM = Program(...)`; the lab's tools get it from there (`--program FILE`) and
import no model themselves. tests/second_program.py is a small one. Needs no torch.
"""
import importlib
import importlib.util
import os
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, fields, replace

from fusion_lab.training.files import UserError
from fusion_lab.training.options import Checked, ProfilerConfig, Switches, TrainingConfig

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
DEFAULT_PROGRAM = os.path.join(ROOT, "tiny_openfold_v2.py")
PARTS = ("model", "training", "fusion", "profiler")


@dataclass(frozen=True)
class Settings:
    """The four configs of a run."""
    model: Checked
    training: TrainingConfig
    fusion: Switches
    profiler: ProfilerConfig = ProfilerConfig()

    def having(self, **values):
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

    def idle(self, on_gpu):
        """Why switches that are on change nothing here, a sentence for each."""
        return self.fusion.idle(self, on_gpu)

    def as_dict(self):
        """The configs under the names that result files use."""
        return dict(config=asdict(self.model), training_params=asdict(self.training),
                    fusion_config=asdict(self.fusion), profiler_config=asdict(self.profiler))


@dataclass(frozen=True)
class Cost:
    """What one sub-layer needs at least, in one block, by formulas: FLOPs of its forward pass (backward takes
    twice as many), and bytes moved forward and backward, None where nobody has worked them out. The FLOPs say
    which sub-layers do equal work, and stand beside the count (bounds/flops.py) in the tests."""
    flops: float
    forward_bytes: float | None = None
    backward_bytes: float | None = None


def every_output(output, batch):
    """The default of Program.defined: all that forward returned."""
    return dict(output)


def nothing(*_, **__):
    return None


@dataclass(frozen=True, kw_only=True)
class CommandLine:
    """What flags need to know of a program; all of it is there before torch is imported."""
    file: str                      # the model's file; a process of its own runs it by this path
    about: str                     # its docstring, the text of --help
    model_config: type
    training_config: type
    fusion_config: type
    headline: tuple = ()           # switches of --combinations
    demo: dict = field(default_factory=dict)  # what --demo sets: a first run that learns in a minute or two
    axes: dict = field(default_factory=lambda: dict(batch_size="B"))  # fields that a study varies: letters
    study_sizes: dict = field(default_factory=lambda: dict(batch_size=(2, 4)))  # its default for some

    @property
    def name(self):
        return os.path.basename(self.file)

    def settings(self, **values):
        """The defaults, with other values of some fields."""
        plain = Settings(self.model_config(), self.training_config(), self.fusion_config())
        return plain.having(**values)


@dataclass(frozen=True, kw_only=True)
class Program(CommandLine):
    """What the lab must know of a model.

    A module made by `model` takes a batch's entries as keyword arguments and returns a dict of tensors with
    "loss"; it has `config`, `fusion` (what it was made from) and `sublayers()`, (name, module) pairs for
    hooks; the input of a sub-layer must require a gradient, or its backward pass is counted as the rest. A
    source has `batch(step)`, a pure function of (seed, step), on CPU; `describe()`; `names` and
    `held_out`, of real things it trains on and keeps out.
    """
    model: Callable                # model(config, fusion) -> torch.nn.Module
    trainer: type                  # trainer(program, settings, device, world), as tiny_openfold_v2.Trainer
    open_source: Callable          # open_source(settings) -> source
    check_batch: Callable          # check_batch(settings, device) -> a batch in which every mask masks
    version: str                   # in result files: "v2_fused"
    suffix: str                    # of their names: "v2" makes performance_summary_v2.json
    in_a_step: dict = field(default_factory=dict)  # what a training step, which needs the loss alone, adds
    #                                to a batch's entries
    defined: Callable = every_output  # defined(output, batch) -> {name: tensor}, 0 where a mask hides it
    shake: Callable = nothing      # shake(model): weights got noise; now keep kinks away from 0
    sublayers: tuple = ()          # names, in the order in which a step runs them
    costs: Callable = nothing      # costs(settings) -> {sub-layer: Cost}, or None
    blocks: Callable = lambda settings: 1  # how often a step runs each sub-layer
    evaluate: Callable | None = None  # evaluate(trainer, source, stop, final=False) -> JSON
    evaluation_line: Callable = str  # what that returned, as a line
    scores: Callable = dict        # what that returned -> {name: number}, for curves
    score: Callable = nothing      # what that returned -> a number, higher is better, for --save-best and
    #                                --early-stopping; None: it does not say
    closing: Callable = nothing    # closing(trainer, source, evaluations): last words, printed for people
    evaluation_name: str = "evaluation"  # its key in result files
    # start_lines(trainer) -> the model's part of the start-up lines, or None: dict(sizes=text,
    # remarks={switch: text behind its "Enabled"}, last=line behind the switches)
    start_lines: Callable = nothing
    statistics: Callable = nothing  # statistics(settings) -> nominal counts, JSON, or None
    before_training: Callable = nothing  # before_training(settings, source): raises UserError early
    titles: dict = field(default_factory=dict)  # {name in the start-up lines: switch}
    modes: dict = field(default_factory=dict)  # {its own mode's flag: mode(program, settings) -> exit code}
    tiny: dict = field(default_factory=dict)  # sizes of --validate-setup
    success: str = "Validation successful."  # its last line; or failure and the reasons
    failure: str = "Validation failed"

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
    found = None if "." in name else importlib.util.find_spec(name)  # a dot would mean a package
    if found and found.origin and os.path.realpath(found.origin) == os.path.realpath(path):
        module = importlib.import_module(name)
    else:  # another module has this name, or no module can
        specification = importlib.util.spec_from_file_location(f"program_{name}", path)
        module = sys.modules[specification.name] = importlib.util.module_from_spec(specification)
        specification.loader.exec_module(module)
    program = getattr(module, "PROGRAM", None)
    if not isinstance(program, Program):
        raise UserError(f"--program {path}: it has no PROGRAM = Program(...)")
    return program
