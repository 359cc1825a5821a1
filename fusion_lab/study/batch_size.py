"""The best batch of each shape and setting."""
import os
from dataclasses import dataclass

import torch

from fusion_lab.study.design import Point, Shape
from fusion_lab.study.recommendation import command_line
from fusion_lab.study.records import as_json, spread
from fusion_lab.training.files import FAILED, UserError, write_json

BATCH_RESOLUTION = 32  # bisection ends when the next step would change the batch by less than 1/32
EQUAL_SPEED = 0.98  # batches within 2% of the best throughput count as equal: the smallest one is taken


def device_memory_mb(device):
    """Memory of the GPU that --device names (MB), None for a CPU."""
    if device == "cpu" or not torch.cuda.device_count():
        return None
    index = device.rpartition(":")[2]
    return torch.cuda.get_device_properties(int(index) if index.isdecimal() else 0).total_memory / 2 ** 20


class BatchSearch:
    """Doubling, then bisection, for the largest batch of a shape's other sizes and a setting that fits."""

    def __init__(self, runner, results, limit_mb, target):
        self.runner, self.results = runner, results
        self.allowed_mb = target * limit_mb
        self.allowed = f"{self.allowed_mb:.1f} MB ({100 * target:g}% of {limit_mb:.0f})"

    def trial(self, shape, setting):
        """(whether it fits, row); a row that is there already is not measured again."""
        point = Point(shape, setting, 1)
        row = self.results.find(point)
        if row is None:
            self.runner.measure_some([point], 1, self.results.append)
            row = self.results.rows[-1]
        if row.status == "failed":
            raise UserError(f"{point}: {row.reason}", code=FAILED)
        if row.ok and row.figures.peak_memory_mb is None:
            raise UserError(f"{point}: memory of compiled code is not measured on CPU; choose other "
                            "--settings")
        fits = row.ok and row.figures.peak_memory_mb <= self.allowed_mb
        print(f"   B {shape['batch_size']}: {row}{'' if fits else f' (does not fit into {self.allowed})'}",
              flush=True)
        return fits, row

    def best(self, shape, setting, optimize):
        """The best row, or None if not even one sample fits."""
        print(f"{shape.without('batch_size')} {setting}, at most {self.allowed}", flush=True)
        low, high, fitting = 0, None, {}
        while high is None or high - low > max(1, low // BATCH_RESOLUTION):
            batch = (low + high) // 2 if high else max(1, 2 * low)
            fits, row = self.trial(shape.having(batch_size=batch), setting)
            if fits:
                low, fitting[batch] = batch, row
            else:
                high = batch
        if not fitting:
            return None
        if optimize == "memory":
            return fitting[low]
        speed = {batch: batch / row.figures.median_batch_time for batch, row in fitting.items()}
        return fitting[min(b for b in speed if speed[b] >= EQUAL_SPEED * max(speed.values()))]


@dataclass(frozen=True)
class Best:
    """The best batch for the sizes beside it; all None if not even one sample fits."""
    beside: Shape = spread()
    setting: str
    batch_size: int | None = None
    median_ms: float | None = None
    samples_per_second: float | None = None
    peak_memory_mb: float | None = None
    command: str | None = None

    def __str__(self):
        if self.batch_size is None:
            return f"{self.beside} {self.setting}: not even one sample fits"
        return (f"{self.beside} {self.setting}: B {self.batch_size}, {self.samples_per_second:.1f} "
                f"samples/sec, {self.peak_memory_mb:.1f} MB\n      {self.command}")


def best_of(study, row):
    """The Best that a row has."""
    batch, figures = row.shape["batch_size"], row.figures
    return Best(row.shape.without("batch_size"), row.setting, batch, figures.median_batch_time * 1e3,
                batch / figures.median_batch_time, figures.peak_memory_mb,
                command_line(study, row.shape, row.setting))


def find_batch_sizes(runner, results, limit_mb, target, optimize):
    """Print and write batch_size.json; exit code 1 where no batch fits at all."""
    study, entries = runner.study, []
    limit_mb = limit_mb or device_memory_mb(study.device)
    search = BatchSearch(runner, results, limit_mb, target)
    for setting in study.settings:
        for shape in study.with_a_batch().shapes():
            row = search.best(shape, setting, optimize)
            entries.append(best_of(study, row) if row else Best(shape.without("batch_size"), setting))
    content = dict(memory_mb=limit_mb, target_memory_usage=target, optimize=optimize, found=as_json(entries))
    write_json(os.path.join(runner.directory, "batch_size.json"), content)
    print(f"\nBest batch for {optimize} within {100 * target:g}% of {limit_mb:.0f} MB")
    for entry in entries:
        print(f"   {entry}")
    return 1 if any(entry.batch_size is None for entry in entries) else 0
