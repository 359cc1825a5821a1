"""What the device can do at most: which products and copies are timed, and what is made of the times."""
import numpy as np
import torch

from fusion_lab.measuring import ceilings
from tests.second_program import PROGRAM as SECOND

CPU, GPU = torch.device("cpu"), torch.device("cuda")


def settings(**values):
    return SECOND.settings(**{**dict(width=8, depth=2, batch_size=3, device="cpu"), **values})


class Timer:
    """A PhaseTimer by which the steps of a run take what its subclass says."""
    times = [[0.01], [0.25], [0.5], [0.5], [0.5], [0.5]]  # the first is the warm-up

    def __init__(self, device):
        self.steps = 0

    def start(self):
        self.steps += 1

    def mark(self):
        pass

    def seconds(self):
        return np.array(self.times[:self.steps])


def test_the_best_time_after_a_warm_up_counts(monkeypatch):
    monkeypatch.setattr(ceilings, "PhaseTimer", Timer)
    runs = []
    assert ceilings.fastest(lambda: runs.append(1), GPU) == 0.25 and len(runs) == 6
    monkeypatch.setattr(Timer, "times", [[9.0]])  # slow ones run once on a CPU
    assert ceilings.fastest(lambda: runs.append(1), CPU) == 9.0 and len(runs) == 7


def test_a_product_is_two_operations_an_entry_and_a_copy_reads_and_writes(monkeypatch):
    """Of the layouts that a linear layer uses one may be 20 times as fast, as in float16 on a CPU."""
    def seconds(run, device):
        if not hasattr(run, "args"):
            return 0.5
        left, right = run.args
        return 1.0 if left.is_contiguous() and right.is_contiguous() else 20.0
    monkeypatch.setattr(ceilings, "fastest", seconds)
    assert ceilings.matmul_ceiling(CPU, torch.float32) == 2 * max(ceilings.SIDES["cpu"]) ** 3
    assert ceilings.copy_ceiling(CPU) == 2 * 2 ** 26 / 0.5


def test_ceilings_of_a_run_are_of_every_precision_and_name_its_own(monkeypatch):
    def matmul(device, dtype):
        return {torch.float32: 1.0, torch.bfloat16: 2.0, torch.float16: 3.0}[dtype] + \
            10 * torch.backends.cuda.matmul.allow_tf32

    for name, value in (("matmul_ceiling", matmul), ("copy_ceiling", lambda _: 7),
                        ("dispatch_cost", lambda _: 0.5), ("runs_in_tf32", lambda *_: True)):
        monkeypatch.setattr(ceilings, name, value)
    found = ceilings.measure_ceilings(GPU, settings().training)
    assert found == dict(copy_bytes_per_s=7.0, dispatch_s=0.5, dtype="tf32", element_bytes=4,
                         matmul_flops_per_s=dict(float32=1.0, bfloat16=2.0, tf32=11.0, float16=3.0))
    assert not torch.backends.cuda.matmul.allow_tf32
    on_cpu = ceilings.measure_ceilings(CPU, settings(use_amp=True, amp_dtype="float16").training)
    assert on_cpu["matmul_flops_per_s"] == dict(float32=1.0, bfloat16=2.0, float16=3.0)
    assert on_cpu["dtype"] == "float16" and on_cpu["element_bytes"] == 2
    better = dict(found, copy_bytes_per_s=9.0, dispatch_s=0.25, matmul_flops_per_s=dict(
        float32=0.5, bfloat16=4.0, tf32=11.0, float16=3.0))
    assert ceilings.highest(better, found) == dict(better, matmul_flops_per_s=dict(
        float32=1.0, bfloat16=4.0, tf32=11.0, float16=3.0))
    words = ceilings.ceiling_line(dict(found, copy_bytes_per_s=2.5e9, dispatch_s=3.25e-6))
    assert "copy 2.5 GB/s" in words and "launch 3.25 µs" in words and "This run: tf32" in words


def test_dispatch_is_the_best_of_several(monkeypatch):
    ticks = iter([0, 10, 10, 14, 20, 25, 30, 35, 40, 46, 50, 58])
    monkeypatch.setattr(ceilings.time, "perf_counter", lambda: next(ticks))
    assert ceilings.dispatch_cost(CPU) == 4 / 200
