"""Counters of operations, launches and bytes."""
import contextlib
import weakref

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from fusion_lab.measuring.ranges import ranges


def is_view(operation):
    """Whether an OpOverload only looks at its tensor in another way. The schema of _unsafe_view, which matrix
    products end in, does not say so."""
    return operation.is_view or operation is torch.ops.aten._unsafe_view.default


class OpCounter(TorchDispatchMode):
    """Counts the operations that run (views and bare allocations excluded) and the bytes of live tensors.

    `peak` is the largest sum of storages that were made under the mode and alive at once; memory that a
    kernel takes and frees within itself is not seen. `timeline` holds (operation number, live bytes).
    """
    ALLOCATIONS = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided"}

    def __init__(self):
        super().__init__()
        self.launches = self.live = self.peak = 0
        self.timeline, self.known = [], set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if not is_view(func) and func.overloadpacket.__name__ not in self.ALLOCATIONS:
            self.launches += 1
        if not any(returned.alias_info for returned in func._schema.returns):  # views, in-place: nothing new
            for tensor in torch.utils._pytree.tree_leaves(result):
                if isinstance(tensor, torch.Tensor):
                    self.follow(tensor.untyped_storage())
        self.timeline.append((self.launches, self.live))
        return result

    def follow(self, storage):
        key, size = storage._cdata, storage.nbytes()
        if key in self.known or size == 0:
            return
        self.known.add(key)
        self.live += size
        self.peak = max(self.peak, self.live)
        weakref.finalize(storage, self.forget, key, size)

    def forget(self, key, size):
        self.known.discard(key)
        self.live -= size


@contextlib.contextmanager
def counting_saved(model, named_modules):
    """Within, a dict fills with bytes that autograd keeps for the backward pass, by name of the module that
    saved them ("rest" outside all): each storage once, where it is saved first; parameters and buffers
    excluded. The loss must live until the end, so that no storage's address is used twice."""
    own = {t.untyped_storage()._cdata for t in (*model.parameters(), *model.buffers())}
    seen, stack, sizes = set(), ["rest"], {}

    def pack(tensor):
        storage = tensor.untyped_storage()
        if storage._cdata not in own and storage._cdata not in seen:
            seen.add(storage._cdata)
            sizes[stack[-1]] = sizes.get(stack[-1], 0) + storage.nbytes()
        return tensor.detach()  # an output that its own node keeps would keep the graph alive, in a cycle

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        with ranges(named_modules, stack.append, stack.pop):
            yield sizes


def saved_activations(model, named_modules, compute_loss):
    """What counting_saved() finds in compute_loss()."""
    with counting_saved(model, named_modules) as sizes:
        loss = compute_loss()
    del loss
    return sizes


def gpu_times(run):
    """[(name, calls, ms)] of all that run() runs on the GPU, copies and fills too, the longest first."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA],
                                acc_events=True) as profiler:  # else 2.11 warns
        run()
        torch.cuda.synchronize()
    events = [event for event in profiler.key_averages() if event.self_device_time_total > 0]
    return sorted(((event.key, event.count, event.self_device_time_total / 1e3) for event in events),
                  key=lambda found: -found[2])


def gpu_kernels(run):
    """Names of the GPU kernels that run() launches, copies, fills and annotations excluded."""
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities, acc_events=True) as profiler:  # else 2.11 warns
        run()
        torch.cuda.synchronize()
    return [e.name for e in profiler.events() if e.device_type == torch.autograd.DeviceType.CUDA
            and not e.name.startswith(("Memcpy", "Memset")) and not e.is_user_annotation]
