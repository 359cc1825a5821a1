"""What a performance study measures: sizes, settings and runs, and the points that these make."""
import itertools
import random
from dataclasses import dataclass

from fusion_lab.training.options import flag


def plural(axis):
    """"seq_len" -> "seq_lens", its flag and its key in files; "num_seqs" is one already."""
    return axis if axis.endswith("s") else f"{axis}s"


@dataclass(frozen=True)
class Study:
    """All that a study's results depend on.

    A shape is a size for each axis, {"batch_size": 2, "seq_len": 32, ...}. A point is a shape in a run: one
    process, in which the steps of all settings alternate. Raises ValueError for content of another form.
    """
    program: str  # the model's file, from the project's root if it lies below
    axes: dict    # {"seq_len": "S", ...}
    sizes: dict   # {"seq_len": [32, 64], ...}
    settings: list
    num_runs: int
    num_steps: int
    device: str
    amp_dtype: str | None
    trainer_flags: list

    def __post_init__(self):
        words = [self.program, self.device, *self.settings, *self.trainer_flags, *self.axes.values()]
        numbers = [self.num_runs, self.num_steps, *itertools.chain(*self.sizes.values())]
        if not (all(isinstance(word, str) for word in words) and self.settings
                and self.axes.keys() == self.sizes.keys() and all(self.sizes.values())
                and all(type(number) is int and number > 0 for number in numbers)):
            raise ValueError("not words and whole numbers, each in its place")

    def shapes(self):
        return [dict(zip(self.axes, sizes, strict=True)) for sizes in itertools.product(*self.sizes.values())]

    def points(self):
        """(run, shape) in the order in which they run: every shape once, in random order, then all again, so
        that a machine that drifts hits all alike."""
        shapes = self.shapes()
        return [(run, shape) for run in range(1, self.num_runs + 1)
                for shape in random.Random(run).sample(shapes, len(shapes))]

    def label(self, sizes, without=()):
        """"B 2 S 32 N 8", of a shape or whatever else has the axes as keys."""
        return " ".join(f"{letter} {sizes[axis]}" for axis, letter in self.axes.items()
                        if axis not in without)

    @property
    def main_axis(self):
        """What figures are drawn against: the first axis that is not the batch."""
        return next((axis for axis in self.axes if axis != "batch_size"), next(iter(self.axes)))

    def flags(self, shape):
        """The trainer's flags for a point of this shape, but for its directory."""
        sizes = [word for axis, size in shape.items() for word in (flag(axis), str(size))]
        precision = ["--use-amp", "--amp-dtype", self.amp_dtype] if self.amp_dtype else []
        return [*sizes, "--num-steps", str(self.num_steps), "--device", self.device, *precision,
                *self.trainer_flags, "--compare-fusion", "--variants", " ".join(self.settings)]
