"""Clocks and counters. They know modules, tensors and devices, and nothing of proteins or of this model."""
import contextlib
import ctypes
import os
import platform
import shutil
import subprocess
import time
import weakref

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from run_files import UserError, write_json

MEGABYTE = 2 ** 20


def choose_device(name):
    """What --device names, as a torch.device. Raises UserError: code 2 for nonsense, 4 for a missing GPU."""
    count = torch.cuda.device_count()
    if name == "auto":
        name = "cuda" if count else "cpu"
    if name == "cpu":
        keep_freed_memory()
        return torch.device("cpu")
    kind, _, index = f"cuda:{name}".partition(":") if name.isdecimal() else name.partition(":")
    if kind != "cuda" or not (index or "0").isdecimal() or name.endswith(":"):
        raise UserError(f"--device {name}: must be auto, cpu, cuda, cuda:N or N")
    if int(index or 0) >= count:
        raise UserError(f"--device {name}: there is no such GPU; torch {torch.__version__} sees {count}",
                        code=4)
    device = torch.device("cuda", int(index or 0))
    torch.cuda.set_device(device)
    return device


M_TRIM_THRESHOLD, M_MMAP_MAX = -1, -4  # malloc.h


def keep_freed_memory():
    """Let the process keep the memory that a step frees for the next one, as GPUs' allocators do. glibc would
    return large blocks to the kernel, which hands them back page by page, zeroed: a sixth of a step on CPU
    (benchmarks/LOG.md). Other C libraries have no such setting, and nothing happens."""
    with contextlib.suppress(OSError, AttributeError):
        libc = ctypes.CDLL(None)
        libc.mallopt(M_MMAP_MAX, 0)
        libc.mallopt(M_TRIM_THRESHOLD, -1)


class PhaseTimer:
    """Times between marks: CUDA events on a GPU (no synchronisation until read), perf_counter elsewhere.

    With names, enter(name) and leave() run round each phase as well: start() begins the first one, every
    mark() ends one and begins the next.
    """

    def __init__(self, device, names=(), enter=None, leave=None):
        self.on_gpu, self.steps = device.type == "cuda", []
        self.names, self.enter, self.leave = names, enter, leave

    def start(self):
        self.steps.append([])
        self.mark()

    def mark(self):
        number = len(self.steps[-1])
        if self.on_gpu:
            event = torch.cuda.Event(enable_timing=True)
            event.record()
        self.steps[-1].append(event if self.on_gpu else time.perf_counter())
        if 0 < number <= len(self.names):
            self.leave()
        if number < len(self.names):
            self.enter(self.names[number])

    def seconds(self):
        """(steps, phases) seconds between the marks of each step."""
        if self.on_gpu:
            torch.cuda.synchronize()
            return np.array([[a.elapsed_time(b) / 1e3 for a, b in zip(s, s[1:], strict=False)]
                             for s in self.steps])
        return np.diff(np.array(self.steps), axis=1)


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
        if not func.is_view and func.overloadpacket.__name__ not in self.ALLOCATIONS:
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
def ranges(named_modules, enter, leave, backward=False):
    """Within: enter(name) and leave() run round the forward of every (name, module) and, as
    name + ".backward", round its backward. Hooks from outside keep profiling code out of the model."""
    def begin(name):
        return lambda *_: enter(name)

    def end(*_):
        leave()  # and return None: a hook's return value would replace the module's

    handles = []
    for name, module in named_modules:
        handles += [module.register_forward_pre_hook(begin(name)),  # recomputation may stop by an exception
                    module.register_forward_hook(end, always_call=True)]
        if backward:
            handles += [module.register_full_backward_pre_hook(begin(name + ".backward")),
                        module.register_full_backward_hook(end)]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def saved_activations(model, named_modules, compute_loss):
    """Bytes that autograd keeps for the backward pass of compute_loss(), by name of the module that saved
    them ("rest" outside all): each storage once, where it is saved first; parameters and buffers excluded."""
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
            loss = compute_loss()  # alive until here, so that no storage's address is used twice
    del loss
    return sizes


def gpu_kernels(run):
    """Names of the GPU kernels that run() launches, copies, fills and annotations excluded."""
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profiler:
        run()
        torch.cuda.synchronize()
    return [e.name for e in profiler.events() if e.device_type == torch.autograd.DeviceType.CUDA
            and not e.name.startswith(("Memcpy", "Memset")) and not e.is_user_annotation]


def matmul_ceiling(device, dtype):
    """FLOP/s of a large square matrix product on random data: the best of five, measured here and now."""
    n = 8192 if device.type == "cuda" else 1024
    a, b = (torch.randn(n, n, device=device, dtype=dtype) for _ in range(2))
    timer = PhaseTimer(device)
    for _ in range(6):
        timer.start()
        torch.mm(a, b)
        timer.mark()
    return 2 * n ** 3 / timer.seconds()[1:].min()


def copy_ceiling(device):
    """Bytes/s (read plus written) of copying a tensor far larger than any cache: the best of five."""
    source = torch.empty((2 ** 30 if device.type == "cuda" else 2 ** 26) // 4, device=device).zero_()
    target = torch.empty_like(source)
    timer = PhaseTimer(device)
    for _ in range(6):
        timer.start()
        target.copy_(source)
        timer.mark()
    return 2 * source.numel() * 4 / timer.seconds()[1:].min()


def dispatch_cost(device):
    """Seconds of host time that one small operation takes, autograd apart: the best of six times 200
    operations. On a GPU they are only launched; elsewhere they also run, which takes next to nothing."""
    x, best = torch.zeros(8, device=device), float("inf")
    for _ in range(6):
        if device.type == "cuda":
            torch.cuda.synchronize()
        started = time.perf_counter()
        for _ in range(200):
            x.add_(1.0)
        best = min(best, (time.perf_counter() - started) / 200)
    return best


class RangeSums:
    """enter and leave for ranges(): sums what clock() advances within each range, without the ranges nested
    in it. relabel(name), if given, is asked for the name under which to file a range that begins."""

    def __init__(self, clock, relabel=lambda name: name):
        self.clock, self.relabel, self.sums, self.stack = clock, relabel, {}, []

    def enter(self, name):
        self.stack.append([self.relabel(name), self.clock(), 0])

    def leave(self):
        name, began, nested = self.stack.pop()
        whole = self.clock() - began
        self.sums[name] = self.sums.get(name, 0) + whole - nested
        if self.stack:
            self.stack[-1][2] += whole


def quantiles(times):
    """(p20, median, p80) as floats."""
    return tuple(float(np.quantile(times, q)) for q in (0.2, 0.5, 0.8))


class Profiling:
    """What ProfilerConfig asks for, while the measured steps run: a PyTorch trace, NVTX/roctx ranges with
    profiler start and stop, a memory profile from the probe's findings. Results go to config.profile_dir."""
    TRACED_STEPS = 5  # a trace of 50 steps has some hundred MB

    def __init__(self, config, device, named_modules, found, num_steps, traced_steps=TRACED_STEPS):
        self.config, self.device, self.found, self.traced_steps = config, device, found, traced_steps
        self.open_ranges, self.profiler = [], None
        self.outer = config.enable_rocm_profiling and device.type == "cuda"
        if config.enable_rocm_profiling and not self.outer:
            print("ROCm profiling: no GPU here, so no ranges for an outer profiler are emitted")
        self.hooks = contextlib.nullcontext()
        if self.outer or config.enable_pytorch_profiler:
            self.hooks = ranges(named_modules, self.enter, self.leave, backward=True)
        if config.enable_pytorch_profiler:
            warmup = min(1, num_steps - 1)
            self.profiler = torch.profiler.profile(
                schedule=torch.profiler.schedule(wait=0, warmup=warmup, repeat=1,
                                                 active=min(traced_steps, num_steps - warmup)),
                on_trace_ready=torch.profiler.tensorboard_trace_handler(config.profile_dir),
                record_shapes=True, profile_memory=config.enable_memory_profiling)

    def __enter__(self):
        self.hooks.__enter__()
        if self.profiler:
            self.profiler.__enter__()
        if self.outer:
            switch_outer_profiler(on=True)
        return self

    def enter(self, name):
        if self.profiler:
            self.open_ranges.append(torch.profiler.record_function(name))
            self.open_ranges[-1].__enter__()
        if self.outer:
            torch.cuda.nvtx.range_push(name)

    def leave(self):
        if self.outer:
            torch.cuda.nvtx.range_pop()
        if self.profiler:
            self.open_ranges.pop().__exit__(None, None, None)

    def step(self):
        if self.profiler:
            self.profiler.step()

    @contextlib.contextmanager
    def paused(self):
        """Within, an outer profiler does not record: what runs there is no part of a step."""
        if self.outer:
            switch_outer_profiler(on=False)
        yield
        if self.outer:
            switch_outer_profiler(on=True)

    def __exit__(self, *error):
        if self.outer:
            torch.cuda.synchronize()
            switch_outer_profiler(on=False)
        if self.profiler:
            self.profiler.__exit__(*error)
            print(f"PyTorch profiler: trace of up to {self.traced_steps} steps in {self.config.profile_dir}")
        self.hooks.__exit__(*error)
        if self.config.enable_memory_profiling and error[0] is None:
            self.write_memory_profile()

    def write_memory_profile(self):
        saved = self.found["saved"]
        print("Saved activations of one step, MB by sub-layer (all blocks):")
        for name, size in sorted(saved.items(), key=lambda item: -item[1]):
            print(f"   {name:24s} {size / MEGABYTE:9.1f}  {100 * size / sum(saved.values()):5.1f}%")
        write_json(os.path.join(self.config.profile_dir, "memory_profile.json"),
                   dict(saved_activation_bytes=saved, timeline_columns=["operation", "live_bytes"],
                        timeline=self.found["timeline"]))


def switch_outer_profiler(on):
    """Tell an outer profiler that the interesting part begins or ends. rocprofv3 --selected-regions listens
    to roctx only; on CUDA, nsys and ncu listen to cudaProfilerStart."""
    if torch.version.hip is None:
        (torch.cuda.profiler.start if on else torch.cuda.profiler.stop)()
        return
    try:
        roctx = ctypes.CDLL("librocprofiler-sdk-roctx.so")
        (roctx.roctxProfilerResume if on else roctx.roctxProfilerPause)(0)
    except (OSError, AttributeError) as error:
        print(f"ROCm profiling: no profiler start and stop ({error}); ranges are emitted all the same")


def system_info(device):
    """Where a number was measured."""
    root = os.path.dirname(os.path.abspath(__file__))
    commit = subprocess.run(["git", "-C", root, "rev-parse", "HEAD"], capture_output=True, text=True,
                            check=False) if shutil.which("git") else None
    return dict(device=str(device),
                gpu_name=torch.cuda.get_device_name(device) if device.type == "cuda" else None,
                torch_version=torch.__version__, cuda_version=torch.version.cuda,
                hip_version=torch.version.hip, host_cpu=cpu_name(), cpu_threads=torch.get_num_threads(),
                python_version=platform.python_version(), platform=platform.platform(),
                git_commit=commit.stdout.strip() if commit and commit.returncode == 0 else None)


def cpu_name():
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            return next(line.split(":", 1)[1].strip() for line in file if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()
