"""The arithmetic of a performance study, on plain numbers: intervals and exponents."""
from typing import NamedTuple

import numpy as np

CONFIDENCE = 0.95
MEDIAN_INFLATION = np.pi / 2  # variance of a median over that of a mean, large normal samples


class Gain(NamedTuple):
    """A factor and its interval; low and high are None where noise is unknown."""
    factor: float
    low: float | None = None
    high: float | None = None

    @property
    def decided(self):
        """Whether the interval leaves 1, that is no effect, outside."""
        return self.low is not None and not self.low <= 1 <= self.high

    def in_words(self, form=".2f", times="×"):
        """"1.20× [1.10, 1.30]" """
        interval = "" if self.low is None else f" [{self.low:{form}}, {self.high:{form}}]"
        return f"{self.factor:{form}}{times}{interval}"


def t_quantile(df, confidence=CONFIDENCE):
    """The t with P(|T| < t) = confidence for Student's T with df >= 1 degrees of freedom, not only whole
    ones. T = sqrt(df) tan(a) has density proportional to cos(a)**(df - 1), which is integrated here."""
    angle = np.linspace(0.0, np.pi / 2, 20001)
    density = np.cos(angle).clip(0) ** (df - 1)
    below = np.concatenate([[0.0], np.cumsum((density[1:] + density[:-1]) / 2)])
    return float(np.sqrt(df) * np.tan(np.interp(confidence * below[-1], below, angle)))


def half_width(groups):
    """Half the t interval of the sum of the groups' medians, each added or subtracted; None where a group has
    less than two values.

    Every group counts with the variance of its own values, since replays of a CUDA graph vary 50 times less
    than eager steps; degrees of freedom are Satterthwaite's, so that this is Welch's interval for two groups.
    """
    if any(len(group) < 2 for group in groups):
        return None
    inflated = [MEDIAN_INFLATION if len(group) > 2 else 1.0 for group in groups]
    shares = np.array([np.var(group, ddof=1) * inflation / len(group)
                       for group, inflation in zip(groups, inflated, strict=True)])
    if not shares.sum():
        return 0.0
    df = shares.sum() ** 2 / sum(shares ** 2 / [len(group) - 1 for group in groups])
    return t_quantile(df) * float(np.sqrt(shares.sum()))


def ratio_interval(above, below):
    """The Gain median(above) / median(below), lists of positive figures, one per run."""
    return mean_ratio_interval([(above, below)])


def mean_ratio_interval(pairs):
    """The Gain that is the geometric mean of median(above) / median(below) over pairs of such lists."""
    middle = float(np.mean([np.log(np.median(above) / np.median(below)) for above, below in pairs]))
    half = half_width([np.log(group) for pair in pairs for group in pair])
    if half is None:
        return Gain(float(np.exp(middle)))
    return Gain(*(float(np.exp(part)) for part in (
        middle, middle - half / len(pairs), middle + half / len(pairs))))


def fit_exponent(x, y):
    """(p, standard error) of y = c x**p by least squares on logarithms; error None below three points."""
    x, y = np.log(np.asarray(x, float)), np.log(np.asarray(y, float))
    centred = x - x.mean()
    slope = float(centred @ y / (centred @ centred))
    if len(x) < 3:
        return slope, None
    residual = y - y.mean() - slope * centred
    return slope, float(np.sqrt(residual @ residual / (len(x) - 2) / (centred @ centred)))
