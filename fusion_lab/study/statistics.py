"""The arithmetic of a performance study, on plain numbers: intervals, exponents, effects of switches."""
import itertools
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

    def as_json(self):
        return self._asdict()


def t_quantile(df, confidence=CONFIDENCE):
    """The t with P(|T| < t) = confidence for Student's T with df >= 1 degrees of freedom, not only whole
    ones. T = sqrt(df) tan(a) has density proportional to cos(a)**(df - 1), which is integrated here."""
    angle = np.linspace(0.0, np.pi / 2, 20001)
    density = np.cos(angle).clip(0) ** (df - 1)
    below = np.concatenate([[0.0], np.cumsum((density[1:] + density[:-1]) / 2)])
    return float(np.sqrt(df) * np.tan(np.interp(confidence * below[-1], below, angle)))


def median_inflation(n):
    """Variance of the median of n normal values over that of their mean."""
    return MEDIAN_INFLATION if n > 2 else 1.0


def half_width(weights, groups, inflation=lambda n: 1.0):
    """Half the t interval of sum(weight * mean of group), None where a group has less than two values.

    Every group counts with the variance of its own values, since replays of a CUDA graph vary 50 times less
    than eager steps; degrees of freedom are Satterthwaite's, so that this is Welch's interval for two groups.
    inflation(n) is the variance of the centre that is used over that of the mean.
    """
    used = [(weight, group) for weight, group in zip(weights, groups, strict=True)
            if not np.isclose(weight, 0)]
    if any(len(group) < 2 for _, group in used):
        return None
    shares = np.array([weight ** 2 * np.var(group, ddof=1) * inflation(len(group)) / len(group)
                       for weight, group in used])
    if not shares.sum():
        return 0.0
    df = shares.sum() ** 2 / sum(shares ** 2 / [len(group) - 1 for _, group in used])
    return t_quantile(df) * float(np.sqrt(shares.sum()))


def with_interval(log_factor, half):
    """The Gain of a logarithm and its half_width."""
    if half is None:
        return Gain(float(np.exp(log_factor)))
    return Gain(*(float(np.exp(part)) for part in (log_factor, log_factor - half, log_factor + half)))


def ratio_interval(above, below):
    """The Gain median(above) / median(below), lists of positive figures, one per run."""
    return mean_ratio_interval([(above, below)])


def mean_ratio_interval(pairs):
    """The Gain that is the geometric mean of median(above) / median(below) over pairs of such lists."""
    groups = [np.log(group) for pair in pairs for group in pair]
    weights = [sign / len(pairs) for _ in pairs for sign in (1, -1)]
    middle = np.mean([np.log(np.median(above) / np.median(below)) for above, below in pairs])
    return with_interval(middle, half_width(weights, groups, median_inflation))


def fit_exponent(x, y):
    """(p, standard error) of y = c x**p by least squares on logarithms; error None below three points."""
    x, y = np.log(np.asarray(x, float)), np.log(np.asarray(y, float))
    centred = x - x.mean()
    slope = float(centred @ y / (centred @ centred))
    if len(x) < 3:
        return slope, None
    residual = y - y.mean() - slope * centred
    return slope, float(np.sqrt(residual @ residual / (len(x) - 2) / (centred @ centred)))


def factor_effects(names, levels, groups):
    """Main effects and pairwise interactions of switches on time, as factors of speed.

    levels: one 0/1 row per design point, a column per name; groups: the run times of each point, any unit.
    Least squares on log(time) with an intercept, a term for every switch and one for every pair, coded -1/+1;
    on a whole 2**n design that is the mean over all settings of the other switches. `main[a]` is the speed-up
    of switching a on. `interaction[a, b]` is the speed-up of a with b on, over the speed-up of a with b off:
    above 1 the two help each other. Each is a Gain, whose interval comes from the spread between the runs of
    each point; single runs have none. None where the points do not determine the effects.
    """
    signs = 2.0 * np.asarray(levels, float) - 1.0
    pairs = list(itertools.combinations(range(len(names)), 2))
    design = np.column_stack([np.ones(len(signs)), signs, *(signs[:, a] * signs[:, b] for a, b in pairs)])
    if np.linalg.matrix_rank(design) < design.shape[1]:
        return None
    logs = [np.log(np.asarray(group, float)) for group in groups]
    solve = np.linalg.pinv(design)
    coefficients = solve @ np.array([values.mean() for values in logs])

    def factor(index, scale):
        return with_interval(-scale * coefficients[index], half_width(scale * solve[index], logs))

    main = {name: factor(1 + i, 2) for i, name in enumerate(names)}
    interaction = {(names[a], names[b]): factor(1 + len(names) + i, 4) for i, (a, b) in enumerate(pairs)}
    return dict(main=main, interaction=interaction)


def pareto(costs, surely_less=None):
    """Indices of the points that no other one beats, by the first cost. One beats another if it costs surely
    less in something, and in nothing more; where costs are uncertain, surely_less(a, b) says so of two
    indices, cost by cost."""
    costs = np.asarray(costs, float)
    surely_less = surely_less or (lambda a, b: costs[a] < costs[b])

    def beaten(mine):
        return any((costs[other] <= costs[mine]).all() and any(surely_less(other, mine))
                   for other in range(len(costs)))
    return sorted((i for i in range(len(costs)) if not beaten(i)), key=lambda i: tuple(costs[i]))
