"""What a performance study measures: a program's axes and fusion settings by name, shapes, points in their
random order."""
import itertools
import math
import os
import random
from dataclasses import dataclass, field

from fusion_lab.training.options import flag
from fusion_lab.training.program import DEFAULT_PROGRAM, ROOT

MAX_POINTS = 10 ** 6  # at half a minute each that is a year


@dataclass(frozen=True)
class Axis:
    """A field that a study varies, such as seq_len with the letter S.

    Its flag and its key in config.json are the field's plural, made by an s at the end where there is none:
    --seq-lens, but --num-seqs as it is. Without that flag a study takes the program's study_sizes, and for an
    axis that is not there the default of the program's config.
    """
    field: str
    letter: str
    default: tuple = ()

    @property
    def plural(self):
        return self.field if self.field.endswith("s") else f"{self.field}s"

    def __str__(self):
        return f"{self.field} {self.letter}"


@dataclass(frozen=True, order=True)
class Shape:
    """A size for each axis."""
    sizes: tuple
    axes: tuple = field(compare=False, repr=False)

    @classmethod
    def of(cls, content, axes):
        """The shape of a dict that has a key for each axis."""
        return cls(tuple(content[axis.field] for axis in axes), axes)

    def __str__(self):
        return " ".join(f"{axis.letter} {size}" for axis, size in zip(self.axes, self.sizes, strict=True))

    def as_dict(self):
        return {axis.field: size for axis, size in zip(self.axes, self.sizes, strict=True)}

    def without(self, *names):
        """The sizes along the other axes."""
        axes = tuple(axis for axis in self.axes if axis.field not in names)
        return Shape.of(self.as_dict(), axes)

    def flags(self):
        return [word for name, size in self.as_dict().items() for word in (flag(name), str(size))]


@dataclass(frozen=True)
class Point:
    """One run of the trainer."""
    shape: Shape
    setting: str
    run: int

    def __str__(self):
        return f"{self.shape} {self.setting} run {self.run}"


def spelled(name):
    """"enable_opm_fusion" -> "opm-fusion" """
    return name.removeprefix("enable_").replace("_", "-")


class Vocabulary:
    """What a program's studies are made of: axes, switches, and names for sets of switches.

    `baseline` is no switch, `fused` the defaults, `compiled` the defaults with torch.compile, `all` whatever
    makes steps faster.
    """

    def __init__(self, program):
        self.program = program
        defaults, config = program.settings(), program.fusion_config
        self.axes = tuple(Axis(name, letter, (defaults.get(name),))
                          for name, letter in program.axes.items())
        # Those that are on by default come first: names of settings in older studies are in this order.
        attributes = sorted(config.names(), key=lambda name: not getattr(defaults.fusion, name))
        self.switches = {spelled(name): name for name in attributes}
        self.defaults, self.everything = map(self.switches_of, (defaults.fusion, config.preset(True)))
        self.named = {"baseline": frozenset(), "fused": self.defaults,
                      "compiled": self.defaults | {"torch-compile"}, "all": self.everything}
        self.headlines = tuple(self.named)[1:]  # the settings that are meant to be fast

    @property
    def program_key(self):
        """The program as a study's files name it: its path, from the project's root if it is below that."""
        path = os.path.relpath(os.path.realpath(self.program.file), os.path.realpath(ROOT))
        return os.path.realpath(self.program.file) if path.startswith(os.pardir) else path

    @property
    def main_axis(self):
        """The axis that figures are drawn against: the first that is not the batch."""
        return next((axis for axis in self.axes if axis.field != "batch_size"), self.axes[0])

    def switches_of(self, config):
        return frozenset(name for name, attribute in self.switches.items() if getattr(config, attribute))

    def name(self, on):
        """The one name of a set of switches."""
        for name, switches in self.named.items():
            if on == switches:
                return name
        if len(on) == 1:
            return f"only-{min(on)}"
        if on < self.everything and len(on) == len(self.everything) - 1:
            return f"without-{min(self.everything - on)}"
        return "+".join(name for name in self.switches if name in on)

    def parse(self, text):
        """The set of switches that a name stands for. Raises ValueError with the names there are."""
        if text in self.named:
            return self.named[text]
        kind, _, switch = text.partition("-")
        if kind == "only" and switch in self.switches:
            return frozenset({switch})
        if kind == "without" and switch in self.everything:
            return self.everything - {switch}
        on = frozenset(text.split("+"))
        if not on <= self.switches.keys():
            raise ValueError(f"{text!r} is no setting: must be one of {', '.join(self.named)}, only-X, "
                             f"without-X or X+Y, X and Y one of {', '.join(self.switches)}")
        return on

    def flags(self, on):
        """The trainer's flags for a set of switches, as short as they can be."""
        if on == self.defaults:
            return []
        if on == self.everything:
            return ["--enable-all-fusion"]
        if on >= self.defaults:
            return [f"--enable-{name}" for name in self.switches if name in on - self.defaults]
        return ["--disable-all-fusion", *(f"--enable-{name}" for name in self.switches if name in on)]

    def principal(self, settings):
        """Those of the settings that headlines are about: fused, compiled, all; without these, all but the
        baseline."""
        return [s for s in settings if s in self.headlines] or [s for s in settings if s not in self.named]


def ablation(switches):
    """None, each alone, each left out, all; "all" and "left out" among the given switches."""
    whole = frozenset(switches)
    alone, left_out = [frozenset({name}) for name in switches], [whole - {name} for name in switches]
    return [frozenset(), *alone, *left_out, whole]


def combinations(switches):
    """Every subset of the switches."""
    return [frozenset(c) for size in range(len(switches) + 1) for c in itertools.combinations(switches, size)]


@dataclass(frozen=True)
class Study:
    """All that the results of a study depend on. Raises ValueError where it makes no sense."""
    vocabulary: Vocabulary = field(compare=False, repr=False)
    sizes: tuple  # for each axis a tuple of its sizes
    settings: tuple
    switches: tuple
    num_runs: int
    num_steps: int
    warmup_steps: int
    device: str
    amp_dtype: str | None
    trainer_flags: tuple
    seed: int
    torch_version: str | None = None
    host_cpu: str | None = None

    def __post_init__(self):
        for setting in self.settings:
            self.vocabulary.parse(setting)
        count = self.num_runs * len(self.settings) * math.prod(map(len, self.sizes))
        if not 0 < count <= MAX_POINTS:
            raise ValueError(f"num_runs = {self.num_runs}: makes {count} points; {MAX_POINTS} are the limit")

    @classmethod
    def read(cls, content, vocabulary):
        """The study in the dict that as_dict() made, here or in an earlier version. Raises KeyError,
        TypeError or ValueError."""
        sizes = tuple(tuple(content[axis.plural]) for axis in vocabulary.axes)
        texts = {name: tuple(content[name]) for name in ("settings", "switches", "trainer_flags")}
        numbers = {name: content[name] for name in ("num_runs", "num_steps", "warmup_steps", "seed")}
        others = {name: content[name] for name in ("device", "amp_dtype", "torch_version", "host_cpu")}
        whole = [*numbers.values(), *(size - 1 for axis in sizes for size in axis)]
        words = [*itertools.chain(*texts.values()), *others.values()]
        if not (all(type(n) is int and n >= 0 for n in whole)
                and all(isinstance(word, str | None) for word in words)):
            raise ValueError("not numbers and words, each in its place")
        return cls(vocabulary, sizes, **texts, **numbers, **others)

    def as_dict(self):
        kept = {name: list(value) if isinstance(value, tuple) else value for name, value in vars(self).items()
                if name not in ("vocabulary", "sizes")}
        sizes = {axis.plural: list(sizes) for axis, sizes in zip(self.axes, self.sizes, strict=True)}
        return dict(program=self.vocabulary.program_key, **sizes, **kept)

    @property
    def axes(self):
        return self.vocabulary.axes

    def sizes_of(self, axis):
        return sorted(self.sizes[self.axes.index(axis)])

    def shapes(self):
        return [Shape(sizes, self.axes) for sizes in itertools.product(*self.sizes)]

    def points(self):
        """All points in the order they run: the first run of every point in random order, then the second of
        every point, and so on, so that a machine that drifts does so for all settings alike."""
        generator, ordered = random.Random(self.seed), []
        for run in range(1, self.num_runs + 1):
            block = [Point(shape, setting, run) for shape in self.shapes() for setting in self.settings]
            generator.shuffle(block)
            ordered += block
        return ordered

    def setting_flags(self, setting):
        """The trainer's flags that a setting stands for."""
        return self.vocabulary.flags(self.vocabulary.parse(setting))

    def flags(self, shape, setting):
        """The trainer's flags for one point; one log line at the end, as logging synchronises the device."""
        steps = str(self.num_steps)
        precision = ["--use-amp", "--amp-dtype", self.amp_dtype] if self.amp_dtype else []
        return [*shape.flags(), "--num-steps", steps, "--warmup-steps", str(self.warmup_steps),
                "--log-every", steps, "--device", self.device, *precision, *self.trainer_flags,
                *self.setting_flags(setting)]


def program_of(study):
    """The program of a study in a JSON file; those from before there were others do not name it."""
    return study.get("program", os.path.basename(DEFAULT_PROGRAM))
