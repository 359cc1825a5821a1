"""Did a point get slower or larger than in an earlier study?"""
import math
from dataclasses import dataclass

from fusion_lab.study.design import program_of
from fusion_lab.study.records import checked
from fusion_lab.study.results import Machine
from fusion_lab.study.statistics import Gain, ratio_interval
from fusion_lab.study.summary import FORMAT, PointSummary, gain_of
from fusion_lab.training.files import UserError, counted
from fusion_lab.training.reading import read_json

ALIKE = ("trainer_flags", "amp_dtype")  # in both studies


@dataclass(frozen=True)
class Reference:
    """What is read of an earlier results_summary.json."""
    study: dict  # "program", "num_runs" and what must be ALIKE
    machines: tuple
    points: tuple

    @classmethod
    def read(cls, content, axes):
        """The reference in a JSON object. Raises ValueError."""
        if content.get("format") != FORMAT or not content.get("points"):
            raise ValueError(f"must be of the format {FORMAT}")
        study, kinds = checked(content.get("study"), dict), dict(trainer_flags=list, num_runs=int)
        known = {key: checked(study.get(key), kinds.get(key, str | None)) for key in (*ALIKE, "num_runs")}
        machines = tuple(Machine.read(machine) for machine in checked(content.get("machine"), list))
        points = tuple(PointSummary.read(point, axes) for point in checked(content["points"], list))
        return cls(dict(known, program=program_of(study)), machines, points)


def read_reference(path, study):
    """An earlier results_summary.json with the same program and trainer flags. Raises UserError."""
    try:
        reference = Reference.read(read_json(path), study.axes)
    except OSError as error:
        raise UserError(f"--check-against {path}: {error.strerror}") from None
    except ValueError:
        raise UserError(f"--check-against {path}: not the results_summary.json of a performance study of "
                        f"{study.vocabulary.program.name}") from None
    ours = study.as_json()
    for key in ("program", *ALIKE):
        if reference.study[key] != ours[key]:
            raise UserError(f"--check-against {path}: made with {key} = {reference.study[key]}, this study "
                            f"has {ours[key]}")
    there, here = reference.study["num_runs"], study.num_runs
    if min(there, here) < 2:
        raise UserError(f"--check-against {path}: without at least two runs on both sides (--num-runs; there "
                        f"{there}, here {here}) noise is unknown, so no verdict")
    return reference


def same_machine(summary, reference):
    def hardware(machines):
        return {(machine.gpu_name, None if machine.gpu_name else machine.host_cpu) for machine in machines}
    return hardware(summary.machines) == hardware(reference.machines)


def judged(low, high, passes_below=None, passes_above=None):
    """PASS or FAIL when the whole interval lies on one side of the limit, else UNDECIDED."""
    if low is None:
        return "UNDECIDED"
    if passes_below is not None:
        return "PASS" if high <= passes_below else "FAIL" if low > passes_below else "UNDECIDED"
    return "PASS" if low >= passes_above else "FAIL" if high < passes_above else "UNDECIDED"


def slowdown(now, then, on_same_machine):
    """The Gain by which a point got slower: in step time on the same machine, on another one in speed-up over
    the baseline (independent errors of the two added in quadrature); None if unknown, as the baseline's own
    is there."""
    if on_same_machine:
        return ratio_interval(now.run_medians_ms, then.run_medians_ms)
    if now.setting == "baseline" or not now.speedup_low or not then.speedup_low:
        return None
    half = math.hypot(*(math.log(p.speedup_high / p.speedup_low) / 2 for p in (now, then)))
    factor = then.speedup / now.speedup
    return Gain(factor, factor * math.exp(-half), factor * math.exp(half))


def check_point(now, then, on_same_machine, min_speedup, max_regression):
    """[("time" or "memory", verdict, what)] of one point; one that has failed fails in time. min_speedup may
    be None."""
    verdicts = []
    if not now.n:
        return [("time", "FAIL", now.reason)] if not then or then.n else []
    if min_speedup is not None:
        if now.speedup is None:
            verdicts.append(("time", "FAIL", "no baseline to compare with"))
        else:
            verdict = judged(now.speedup_low, now.speedup_high, passes_above=min_speedup)
            verdicts.append(("time", verdict,
                             f"speed-up {spoken(gain_of(now))}, at least {min_speedup:g} wanted"))
    if not then or not then.n:
        return verdicts
    limit = 1 + max_regression
    change = slowdown(now, then, on_same_machine)
    if change:
        what = "step time" if on_same_machine else "lost speed-up"
        verdicts.append(("time", judged(change.low, change.high, passes_below=limit),
                         f"{what} {spoken(change)} of the reference, at most {limit:g} allowed"))
    if now.peak_memory_mb and then.peak_memory_mb:
        ratio = now.peak_memory_mb / then.peak_memory_mb
        verdicts.append(("memory", "FAIL" if ratio > limit else "PASS",
                         f"peak memory {ratio:.3f}x of the reference, at most {limit:g} allowed"))
    return verdicts


def spoken(gain):
    """A Gain for people: "1.200x [1.100, 1.300]"."""
    return f"{gain.factor:.3f}x" + ("" if gain.low is None else f" [{gain.low:.3f}, {gain.high:.3f}]")


def check(summary, reference, min_speedup, max_regression):
    """Print every verdict that is not PASS; exit code 1 if a point got worse beyond noise, or if noise left
    no verdict on time at all, else 0."""
    earlier = {(p.shape, p.setting): p for p in reference.points}
    here = {(p.shape, p.setting) for p in summary.points}
    common = here & earlier.keys()
    if not common:
        raise UserError("--check-against: this study has no point in common with the reference")
    alike = same_machine(summary, reference)
    principal = summary.vocabulary.principal(summary.study.settings)
    print(f"\nCheck against the reference, {counted(len(common), 'point')} in common, "
          + ("same machine: step times compared" if alike else "another machine: speed-ups compared")
          + f", intervals of {100 * summary.confidence:g}%")
    counts = {kind: dict(PASS=0, FAIL=0, UNDECIDED=0) for kind in ("time", "memory")}
    for point in summary.points:
        then = earlier.get((point.shape, point.setting))
        wanted = min_speedup if point.setting in principal else None
        for kind, verdict, what in check_point(point, then, alike, wanted, max_regression):
            counts[kind][verdict] += 1
            if verdict != "PASS":
                print(f"   {verdict:9} {point.shape} {point.setting}: {what}")
    if absent := [f"{shape} {setting}" for shape, setting in earlier if (shape, setting) not in here]:
        print(f"   of the reference, not in this study: {', '.join(absent)}")
    return verdict_of(counts)


def verdict_of(counts):
    """Print the verdict that the counted ones make together; its exit code."""
    if counts["time"]["UNDECIDED"]:
        print("   UNDECIDED: the interval holds the limit; more --num-runs, also of this --study-name, would "
              "narrow it")
    failed = any(of_kind["FAIL"] for of_kind in counts.values())
    word = "FAIL" if failed else "PASS" if counts["time"]["PASS"] else "UNDECIDED"
    print(f"{word}:", "; ".join(f"{kind} " + ", ".join(f"{n} {v.lower()}" for v, n in of_kind.items())
                                for kind, of_kind in counts.items()))
    return 0 if word == "PASS" else 1
