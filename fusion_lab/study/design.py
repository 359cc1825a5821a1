"""What a performance study measures: fusion settings by name, shapes, points in their random order."""
import itertools
import os
import random
from dataclasses import dataclass, fields

from tiny_openfold_v2 import FusionConfig

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
TRAINER = "tiny_openfold_v2.py"
SWITCHES = {f.name.removeprefix("enable_").replace("_", "-"): f.name
            for f in fields(FusionConfig) if isinstance(f.default, bool)}


def switches_of(config):
    return frozenset(name for name, field in SWITCHES.items() if getattr(config, field))


DEFAULTS, ALL = switches_of(FusionConfig()), switches_of(FusionConfig.preset(True))
COMPILED = DEFAULTS | {"torch-compile"}
NAMED = {"baseline": frozenset(), "fused": DEFAULTS, "compiled": COMPILED, "all": ALL}
HEADLINES = tuple(NAMED)[1:]  # the settings that are meant to be fast
SIZES = ("batch_sizes", "seq_lens", "num_seqs")  # of a study, in the order of Shape


def setting_name(on):
    """The one name of a set of switches."""
    for name, switches in NAMED.items():
        if on == switches:
            return name
    if len(on) == 1:
        return f"only-{min(on)}"
    if on < ALL and len(on) == len(ALL) - 1:
        return f"without-{min(ALL - on)}"
    return "+".join(name for name in SWITCHES if name in on)


def parse_setting(text):
    """The set of switches that a name stands for. Raises ValueError with the names there are."""
    if text in NAMED:
        return NAMED[text]
    kind, _, switch = text.partition("-")
    if kind == "only" and switch in SWITCHES:
        return frozenset({switch})
    if kind == "without" and switch in ALL:
        return ALL - {switch}
    on = frozenset(text.split("+"))
    if not on <= set(SWITCHES):
        raise ValueError(f"{text!r} is no setting: must be one of {', '.join(NAMED)}, only-X, without-X or "
                         f"X+Y, X and Y one of {', '.join(SWITCHES)}")
    return on


def setting_flags(on):
    """The trainer's flags for a set of switches, as short as they can be."""
    if on == DEFAULTS:
        return []
    if on == ALL:
        return ["--enable-all-fusion"]
    if on >= DEFAULTS:
        return [f"--enable-{name}" for name in SWITCHES if name in on - DEFAULTS]
    return ["--disable-all-fusion", *(f"--enable-{name}" for name in SWITCHES if name in on)]


def ablation(switches):
    """None, each alone, each left out, all; "all" and "left out" among the given switches."""
    whole = frozenset(switches)
    alone, left_out = [frozenset({name}) for name in switches], [whole - {name} for name in switches]
    return [frozenset(), *alone, *left_out, whole]


def combinations(switches):
    """Every subset of the switches."""
    return [frozenset(c) for size in range(len(switches) + 1) for c in itertools.combinations(switches, size)]


@dataclass(frozen=True, order=True)
class Shape:
    batch_size: int
    seq_len: int
    num_seqs: int

    def __str__(self):
        return f"B {self.batch_size} S {self.seq_len} N {self.num_seqs}"

    def flags(self):
        return ["--batch-size", str(self.batch_size), "--seq-len", str(self.seq_len),
                "--num-seqs", str(self.num_seqs)]


@dataclass(frozen=True)
class Point:
    """One run of the trainer."""
    shape: Shape
    setting: str
    run: int

    def __str__(self):
        return f"{self.shape} {self.setting} run {self.run}"

    def file_name(self):
        return str(self).replace(" ", "_").replace("+", "_")[:200]

    @classmethod
    def of(cls, row):
        return cls(shape_of(row), row["setting"], row["run"])


def shape_of(row):
    return Shape(row["batch_size"], row["seq_len"], row["num_seqs"])


def shapes(study):
    return [Shape(*sizes) for sizes in itertools.product(*(study[key] for key in SIZES))]


def points(study):
    """All points in the order they run: the first run of every point in random order, then the second of
    every point, and so on, so that a machine that drifts does so for all settings alike."""
    generator, ordered = random.Random(study["seed"]), []
    for run in range(1, study["num_runs"] + 1):
        block = [Point(shape, setting, run) for shape in shapes(study) for setting in study["settings"]]
        generator.shuffle(block)
        ordered += block
    return ordered


def common_flags(study):
    """The trainer's flags that all points of a study share."""
    precision = ["--use-amp", "--amp-dtype", study["amp_dtype"]] if study["amp_dtype"] else []
    return ["--device", study["device"], *precision, *study["trainer_flags"]]


def point_flags(study, shape, setting):
    """The trainer's flags for one point; one log line at the end, since logging synchronises the device."""
    steps = str(study["num_steps"])
    return [*shape.flags(), "--num-steps", steps, "--warmup-steps", str(study["warmup_steps"]),
            "--log-every", steps, *common_flags(study), *setting_flags(parse_setting(setting))]
