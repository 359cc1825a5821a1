"""What a session found, as records, and the three sentences that matter most in it."""
from collections import Counter
from dataclasses import asdict, dataclass, field

import numpy as np

from fusion_lab.measuring.clocks import quantiles
from fusion_lab.measuring.flops import REST
from fusion_lab.measuring.tables import code
from fusion_lab.training.program import Program, Settings

LAUNCH_BOUND, BUSY = 0.5, 0.85  # shares of the step: below, the GPU mostly waits; above, it mostly works
UNDECIDED = "undecided"
AGREEMENT = 0.8  # share of the steps that must say the same, for a sentence to say it
TWOFOLD = 2.0  # where sub-layers of equal work differ by as much, the clock saw something else
NO_WORK = ("view", "autograd's own", "other")  # kinds of operations that say nothing about the device
LAST_RESORT = 1e-3  # weight of a finding that is made where nothing heavier was found


@dataclass
class SublayerTime:
    """One sub-layer, or REST, in one direction or phase; per step, all blocks together. total_us is what
    `share` is of; self_us and traced_host_us are the profiler's."""
    name: str
    direction: str
    calls: float
    total_us: float
    self_us: float
    traced_host_us: float
    share: float
    launches: float | None
    allocated_mb: float | None
    saved_activation_mb: float | None


@dataclass
class Launch:
    """Is a GPU's step bound by launching? The figures, the verdict, and the arithmetic in words."""
    launches: float | None
    step_ms: float
    busy_ms: float  # with a kernel running
    verdict: str
    text: str


@dataclass
class Analysis:
    """A session. samples: one dict a step, {(sub-layer, direction): share of the step}; twins: pairs of
    sub-layers that do equal work; launch: None on a CPU. as_dict() is the content of fusion_analysis.json,
    where ceilings, roofline and compared_with stand only if they were asked for."""
    program: Program
    settings: Settings
    timestamp: str
    profile_steps: int
    system_info: dict
    trace: str
    time_kind: str
    unit: str
    step: dict
    total_us: float
    sublayers: list
    launches_per_step: int | None
    coverage: dict
    kernels: list
    kinds: dict
    short_kernels: dict
    saved_activation_mb: dict
    flops_per_step: int
    flops_share: dict
    memory_peak_mb: float | None
    launch: Launch | None
    unrecorded: list = field(default_factory=list)  # by the profiler, in sentences
    samples: list = field(default_factory=list)
    twins: list = field(default_factory=list)
    ceilings: dict | None = None
    roofline: list | None = None
    compared_with: dict | None = None

    OF_THE_RUN = ("program", "settings", "samples", "twins")
    ASKED_FOR = ("ceilings", "roofline", "compared_with")

    def as_dict(self):
        configs = self.settings.as_dict()
        result = dict(mode="pytorch_profiler", timestamp=self.timestamp)
        result.update({key: configs[key] for key in ("config", "fusion_config", "training_params")})
        for name, value in vars(self).items():
            if name not in self.OF_THE_RUN and not (name in self.ASKED_FOR and value is None):
                result[name] = value
        return dict(result, sublayers=[asdict(e) for e in self.sublayers], findings=self.findings(),
                    launch=self.launch and asdict(self.launch))

    def times(self):
        """{sub-layer: share of the step, forward and backward}"""
        return totals({(e.name, e.direction): e.share for e in self.sublayers})

    def findings(self):
        """Three sentences on what matters most here: whether times can be trusted, the heaviest sub-layer,
        then of all candidates those that are about the largest share of the step."""
        noise = noise_of_twins(self)
        first = [noise] if noise else []
        first += heaviest(self, noise)
        candidates = [*least_efficient(self, noise), *most_saved(self), *launching(self),
                      *heaviest_kind(self), *slowest_phase(self), *short_ones(self), *longest(self)]
        return [*first, *(text for _, text in sorted(candidates, key=lambda pair: -pair[0]))][:3]


def totals(amounts):
    """{(sub-layer, direction): amount} -> {sub-layer: sum}, REST left out."""
    sums = {}
    for (name, _), amount in amounts.items():
        if name != REST:
            sums[name] = sums.get(name, 0) + amount
    return sums


def launch_arithmetic(launches, step_s, busy_s):
    """Launch of a GPU's steps, which take step_s seconds, one number or one a step, busy_s of them with a
    kernel running. Steps that disagree make the verdict UNDECIDED."""
    step, shares = float(np.median(step_s)), busy_s / np.asarray(step_s)
    lowest, _, highest = quantiles(shares)
    verdict = launch_verdict(lowest) if launch_verdict(lowest) == launch_verdict(highest) else UNDECIDED
    sums = (f"kernels run during {1e3 * busy_s:.2f} ms of a {1e3 * step:.2f} ms step, "
            f"{percent(busy_s / step, shares)}; the GPU waits for the other "
            f"{1e3 * max(step - busy_s, 0):.2f} ms")
    if launches:  # which an outer profiler counts instead, where there is one
        sums += (f"; of {launches:.0f} kernels one comes every {1e6 * step / launches:.1f} µs and runs "
                 f"{1e6 * busy_s / launches:.1f} µs on average")
    return Launch(launches, 1e3 * step, 1e3 * busy_s, verdict, f"{verdict}: {sums}")


def launch_verdict(busy_share):
    return ("launch-bound" if busy_share < LAUNCH_BOUND else
            "partly launch-bound" if busy_share < BUSY else "not launch-bound")


def percent(share, shares):
    """"32% (p20 to p80 of the steps 30 to 35%)"; one step has no spread."""
    if np.size(shares) < 2:
        return f"{100 * share:.0f}%"
    lowest, _, highest = quantiles(shares)
    return f"{100 * share:.0f}% (p20 to p80 of the steps {100 * lowest:.0f} to {100 * highest:.0f}%)"


def winners(analysis, score):
    """[(name, in how many steps), ...]: sub-layers by how often score(name, its share) is the largest of a
    step, the most frequent first, until they stand for nearly all steps."""
    samples = [totals(sample) for sample in analysis.samples] or [analysis.times()]
    counts = Counter(max(sample, key=lambda name: score(name, sample[name])) for sample in samples)
    chosen, covered = [], 0
    for name, count in counts.most_common():
        if covered < AGREEMENT * len(samples):
            chosen.append((name, count))
            covered += count
    return chosen


def noise_of_twins(analysis):
    """A sentence where two sub-layers of equal work took very different times, the worst of them; or None."""
    times, worst = analysis.times(), (TWOFOLD, None, None)
    for pair in analysis.twins:
        slow, fast = sorted(pair, key=lambda name: -times.get(name, 0))
        if times.get(fast):
            worst = max(worst, (times[slow] / times[fast], slow, fast), key=lambda entry: entry[0])
    ratio, slow, fast = worst
    return slow and (f"`{slow}` took {ratio:.1f} times as long as `{fast}`, which does equal work: "
                     "differences of that size between sub-layers are noise in this session; repeat it on a "
                     "quiet machine.")


def heaviest(analysis, noise):
    """[the sentence on the sub-layer that takes most time], withheld where twins or steps disagree."""
    times, flops = analysis.times(), analysis.flops_share
    if not times or noise:
        return []
    first = winners(analysis, lambda _, share: share)
    of_all = f"of the {len(analysis.program.model.SUBLAYERS)} sub-layers"
    if len(first) == 1:
        (name, _), = first
        share = percent(times[name], [totals(sample)[name] for sample in analysis.samples])
        return [f"`{name}` takes most time {of_all}: {share} of the step, with {100 * flops[name]:.0f}% of "
                "their FLOPs."]
    if len(first) == 2:
        (a, _), (b, _) = first
        return [f"`{a}` and `{b}` take most time {of_all}, now one, now the other: {100 * times[a]:.0f}% and "
                f"{100 * times[b]:.0f}% of the step, with {100 * flops[a]:.0f}% and {100 * flops[b]:.0f}% of "
                "their FLOPs."]
    steps, counts = len(analysis.samples), ", ".join(f"`{name}` {count}x" for name, count in first)
    return [f"Which sub-layer takes most time is undecided: in {steps} steps it was {counts}."]


def least_efficient(analysis, noise):
    times, flops = analysis.times(), analysis.flops_share
    if not times or noise:
        return
    first = winners(analysis, lambda name, share: share - flops[name])
    name = first[0][0]
    gap = times[name] - flops[name]
    if len(first) == 1 and gap > 0 and name != max(times, key=times.get):
        yield gap, (f"`{name}` is the least efficient: {100 * times[name]:.0f}% of the time for "
                    f"{100 * flops[name]:.0f}% of the sub-layers' FLOPs: it moves data or waits.")


def most_saved(analysis):
    saved = analysis.saved_activation_mb
    total = sum(saved.values())
    if analysis.times() and total:
        name = max(saved, key=saved.get)
        yield saved[name] / total / 2, (
            f"`{name}` keeps {saved[name]:.1f} MB for backward, {100 * saved[name] / total:.0f}% of all "
            f"saved activations ({total:.1f} MB).")


def launching(analysis):
    launch = analysis.launch
    if launch and launch.verdict in ("launch-bound", "partly launch-bound"):
        yield (launch.step_ms - launch.busy_ms) / launch.step_ms, f"The step is {launch.text}."


def heaviest_kind(analysis):
    kinds = {k: v for k, v in analysis.kinds.items() if k not in NO_WORK and k != "matrix product"}
    if kinds:
        name = max(kinds, key=lambda k: kinds[k]["share"])
        entry, product = kinds[name], analysis.kinds.get("matrix product", dict(share=0.0))["share"]
        yield entry["share"], (
            f"Beside matrix products ({100 * product:.0f}%), the kind that takes most is {name}: "
            f"{100 * entry['share']:.0f}% of the {analysis.unit}s' own time in {entry['calls']:.0f} calls.")


def slowest_phase(analysis):
    phases = analysis.step["phases_ms"]
    if analysis.unit == "kernel" and analysis.settings.fusion.enable_cuda_graphs:
        return  # one phase
    name = max(phases, key=phases.get)
    yield LAST_RESORT, (f"The {name} phase takes most of the step: "
                        f"{100 * phases[name] / sum(phases.values()):.0f}%, {phases[name]:.2f} ms.")


def short_ones(analysis):
    small = analysis.short_kernels
    if analysis.unit == "kernel":
        yield small["time_share"], (
            f"{100 * small['count_share']:.0f}% of the kernels are shorter than {small['limit_us']} µs; "
            f"together they take {100 * small['time_share']:.0f}% of the time.")


def longest(analysis):
    top, unit = analysis.kernels[0], analysis.unit
    yield top["share"], (f"The longest {unit} is {code(top['name'], 80)}: {100 * top['share']:.0f}% of all "
                         f"{unit}s' own time in {top['calls']:.0f} calls of "
                         f"{top['self_us'] / top['calls']:.1f} µs.")
