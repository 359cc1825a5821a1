"""How many times as fast something is, and how sure that is: the form that every speed-up here has."""
import math
import statistics
from typing import NamedTuple

import numpy as np

# P(|T| < t) = 95% for Student's T; of degrees of freedom in between, the next lower ones count.
T = {1: 12.706, 2: 4.303, 3: 3.182, 4: 2.776, 5: 2.571, 6: 2.447, 8: 2.306, 10: 2.228, 15: 2.131, 30: 2.042}
KEYS = "speedup", "speedup_low", "speedup_high"


class Gain(NamedTuple):
    """A factor and its 95% interval; low and high are None where there is too little for one."""
    factor: float
    low: float | None = None
    high: float | None = None

    @classmethod
    def read(cls, entry):
        """The Gain of a dict that has it under KEYS."""
        return cls(*(entry[key] for key in KEYS))

    def as_dict(self):
        return dict(zip(KEYS, self, strict=True))

    @property
    def decided(self):
        """Whether the interval leaves 1, that is no effect, outside."""
        return self.low is not None and not self.low <= 1 <= self.high

    def __str__(self):
        """"1.20x (1.10, 1.30)" """
        return f"{self.factor:.2f}x" + ("" if self.low is None else f" ({self.low:.2f}, {self.high:.2f})")

    def in_words(self):
        """"1.86x (95% interval 1.80 to 1.92)" """
        if self.low is None:
            return f"{self.factor:.2f}x (too few steps for an interval)"
        noise = "" if self.decided else ", within noise"
        return f"{self.factor:.2f}x (95% interval {self.low:.2f} to {self.high:.2f}{noise})"


def median_interval(values):
    """(low, high), a 95% confidence interval of the median of the distribution from which the values were
    drawn. Both are values of the sample, chosen by rank, so the form of the distribution does not matter.
    Fewer than six values give (None, None)."""
    values, rank, missed = np.sort(values), 0, 0.0  # rank: 1 if the interval ends at the smallest and largest
    while (missed := missed + 2 * math.comb(len(values), rank) / 2 ** len(values)) <= 0.05:
        rank += 1
    return (float(values[rank - 1]), float(values[-rank])) if rank else (None, None)


def gain_of_rounds(ratios):
    """The Gain of ratios of steps that were taken in turn: their median."""
    return Gain(float(np.median(ratios)), *median_interval(ratios))


def gain_of_runs(ratios):
    """The Gain of ratios, one for each run: their geometric mean, and Student's t on logarithms. None without
    any."""
    logs = np.log(ratios)
    if not len(logs):
        return None
    middle = logs.mean()
    values = [middle]
    if len(logs) > 1:
        half = T[max(df for df in T if df < len(logs))] * logs.std(ddof=1) / len(logs) ** 0.5
        values += [middle - half, middle + half]
    return Gain(*map(float, np.exp(values)))


def gain_over_earlier(before, after):
    """The Gain of one run over an earlier one, by the rates of their single steps: the ratio of the medians,
    and its interval by those of both. How a machine changes from one run to the next is not in it."""
    factor = statistics.median(after) / statistics.median(before)
    (slowest, fastest), (low, high) = median_interval(before), median_interval(after)
    return Gain(factor) if low is None or fastest is None else Gain(factor, low / fastest, high / slowest)
