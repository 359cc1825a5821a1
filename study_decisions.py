"""What to do with measurements: a regression verdict, the best setting per shape, the best batch size."""
import json
import math
import os
import shlex

import numpy as np

from run_files import UserError, write_json
from study_design import Point, Shape, common_flags, parse_setting, setting_flags, shape_of
from study_runner import figures_line
from study_statistics import ratio_interval
from study_summary import FORMAT, principal_settings

BATCH_RESOLUTION = 32  # bisection ends when the next step would change the batch by less than 1/32
EQUAL_SPEED = 0.98  # batches within 2% of the best throughput count as equal: the smallest one is taken


def command_line(study, shape, setting):
    return shlex.join(["python", "tiny_openfold_v2.py", *shape.flags(), *common_flags(study),
                       *setting_flags(parse_setting(setting))])


# Regression check

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


# Recommendation

class Accuracy:
    """--verify-accuracy of settings, each once per setting, S and N; verdicts are kept in accuracy.json."""

    def __init__(self, runner):
        self.runner, self.path = runner, os.path.join(runner.directory, "accuracy.json")
        self.known = {}
        if os.path.exists(self.path):
            try:
                with open(self.path, encoding="utf-8") as file:
                    self.known = json.load(file)
                "".join(self.known.values())
            except (ValueError, AttributeError, TypeError):
                raise UserError(f"{self.path}: holds no accuracy verdicts; delete it") from None

    def verdict(self, shape, setting):
        """"passed", or why not. The baseline is what others are compared with."""
        if setting == "baseline":
            return "passed"
        small = Shape(min(shape.batch_size, 2), shape.seq_len, shape.num_seqs)  # samples do not interact
        key = f"{small} {setting}"
        if key not in self.known:
            flags = [*small.flags(), *common_flags(self.runner.study), *setting_flags(parse_setting(setting)),
                     "--verify-accuracy"]
            print(f"Accuracy of {key}: ", end="", flush=True)
            with self.runner.folder("accuracy") as folder:
                code = self.runner.run_trainer(flags, folder)
                self.known[key] = "passed" if code == 0 else self.reason(folder, code)
            print(self.known[key], flush=True)
            write_json(self.path, self.known)
        return self.known[key]

    def reason(self, folder, code):
        try:
            with open(os.path.join(folder, "accuracy_v2.json"), encoding="utf-8") as file:
                return f"failed: {json.load(file)['failures'][0]}"
        except (OSError, ValueError, KeyError, IndexError):
            return f"not checked: {self.runner.outcome(folder, code)['reason']}"


RECOMMENDED = ("setting", "median_ms", "peak_memory_mb", "speedup", "speedup_low", "speedup_high")


def recommend(summary, accuracy, memory_limit_mb):
    """For each shape the fastest setting within the limit (MB of tensor peak) that is accurate."""
    found = []
    for shape in sorted({shape_of(point) for point in summary["points"]}):
        entry = dict(vars(shape), setting=None, command=None, passed_over=[])
        candidates = [p for p in summary["points"] if shape_of(p) == shape and p["n"]]
        for point in sorted(candidates, key=lambda p: p["median_ms"]):
            why = too_large(point, memory_limit_mb)
            if why is None:
                verdict = accuracy.verdict(shape, point["setting"])
                why = None if verdict == "passed" else f"accuracy {verdict}"
            if why is None:
                entry.update({key: point[key] for key in RECOMMENDED},
                             command=command_line(summary["study"], shape, point["setting"]))
                break
            entry["passed_over"].append(f"{point['setting']}: {why}")
        found.append(entry)
    return dict(memory_limit_mb=memory_limit_mb, shapes=found)


def too_large(point, limit):
    if limit is None or point["peak_memory_mb"] is not None and point["peak_memory_mb"] <= limit:
        return None
    if point["peak_memory_mb"] is None:
        return "its memory was not measured"
    return f"{point['peak_memory_mb']:.1f} MB is over the limit of {limit:g} MB"


def print_recommendation(recommendation):
    limit = recommendation["memory_limit_mb"]
    print(f"\nRecommended: fastest, accurate{f', within {limit:g} MB' if limit else ''}")
    for entry in recommendation["shapes"]:
        figures = "none of the settings qualifies"
        if entry["setting"]:
            memory = "n/a" if entry["peak_memory_mb"] is None else f"{entry['peak_memory_mb']:.1f} MB"
            compared = entry["speedup"] and entry["setting"] != "baseline"
            gain = f", {entry['speedup']:.2f}x the baseline" if compared else ""
            figures = f"{entry['setting']}, {entry['median_ms']:.2f} ms, {memory}{gain}"
        print(f"   {shape_of(entry)}: {figures}")
        for line in entry["passed_over"]:
            print(f"      not {line}")
        if entry["command"]:
            print(f"      {entry['command']}")


# Batch size

def device_memory_mb(device):
    """Memory of the GPU that --device names (MB), None for a CPU."""
    import torch
    if device == "cpu" or not torch.cuda.device_count():
        return None
    index = device.rpartition(":")[2]
    return torch.cuda.get_device_properties(int(index) if index.isdecimal() else 0).total_memory / 2 ** 20


class BatchSearch:
    """Doubling, then bisection, for the largest batch of one length, depth and setting that fits."""

    def __init__(self, runner, results, allowed_mb):
        self.runner, self.results, self.allowed_mb = runner, results, allowed_mb

    def trial(self, batch, seq_len, num_seqs, setting):
        """(whether it fits, row); a row that is there already is not measured again."""
        point = Point(Shape(batch, seq_len, num_seqs), setting, 1)
        row = self.results.find(point)
        if row is None:
            self.runner.measure_some([point], 1, self.results.append)
            row = self.results.rows[-1]
        if row["status"] == "failed":
            raise UserError(f"{point}: {row['reason']}", code=1)
        if row["status"] == "ok" and row["peak_memory_mb"] is None:
            raise UserError(f"{point}: memory of compiled code is not measured on CPU; choose other "
                            "--settings")
        fits = row["status"] == "ok" and row["peak_memory_mb"] <= self.allowed_mb
        print(f"   B {batch}: {figures_line(row)}{'' if fits else ' (does not fit)'}", flush=True)
        return fits, row

    def find(self, seq_len, num_seqs, setting, optimize):
        """The best row, or None if not even one sample fits."""
        print(f"S {seq_len} N {num_seqs} {setting}, at most {self.allowed_mb:.1f} MB", flush=True)
        low, high, fitting = 0, None, {}
        while high is None or high - low > max(1, low // BATCH_RESOLUTION):
            batch = (low + high) // 2 if high else max(1, 2 * low)
            fits, row = self.trial(batch, seq_len, num_seqs, setting)
            if fits:
                low, fitting[batch] = batch, row
            else:
                high = batch
        if not fitting:
            return None
        if optimize == "memory":
            return fitting[low]
        speed = {batch: batch / row["median_batch_time"] for batch, row in fitting.items()}
        return fitting[min(b for b in speed if speed[b] >= EQUAL_SPEED * max(speed.values()))]


def find_batch_sizes(runner, results, limit_mb, target, optimize):
    """Print and write batch_size.json; exit code 1 where no batch fits at all."""
    study, found = runner.study, []
    limit_mb = limit_mb or device_memory_mb(study["device"])
    search = BatchSearch(runner, results, target * limit_mb)
    for setting in study["settings"]:
        for seq_len in study["seq_lens"]:
            for num_seqs in study["num_seqs"]:
                row = search.find(seq_len, num_seqs, setting, optimize)
                entry = dict(seq_len=seq_len, num_seqs=num_seqs, setting=setting, batch_size=None)
                if row:
                    entry.update(
                        batch_size=row["batch_size"], median_ms=row["median_batch_time"] * 1e3,
                        samples_per_second=row["batch_size"] / row["median_batch_time"],
                        peak_memory_mb=row["peak_memory_mb"],
                        command=command_line(study, shape_of(row), setting))
                found.append(entry)
    result = dict(memory_mb=limit_mb, target_memory_usage=target, optimize=optimize, found=found)
    write_json(os.path.join(runner.directory, "batch_size.json"), result)
    print(f"\nBest batch for {optimize} within {100 * target:g}% of {limit_mb:.0f} MB")
    for entry in found:
        figures = "not even one sample fits" if entry["batch_size"] is None else \
            (f"B {entry['batch_size']}, {entry['samples_per_second']:.1f} samples/sec, "
             f"{entry['peak_memory_mb']:.1f} MB\n      {entry['command']}")
        print(f"   S {entry['seq_len']} N {entry['num_seqs']} {entry['setting']}: {figures}")
    return 1 if any(entry["batch_size"] is None for entry in found) else 0
