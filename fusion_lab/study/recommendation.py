"""The fastest setting of each shape that is accurate and fits."""
import os
import shlex
from dataclasses import replace

from fusion_lab.study.summary import Recommendation, Recommended, gain_of
from fusion_lab.training.files import UserError, write_json
from fusion_lab.training.reading import read_json


def command_line(study, shape, setting):
    """What a user types to train at this shape with this setting."""
    return shlex.join(["python", study.vocabulary.program_key, *shape.flags(), *study.common_flags(),
                       *study.setting_flags(setting)])


class Accuracy:
    """--verify-accuracy of settings, each once per setting and shape, the batch at most 2; verdicts are kept
    in accuracy.json."""

    def __init__(self, runner):
        self.runner, self.path = runner, os.path.join(runner.directory, "accuracy.json")
        self.known = {}
        if os.path.exists(self.path):
            try:
                self.known = read_json(self.path)
                "".join(self.known.values())
            except (ValueError, TypeError):
                raise UserError(f"{self.path}: holds no accuracy verdicts; delete it") from None

    def verdict(self, shape, setting):
        """"passed", or why not. The baseline is what others are compared with."""
        if setting == "baseline":
            return "passed"
        if "batch_size" in shape.keys():
            shape = shape.having(batch_size=min(shape["batch_size"], 2))  # samples do not interact
        key = f"{shape} {setting}"
        if key not in self.known:
            study = self.runner.study
            flags = [*shape.flags(), *study.common_flags(), *study.setting_flags(setting),
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
            found = read_json(os.path.join(folder, self.runner.program.result("accuracy")))
            return f"failed: {found['failures'][0]}"
        except (OSError, ValueError, KeyError, IndexError, TypeError):
            return f"not checked: {self.runner.outcome(folder, code)[1]}"


RECOMMENDED = ("setting", "median_ms", "peak_memory_mb", "speedup", "speedup_low", "speedup_high")


def recommend(summary, accuracy, memory_limit_mb):
    """The Summary with its recommendation: for each shape the fastest setting that is accurate and within the
    limit (MB of tensor peak)."""
    shapes = sorted({point.shape for point in summary.points})
    return replace(summary, recommendation=Recommendation(memory_limit_mb, tuple(
        recommend_at(shape, summary, accuracy, memory_limit_mb) for shape in shapes)))


def recommend_at(shape, summary, accuracy, memory_limit_mb):
    passed_over = []
    candidates = [point for point in summary.points if point.shape == shape and point.n]
    for point in sorted(candidates, key=lambda point: point.median_ms):
        why = too_large(point, memory_limit_mb)
        if why is None:
            verdict = accuracy.verdict(shape, point.setting)
            why = None if verdict == "passed" else f"accuracy {verdict}"
        if why is None:
            return Recommended(shape, tuple(passed_over), **{key: getattr(point, key) for key in RECOMMENDED},
                               command=command_line(summary.study, shape, point.setting))
        passed_over.append(f"{point.setting}: {why}")
    return Recommended(shape, tuple(passed_over))


def too_large(point, limit):
    if limit is None or point.peak_memory_mb is not None and point.peak_memory_mb <= limit:
        return None
    if point.peak_memory_mb is None:
        return "its memory was not measured"
    return f"{point.peak_memory_mb:.1f} MB is over the limit of {limit:g} MB"


def mark(gain):
    """What stands behind a speed-up that its interval leaves open."""
    return "" if gain.low is None or gain.decided else f" (±, {gain.low:.2f} to {gain.high:.2f}: undecided)"


def print_recommendation(recommendation):
    limit = recommendation.memory_limit_mb
    print(f"\nRecommended: fastest, accurate{f', within {limit:g} MB' if limit else ''}")
    for entry in recommendation.shapes:
        figures = "none of the settings qualifies"
        if entry.setting:
            memory = "n/a" if entry.peak_memory_mb is None else f"{entry.peak_memory_mb:.1f} MB"
            known = entry.speedup and entry.setting != "baseline"
            gain = f", {entry.speedup:.2f}x the baseline{mark(gain_of(entry))}" if known else ""
            figures = f"{entry.setting}, {entry.median_ms:.2f} ms, {memory}{gain}"
        print(f"   {entry.shape}: {figures}")
        for line in entry.passed_over:
            print(f"      not {line}")
        if entry.command:
            print(f"      {entry.command}")
