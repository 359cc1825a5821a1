"""What machine this is: its devices, its names, its allocator."""
import contextlib
import ctypes
import os
import platform
import shutil
import subprocess
import tempfile
from dataclasses import fields

import torch

from evoformer_kernels.limits import HAS_TRITON
from evoformer_kernels.precision import set_tf32_products
from fusion_lab.training.errors import NO_GPU, UserError
from fusion_lab.training.options import DEVICE, DEVICES, flag
from fusion_lab.training.torchrun import place
from fusion_lab.training.words import counted

MEGABYTE, GIGABYTE = 2 ** 20, 2 ** 30


def choose_device(name):
    """What --device names, as a torch.device. Raises UserError: code 2 for nonsense, 4 for a missing GPU."""
    if not DEVICE.fullmatch(name):
        raise UserError(f"--device {name}: must be {DEVICES}")
    count = torch.cuda.device_count()
    if name == "auto":
        name = "cuda" if count else "cpu"
    if name == "cpu":
        return torch.device("cpu")
    index, here = name.removeprefix("cuda").removeprefix(":"), place()
    if index and here.size > 1:
        raise UserError(f"--device {name}: {here.size} ranks cannot share a GPU; each gets one without it")
    if here.local_size > count > 0:
        raise UserError(f"--device {name}: {here.local_size} ranks on this host, but torch "
                        f"{torch.__version__} sees {counted(count, 'GPU')}", code=NO_GPU)
    index = index or str(here.local_rank)
    if int(index) >= count:
        raise UserError(f"--device {name}: there is no such GPU; torch {torch.__version__} sees "
                        f"{counted(count, 'GPU')}", code=NO_GPU)
    device = torch.device("cuda", int(index))
    torch.cuda.set_device(device)
    return device


M_TRIM_THRESHOLD, M_MMAP_MAX = -1, -4  # malloc.h


def keep_freed_memory():
    """Let the process keep the memory that a step frees for the next one, as GPUs' allocators do. glibc would
    return large blocks to the kernel, which hands them back page by page, zeroed: a sixth of a step on CPU
    (measured at e77e90b). With other C libraries this does nothing."""
    with contextlib.suppress(OSError, AttributeError):
        libc = ctypes.CDLL(None)
        libc.mallopt(M_MMAP_MAX, 0)
        libc.mallopt(M_TRIM_THRESHOLD, -1)


def require_cache():
    """Raise UserError where Triton could not keep what it compiles: a home may be read-only, or shared."""
    home = os.environ.get("TRITON_HOME", os.path.expanduser("~"))
    place = os.environ.get("TRITON_CACHE_DIR") or os.path.join(home, ".triton", "cache")
    try:
        os.makedirs(place, exist_ok=True)
        tempfile.TemporaryFile(dir=place).close()
    except OSError as error:
        raise UserError(f"Triton cannot keep its kernels in {place}: {error.strerror}; set TRITON_CACHE_DIR "
                        "to a directory of this host") from None


def process_settings(settings, device):
    """Everything that settings change for the whole process and not for one model alone: deterministic
    kernels, TF32, and freed memory on a CPU. Call it before a Trainer is made."""
    if settings.training.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)
    if device.type == "cuda" and HAS_TRITON and settings.fusion != type(settings.fusion).baseline():
        require_cache()
    if device.type == "cpu":
        keep_freed_memory()
    else:
        set_tf32_products(runs_in_tf32(settings.training, device))


def system_info(device):
    """Where a number was measured."""
    root = os.path.dirname(os.path.abspath(__file__))  # git finds the repository above it
    commit = subprocess.run(["git", "-C", root, "rev-parse", "HEAD"], capture_output=True, text=True,
                            check=False) if shutil.which("git") else None
    return dict(device=str(device),
                gpu_name=torch.cuda.get_device_name(device) if device.type == "cuda" else None,
                torch_version=torch.__version__, cuda_version=torch.version.cuda,
                hip_version=torch.version.hip, host_cpu=cpu_name(), cpu_threads=torch.get_num_threads(),
                python_version=platform.python_version(), platform=platform.platform(),
                git_commit=commit.stdout.strip() if commit and commit.returncode == 0 else None)


def free_memory(device):
    """Bytes that this process can still take on a device, with those that torch keeps for its next tensors;
    None where nothing tells."""
    if device.type == "cuda":
        kept = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return torch.cuda.mem_get_info(device)[0] + kept
    available = first_line("/proc/meminfo", "MemAvailable")
    free = [1024 * int(available.split()[0])] if available else []
    with contextlib.suppress(OSError, ValueError):  # of a container; "max" where there is no limit
        limit, used = (int(text_of(f"/sys/fs/cgroup/memory.{kind}")) for kind in ("max", "current"))
        taken = dict(line.split() for line in text_of("/sys/fs/cgroup/memory.stat").splitlines())
        gives_way = int(taken.get("file", 0)) - int(taken.get("shmem", 0))  # a cache, but no /dev/shm
        free.append(limit - used + gives_way)
    return min(free, default=None)


def text_of(path):
    with open(path, encoding="utf-8") as file:
        return file.read()


ROOM = 5  # times what a step needs at least is more than any process was seen to take


def require_memory(program, device, *settings):
    """Raise UserError where a step needs more memory than is free, in each of these settings. Call it before
    data and model are made: a system out of memory kills the process without a word."""
    free = free_memory(device)
    leanest = min(settings, key=program.model.least_bytes)
    if free is None or (least := program.model.least_bytes(leanest)) <= free:
        return
    plain = program.settings()
    sizes = [*(f.name for f in fields(program.model_config) if f.metadata["low"] == 1), *program.axes]
    name = max(sizes, key=lambda size: leanest.get(size) // plain.get(size))  # what was asked too much of

    def fits(value):
        try:
            return ROOM * program.model.least_bytes(leanest.having(**{name: value})) <= free
        except ValueError:
            return False  # such as channels that heads do not divide

    value = leanest.get(name)
    fitting = next(filter(fits, (1 << k for k in reversed(range(value.bit_length())))), None)
    raise UserError(f"{flag(name)} {value}: a step needs more than {least // GIGABYTE:,} GB, "
                    f"{free / GIGABYTE:.1f} GB are free on {device}; "
                    + (f"{flag(name)} {fitting} would fit" if fitting else "lower other sizes, too"))


def cpu_name():
    return first_line("/proc/cpuinfo", "model name") or platform.processor() or platform.machine()


def first_line(path, name):
    """The value in the first line "name: value" of a file of /proc, which other systems lack, or None."""
    with contextlib.suppress(OSError, StopIteration), open(path, encoding="utf-8") as file:
        return next(line.split(":", 1)[1].strip() for line in file if line.startswith(name))


def amp_dtype(training, device):
    """The dtype of --use-amp, None without it. float16 needs a gradient scaler, and CPUs are slow in it."""
    if not training.use_amp:
        return None
    return getattr(torch, training.amp_dtype or ("float16" if device.type == "cuda" else "bfloat16"))


def runs_in_tf32(training, device):
    """Whether --use-tf32 has effect: NVIDIA from Ampere on, AMD where torch says so (CDNA 3 and 4)."""
    return bool(training.use_tf32 and device.type == "cuda" and torch.cuda.is_tf32_supported())
