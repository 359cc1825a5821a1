"""FLOPs and bytes of a step: the one count that rooflines, comparisons and summaries have.

A step is watched on meta tensors, which have sizes and no values. What is computed again in backward does
not count: these FLOPs say what a step has to do, and so do MFU and rooflines that are made of them.
"""
import contextlib
from dataclasses import fields, replace

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from fusion_lab.measuring.clocks import RangeSums
from fusion_lab.measuring.counters import is_view
from fusion_lab.measuring.ranges import REST, ranges

EAGER = dict(enable_torch_compile=False, enable_cuda_graphs=False, torch_compile_mode="default")


def product_flops(bias, left, right, **_):
    """Of a product with its ReLU, for which PyTorch's counter (2.13) has no formula."""
    return 2 * left.shape[0] * left.shape[1] * right.shape[1]


FORMULAS = {**flop_registry, torch.ops.aten._addmm_activation: product_flops}


class FlopCounter(TorchDispatchMode):
    """`total` FLOPs of what runs within, by the formulas of PyTorch's counter. It is twice as fast as that
    counter, which also splits every operation into smaller ones."""

    def __init__(self):
        super().__init__()
        self.total = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result, formula = func(*args, **(kwargs or {})), FORMULAS.get(func.overloadpacket)
        if formula:
            self.total += formula(*args, **(kwargs or {}), out_val=result)
        return result


class Traffic(TorchDispatchMode):
    """`total` bytes that operations read and write, as if each ran alone; views are free."""

    def __init__(self):
        super().__init__()
        self.total = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if not is_view(func):
            leaves = torch.utils._pytree.tree_leaves((args, kwargs, result))
            self.total += sum(t.nbytes for t in leaves if isinstance(t, torch.Tensor))
        return result


def count_step(model, batch, mode, counting):
    """(FLOPs or bytes of a step, {sub-layer or its name + ".backward": the same}), within a mode."""
    # there is no formula for the fused attention of a CPU
    with mode, counting() as counter, sdpa_kernel(SDPBackend.MATH):
        sums = RangeSums(lambda: counter.total)
        with ranges(model.sublayers(), sums.enter, sums.leave, backward=True):
            model.for_loss(**batch)["loss"].backward()
    return counter.total, sums.sums


def counts_by_sublayer(program, settings, on_gpu, batch=None, counting=FlopCounter):
    """{sub-layer or REST: FLOPs of one step}, forward and backward of all blocks, in the order of sums that
    these settings have on a GPU or elsewhere. batch: by default the program's first. counting: Traffic counts
    bytes instead of FLOPs, in float32."""
    batch = program.data(settings).batch(0) if batch is None else batch
    once = {f.name: False for f in fields(settings.fusion) if f.metadata["recomputes"]}
    with torch.random.fork_rng([]):
        model = program.model(settings.model, replace(settings.fusion, **EAGER, **once)).to("meta")
        model.count_as(settings.training, on_gpu)
        try:
            on_meta = {name: value.to("meta") for name, value in batch.items()}
            total, sums = count_step(model, on_meta, contextlib.nullcontext(), counting)
        except RuntimeError:  # a model that asks what device it is on, for its autocast; four times as slow
            fake = FakeTensorMode(allow_non_fake_inputs=True)
            on_fake = {name: fake.from_tensor(value.cpu()) for name, value in batch.items()}
            total, sums = count_step(model.to_empty(device="cpu"), on_fake, fake, counting)
    by_sublayer = dict.fromkeys((*program.model.SUBLAYERS, REST), 0)
    for name, count in sums.items():
        by_sublayer[name.removesuffix(".backward")] += count
    by_sublayer[REST] = total - sum(by_sublayer.values())
    return by_sublayer
