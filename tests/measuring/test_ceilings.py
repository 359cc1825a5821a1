"""What the device can do at most: which products and copies are timed, and how."""
from types import SimpleNamespace

import numpy as np
import torch

from fusion_lab.measuring import ceilings
from tests.second_program import PROGRAM as SECOND

CPU, GPU = torch.device("cpu"), torch.device("cuda")


def settings(**values):
    return SECOND.settings(**{**dict(width=8, depth=2, batch_size=3, device="cpu"), **values})


class Timer:
    """A PhaseTimer by which steps take `times`; what is asked of all of them is noted in `said`."""

    def __init__(self, times):
        self.times, self.said = np.array(times), []

    def __call__(self, device):
        self.said.append(device.type)
        return self

    def start(self):
        self.said.append("start")

    def mark(self):
        self.said.append("mark")

    def seconds(self):
        return self.times


def test_ceilings_of_a_gpu_are_of_larger_matrices_and_of_every_precision(monkeypatch):
    asked, timer = [], Timer([[0.01], [0.25], [0.5], [0.5], [0.5], [0.5]])  # the first is the warm-up
    said, runs = timer.said, ["start", "work", "mark"] * 6
    monkeypatch.setattr(ceilings, "PhaseTimer", timer)
    monkeypatch.setattr(torch, "randn", lambda *sizes, device, dtype: (
        asked.append(sizes) or SimpleNamespace(T=None)))
    monkeypatch.setattr(torch, "mm", lambda *_: said.append("work"))
    assert ceilings.matmul_ceiling(GPU, torch.float16) == 2 * 8192 ** 3 / 0.25
    assert said == ["cuda", *runs] * 6 and asked == [(4096, 4096)] * 2 + [(8192, 8192)] * 2
    tensor = SimpleNamespace(zero_=lambda: tensor, numel=lambda: 1000, copy_=lambda _: said.append("work"))
    monkeypatch.setattr(torch, "empty", lambda size, device: asked.append(size) or tensor)
    monkeypatch.setattr(torch, "empty_like", lambda other: tensor)
    for device, size in ((GPU, 2 ** 28), (CPU, 2 ** 24)):
        assert ceilings.copy_ceiling(device) == 2 * 1000 * 4 / 0.25 and asked[-1] == size
        assert said[-19:] == [device.type, *runs]

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
    found |= dict(copy_bytes_per_s=2.5e9, dispatch_s=3.25e-6)
    found["matmul_flops_per_s"] = dict(float32=1.5e12, tf32=4e13)
    assert ceilings.ceiling_line(found) == (
        "Ceilings, measured here: copy 2.5 GB/s; matrix product float32 1.5, tf32 40 TFLOP/s; launch "
        "3.25 µs. This run: tf32.")


def test_the_ceiling_is_that_of_the_fastest_layout(monkeypatch):
    """Of x W^T, g W and g^T x one is 20 times as fast, as in float16 on a CPU; slow ones run once."""
    runs, timer = [], Timer([])
    timer.seconds = lambda: np.full((timer.said[::-1].index("cpu") // 2, 1), 1.0 if runs[-1] else 0.05)

    def product(a, b):
        runs.append(0 if not b.is_contiguous() else 2 if not a.is_contiguous() else 1)

    monkeypatch.setattr(ceilings, "PhaseTimer", timer)
    monkeypatch.setattr(torch, "mm", product)
    assert ceilings.matmul_ceiling(CPU, torch.float16) == 2 * 1024 ** 3 / 0.05
    assert runs == [*[0] * 6, 1, 2] * 3


def test_dispatch_is_timed_after_the_gpu_is_done(monkeypatch):
    said, ticks = [], iter([0, 10, 10, 14, 20, 25, 30, 35, 40, 46, 50, 58])
    monkeypatch.setattr(torch, "zeros", lambda *_, device: SimpleNamespace(add_=said.append))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: said.append("done"))
    monkeypatch.setattr(ceilings.time, "perf_counter", lambda: next(ticks))
    assert ceilings.dispatch_cost(GPU) == 4 / 200
    assert said == ["done", *[1.0] * 200] * 6
