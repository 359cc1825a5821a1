"""Named ranges round modules and phases, attached from outside, for profilers of either kind."""
import contextlib
import warnings

import torch

from fusion_lab.measuring.clocks import RangeSums

PHASES = ("data", "forward", "backward", "optimizer")  # of a step
RECOMPUTE = "recompute"  # a forward pass during backward, for activation checkpointing
REST = "rest"  # what a step runs outside all sub-layers


@contextlib.contextmanager
def ranges(named_modules, enter, leave, backward=False):
    """Within: enter(name) and leave() run round the forward of every (name, module) and, as
    name + ".backward", round its backward by backward() (not by autograd.grad). Hooks from outside keep
    profiling code out of the model."""
    def begin(name):
        return lambda *_: enter(name)

    def end(*_):
        leave()  # and return None: a hook's return value would replace the module's

    def end_backward(module, gradients, _):
        parameters = [p for p in module.parameters() if p.requires_grad]
        if any(gradient is not None for gradient in gradients) or not parameters:
            leave()
            return
        # Its input is data, which gets no gradient, so this hook comes before those of parameters
        last = torch.autograd.graph.register_multi_grad_hook(parameters, lambda _: (last.remove(), leave()))
        handles.append(last)

    handles = []
    for name, module in named_modules:
        handles += [module.register_forward_pre_hook(begin(name)),  # recomputation may stop by an exception
                    module.register_forward_hook(end, always_call=True)]
        if backward:
            handles += [module.register_full_backward_pre_hook(begin(name + ".backward")),
                        module.register_full_backward_hook(end_backward)]
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Full backward hook is firing")  # end_backward() knows
            yield
    finally:
        for handle in handles:
            handle.remove()


def sums_by_range(clock):
    """RangeSums of a step's phases and of the sub-layers' ranges within them. A forward pass that begins
    within the backward phase is filed as recomputation."""
    def relabel(name):
        phase = sums.stack[0][0] if sums.stack else None
        return f"{name}.{RECOMPUTE}" if phase == "backward" and not name.endswith(".backward") else name

    sums = RangeSums(clock, relabel)
    return sums


def place_of(name):
    """(sub-layer or REST, direction or phase) of a range or a phase: "mlp.up.backward" is ("mlp.up",
    "backward"), "mlp.up" is ("mlp.up", "forward")."""
    if name in PHASES:
        return REST, name
    sublayer, _, direction = name.rpartition(".")
    return (sublayer, direction) if direction in ("backward", RECOMPUTE) else (name, "forward")
