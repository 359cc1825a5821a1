"""FLOPs of a step: the one count that rooflines, comparisons and summaries have.

A step is watched on meta tensors, which have sizes and no values. They take a CPU's path: where kernels of
a GPU take another order of sums, that of plain PyTorch counts.
"""
import contextlib
from dataclasses import replace
from functools import cache

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only
from torch.utils.flop_counter import flop_registry

from fusion_lab.measuring.clocks import RangeSums
from fusion_lab.measuring.ranges import REST, ranges

EAGER = dict(enable_torch_compile=False, enable_cuda_graphs=False, torch_compile_mode="default")


@cache
def is_new(operation):
    """Whether all that an operation returns is new memory, whose sizes follow from those of its arguments."""
    return not any(argument.alias_info for argument in operation._schema.arguments)


def form(value):
    """An argument of an operation, of a tensor all but its content. With its type, as 1 == True."""
    if isinstance(value, torch.Tensor):
        return value.dtype, value.shape, value.stride()
    return tuple(map(form, value)) if isinstance(value, (list, tuple)) else (type(value), value)


class FlopCounter(TorchDispatchMode):
    """`total` FLOPs of what runs within, by the formulas of PyTorch's counter (2.13). That one asks every
    operation what smaller ones it is made of, which takes three times as long. What ran before on tensors of
    the same form does not run again, since they have no values: blocks repeat each other."""

    def __init__(self):
        super().__init__()
        self.total, self.known = 0, {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        key = (func, form(args), form([*kwargs.items()])) if is_new(func) else None
        if key in self.known:
            flops, made = self.known[key]
            self.total += flops
            return tree_map_only(torch.Tensor, lambda x: x.new_empty_strided(x.shape, x.stride()), made)
        result = func(*args, **kwargs)
        flops = flops_of(func.overloadpacket, args, kwargs, result)
        self.total += flops
        if key:
            self.known[key] = flops, result
        return result


def flops_of(operation, args, kwargs, result):
    if operation is torch.ops.aten._addmm_activation:  # a product with its ReLU has no formula in there
        return 2 * args[1].shape[0] * args[1].shape[1] * args[2].shape[1]
    formula = flop_registry.get(operation)
    return formula(*args, **kwargs, out_val=result) if formula else 0


def counted(model, batch, mode):
    """(FLOPs of a step, {sub-layer or its name + ".backward": FLOPs}), within a mode."""
    # there is no formula for the fused attention of a CPU
    with mode, FlopCounter() as counter, sdpa_kernel(SDPBackend.MATH):
        sums = RangeSums(lambda: counter.total)
        with ranges(model.sublayers(), sums.enter, sums.leave, backward=True):
            model.for_loss(**batch)["loss"].backward()
    return counter.total, sums.sums


def flops_by_sublayer(program, settings, batch=None):
    """{sub-layer or REST: FLOPs of one step}, forward and backward of all blocks, as these settings compute
    it eagerly: what is computed again in backward counts again. batch: by default the program's first."""
    batch = program.data(settings).batch(0) if batch is None else batch
    with torch.random.fork_rng([]):
        model = program.model(settings.model, replace(settings.fusion, **EAGER)).to("meta")
        try:
            on_meta = {name: value.to("meta") for name, value in batch.items()}
            total, sums = counted(model, on_meta, contextlib.nullcontext())
        except RuntimeError:  # a model that asks what device it is on, for its autocast; four times as slow
            fake = FakeTensorMode(allow_non_fake_inputs=True)
            on_fake = {name: fake.from_tensor(value.cpu()) for name, value in batch.items()}
            total, sums = counted(model.to_empty(device="cpu"), on_fake, fake)
    found = dict.fromkeys((*program.model.SUBLAYERS, REST), 0)
    for name, flops in sums.items():
        found[name.removesuffix(".backward")] += flops
    found[REST] = total - sum(found.values())
    return found
