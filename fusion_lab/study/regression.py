"""Did a point get slower or larger than in an earlier study?"""
import json
import math

import numpy as np

from fusion_lab.study.design import shape_of
from fusion_lab.study.statistics import ratio_interval
from fusion_lab.study.summary import FORMAT, principal_settings
from fusion_lab.training.files import UserError

READ_OF_POINTS = ("setting", "n", "run_medians_ms", "speedup", "speedup_low", "speedup_high",
                  "peak_memory_mb")


def read_reference(path, study):
    """An earlier results_summary.json with the same trainer flags. Raises UserError."""
    try:
        with open(path, encoding="utf-8") as file:
            reference = json.load(file)
        known = reference["format"] == FORMAT and bool(reference["points"])
        theirs = {key: reference["study"][key] for key in ("trainer_flags", "amp_dtype", "num_runs")}
        known = known and isinstance(theirs["num_runs"], int)
        same_machine(reference, reference)
        for point in reference["points"]:
            shape_of(point), [point[key] for key in READ_OF_POINTS], np.log(point["run_medians_ms"])
    except OSError as error:
        raise UserError(f"--check-against {path}: {error.strerror}") from None
    except (ValueError, KeyError, TypeError):
        known = False
    if not known:
        raise UserError(f"--check-against {path}: not the results_summary.json of a performance study")
    for key in ("trainer_flags", "amp_dtype"):
        if theirs[key] != study[key]:
            raise UserError(f"--check-against {path}: made with {key} = {theirs[key]}, this study has "
                            f"{study[key]}")
    if theirs["num_runs"] < 2 or study["num_runs"] < 2:
        raise UserError(f"--check-against {path}: without at least two runs on both sides (--num-runs; there "
                        f"{theirs['num_runs']}, here {study['num_runs']}) noise is unknown, so no verdict")
    return reference


def same_machine(summary, reference):
    def hardware(of):
        return {(m["gpu_name"], None if m["gpu_name"] else m["host_cpu"]) for m in of["machine"]}
    return hardware(summary) == hardware(reference)


def judged(low, high, passes_below=None, passes_above=None):
    """PASS or FAIL when the whole interval lies on one side of the limit, else UNDECIDED."""
    if low is None:
        return "UNDECIDED"
    if passes_below is not None:
        return "PASS" if high <= passes_below else "FAIL" if low > passes_below else "UNDECIDED"
    return "PASS" if low >= passes_above else "FAIL" if high < passes_above else "UNDECIDED"


def slowdown(now, then, on_same_machine):
    """(factor, low, high) by which a point got slower: in step time on the same machine, on another one in
    speed-up over the baseline (independent errors of the two added in quadrature); None if unknown, as the
    baseline's own is there."""
    if on_same_machine:
        return ratio_interval(now["run_medians_ms"], then["run_medians_ms"])
    if now["setting"] == "baseline" or not now["speedup_low"] or not then["speedup_low"]:
        return None
    half = math.hypot(*(math.log(p["speedup_high"] / p["speedup_low"]) / 2 for p in (now, then)))
    factor = then["speedup"] / now["speedup"]
    return factor, factor * math.exp(-half), factor * math.exp(half)


def check_point(now, then, on_same_machine, min_speedup, max_regression, principal):
    """[("time" or "memory", verdict, what)] of one point; one that has failed fails in time."""
    verdicts = []
    if not now["n"]:
        return [("time", "FAIL", now["reason"])] if not then or then["n"] else []
    if min_speedup is not None and now["setting"] in principal:
        if now["speedup"] is None:
            verdicts.append(("time", "FAIL", "no baseline to compare with"))
        else:
            verdict = judged(now["speedup_low"], now["speedup_high"], passes_above=min_speedup)
            verdicts.append(("time", verdict,
                             f"speed-up {speedup_text(now)}, at least {min_speedup:g} wanted"))
    if not then or not then["n"]:
        return verdicts
    limit = 1 + max_regression
    change = slowdown(now, then, on_same_machine)
    if change:
        what = "step time" if on_same_machine else "lost speed-up"
        verdicts.append(("time", judged(*change[1:], passes_below=limit),
                         f"{what} {spoken(*change)} of the reference, at most {limit:g} allowed"))
    if now["peak_memory_mb"] and then["peak_memory_mb"]:
        ratio = now["peak_memory_mb"] / then["peak_memory_mb"]
        verdicts.append(("memory", "FAIL" if ratio > limit else "PASS",
                         f"peak memory {ratio:.3f}x of the reference, at most {limit:g} allowed"))
    return verdicts


def speedup_text(point):
    return spoken(point["speedup"], point["speedup_low"], point["speedup_high"])


def spoken(factor, low, high):
    return f"{factor:.3f}x" if low is None else f"{factor:.3f}x [{low:.3f}, {high:.3f}]"


def check(summary, reference, min_speedup, max_regression):
    """Print every verdict that is not PASS; exit code 1 if a point got worse beyond noise, or if noise left
    no verdict on time at all, else 0."""
    earlier = {(shape_of(p), p["setting"]): p for p in reference["points"]}
    common = [p for p in summary["points"] if (shape_of(p), p["setting"]) in earlier]
    if not common:
        raise UserError("--check-against: this study has no point in common with the reference")
    alike = same_machine(summary, reference)
    principal = principal_settings(summary["study"]["settings"])
    print(f"\nCheck against the reference, {len(common)} points in common, "
          + ("same machine: step times compared" if alike else "another machine: speed-ups compared")
          + f", intervals of {100 * summary['confidence']:g}%")
    counts = {kind: dict(PASS=0, FAIL=0, UNDECIDED=0) for kind in ("time", "memory")}
    for point in summary["points"]:
        then = earlier.get((shape_of(point), point["setting"]))
        for kind, verdict, what in check_point(point, then, alike, min_speedup, max_regression, principal):
            counts[kind][verdict] += 1
            if verdict != "PASS":
                print(f"   {verdict:9} {shape_of(point)} {point['setting']}: {what}")
    here = {(shape_of(p), p["setting"]) for p in summary["points"]}
    if absent := [f"{shape} {setting}" for shape, setting in earlier if (shape, setting) not in here]:
        print(f"   of the reference, not in this study: {', '.join(absent)}")
    if counts["time"]["UNDECIDED"]:
        print("   UNDECIDED: the interval holds the limit; more --num-runs, also of this --study-name, would "
              "narrow it")
    failed = any(of_kind["FAIL"] for of_kind in counts.values())
    word = "FAIL" if failed else "PASS" if counts["time"]["PASS"] else "UNDECIDED"
    print(f"{word}:", "; ".join(f"{kind} " + ", ".join(f"{n} {v.lower()}" for v, n in of_kind.items())
                                for kind, of_kind in counts.items()))
    return 0 if word == "PASS" else 1
