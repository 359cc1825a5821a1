"""The fastest setting of each shape that is accurate and fits."""
import json
import os
import shlex

from fusion_lab.study.design import Shape, common_flags, parse_setting, setting_flags, shape_of
from fusion_lab.training.files import UserError, write_json


def command_line(study, shape, setting):
    return shlex.join(["python", "tiny_openfold_v2.py", *shape.flags(), *common_flags(study),
                       *setting_flags(parse_setting(setting))])


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
