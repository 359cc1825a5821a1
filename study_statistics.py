"""The arithmetic of a performance study, on plain numbers: intervals, exponents, effects of switches."""
import itertools

import numpy as np

CONFIDENCE = 0.95
MEDIAN_INFLATION = np.pi / 2  # variance of a median over that of a mean, large normal samples


def t_quantile(df, confidence=CONFIDENCE):
    """The t with P(|T| < t) = confidence for Student's T with df >= 1 degrees of freedom, not only whole
    ones. T = sqrt(df) tan(a) has density proportional to cos(a)**(df - 1), which is integrated here."""
    angle = np.linspace(0.0, np.pi / 2, 20001)
    density = np.cos(angle).clip(0) ** (df - 1)
    below = np.concatenate([[0.0], np.cumsum((density[1:] + density[:-1]) / 2)])
    return float(np.sqrt(df) * np.tan(np.interp(confidence * below[-1], below, angle)))


def pooled_deviation(groups):
    """(standard deviation within groups, degrees of freedom); (None, 0) where no group has two values."""
    groups = [np.asarray(group, float) for group in groups]
    df = sum(len(group) - 1 for group in groups if len(group))
    if not df:
        return None, 0
    return float(np.sqrt(sum(((group - group.mean()) ** 2).sum() for group in groups if len(group)) / df)), df


def median_variance(n):
    """Variance of the median of n normal values, in units of the variance of one."""
    return (MEDIAN_INFLATION if n > 2 else 1.0) / n


def ratio_interval(above, below, spread_above, spread_below):
    """(ratio, low, high) of median(above) / median(below), lists of positive figures, one per run.

    The interval is Welch's t interval of the logarithms. Each spread is (standard deviation of the logarithm
    of one run, degrees of freedom); the two may be the same pooled one. Without degrees of freedom there is
    no interval: low and high are None.
    """
    ratio = float(np.median(above) / np.median(below))
    if not spread_above[1] or not spread_below[1]:
        return ratio, None, None
    shares = [spread[0] ** 2 * median_variance(len(runs))
              for spread, runs in ((spread_above, above), (spread_below, below))]
    if spread_above is spread_below or sum(shares) == 0:
        df = spread_above[1]
    else:
        df = sum(shares) ** 2 / (shares[0] ** 2 / spread_above[1] + shares[1] ** 2 / spread_below[1])
    half = t_quantile(df) * np.sqrt(sum(shares))
    return ratio, float(ratio * np.exp(-half)), float(ratio * np.exp(half))


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
    above 1 the two help each other. Each is (factor, low, high); the interval comes from the spread between
    runs alone, and is None for single runs. None where the points do not determine the effects.
    """
    signs = 2.0 * np.asarray(levels, float) - 1.0
    pairs = list(itertools.combinations(range(len(names)), 2))
    design = np.column_stack([np.ones(len(signs)), signs, *(signs[:, a] * signs[:, b] for a, b in pairs)])
    if np.linalg.matrix_rank(design) < design.shape[1]:
        return None
    logs = [np.log(np.asarray(group, float)) for group in groups]
    solve = np.linalg.pinv(design)
    coefficients = solve @ np.array([values.mean() for values in logs])
    deviation, df = pooled_deviation(logs)
    errors = df and deviation * np.sqrt(solve ** 2 @ [1 / len(values) for values in logs])

    def factor(index, scale):
        estimate = -scale * coefficients[index]
        if not df:
            return float(np.exp(estimate)), None, None
        half = t_quantile(df) * scale * errors[index]
        return tuple(float(np.exp(part)) for part in (estimate, estimate - half, estimate + half))

    main = {name: factor(1 + i, 2) for i, name in enumerate(names)}
    interaction = {(names[a], names[b]): factor(1 + len(names) + i, 4) for i, (a, b) in enumerate(pairs)}
    return dict(main=main, interaction=interaction)


def pareto(costs):
    """Indices of the points that no other beats in one cost without losing in another, by the first cost."""
    costs = np.asarray(costs, float)
    best = [i for i, mine in enumerate(costs)
            if not any((other <= mine).all() and (other < mine).any() for other in costs)]
    return sorted(best, key=lambda i: tuple(costs[i]))
