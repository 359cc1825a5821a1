"""FLOPs of a step: the one count that rooflines, predictions, comparisons and summaries have.

PyTorch's counter watches a step on fake tensors, which have sizes and no values. They are a CPU's: where
kernels of a GPU take another order of sums, that of plain PyTorch counts.
"""
from dataclasses import replace

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from fusion_lab.measuring.clocks import RangeSums
from fusion_lab.measuring.ranges import ranges

REST = "rest"  # what a step runs outside all sub-layers
EAGER = dict(enable_torch_compile=False, enable_cuda_graphs=False, activation_memory_budget=1.0,
             torch_compile_mode="default")


class NoDraws(TorchDispatchMode):
    """For making a model of fake tensors, which have no values: nothing is drawn, and an initialiser that
    draws again while a number lies out of bounds (trunc_normal_) hears that none does."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.aten._local_scalar_dense.default:
            return False
        if func._schema.is_mutable and torch.Tag.nondeterministic_seeded in func.tags:
            return args[0]
        return func(*args, **(kwargs or {}))


def made_in_place(program, device):
    """program.model for fake tensors: the model is on its device from the start, because torch (2.13) moves
    no fake parameters."""
    def make(config, fusion):
        with device, NoDraws():
            model = program.model(config, fusion)
        model.to = lambda _: model
        return model
    return make


def counting():
    """PyTorch's counter (2.13), and what it does not know: a product with its ReLU."""
    def product(bias, left, right, **_):
        return 2 * left[0] * left[1] * right[1]

    return FlopCounterMode(display=False, custom_mapping={torch.ops.aten._addmm_activation: product})


def flops_by_sublayer(program, settings, batch=None):
    """{sub-layer or REST: FLOPs of one step}, forward and backward of all blocks, as these settings compute
    it eagerly: what is computed again in backward counts again. batch: by default the program's first."""
    batch = program.open_source(settings).batch(0) if batch is None else batch
    with torch.random.fork_rng([]), FakeTensorMode() as fake:
        model = made_in_place(program, torch.device("cpu"))(settings.model, replace(settings.fusion, **EAGER))
        given = {key: fake.from_tensor(value).cpu() for key, value in batch.items()}
        # the counter knows no fused attention of a CPU
        with counting() as counter, sdpa_kernel(SDPBackend.MATH):
            sums = RangeSums(counter.get_total_flops)
            with ranges(model.sublayers(), sums.enter, sums.leave, backward=True):
                model(**given | program.in_a_step)["loss"].backward()
    found = dict.fromkeys((*program.sublayers, REST), 0)
    for name, flops in sums.sums.items():
        found[name.removesuffix(".backward")] += flops
    found[REST] = counter.get_total_flops() - sum(found.values())
    return found
