"""The best batch of each length and setting."""
import os

import torch

from fusion_lab.study.design import Point, Shape, shape_of
from fusion_lab.study.recommendation import command_line
from fusion_lab.study.runner import figures_line
from fusion_lab.training.files import UserError, write_json

BATCH_RESOLUTION = 32  # bisection ends when the next step would change the batch by less than 1/32


EQUAL_SPEED = 0.98  # batches within 2% of the best throughput count as equal: the smallest one is taken


def device_memory_mb(device):
    """Memory of the GPU that --device names (MB), None for a CPU."""
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
