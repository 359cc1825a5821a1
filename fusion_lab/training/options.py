"""Configs whose fields are command-line flags: default, limits and help are written once, in the field.

What every program has stands here: the run (TrainingConfig), the switches that no model has to know
(Switches) and what is recorded (ProfilerConfig). A model adds its sizes and its own switches. No torch.
"""
import math
import os
import re
from dataclasses import dataclass, field, fields, replace

from evoformer_kernels.limits import HAS_TRITON


def option(default, help, low=None, choices=None, type=None, below=None, *, at_most=None, preset=False,
           ultra=False, title=None, training_only=False, resized=False, metavar=None, takes=(), short=None,
           several=False, read=False, acts_on=(), recomputes=False):
    """A dataclass field that is also a command-line flag.

    low, at_most: inclusive limits; below: an exclusive one. For switches: preset, whether
    --enable-all-fusion turns it on; ultra, whether only --enable-ultra does; title, its name in the start-up
    lines. training_only: what only training has, such as a file. resized: a checkpoint may be continued with
    another value. metavar: what --help shows in place of its value. takes: if given, the flag is a mode, and
    these are the fields that it takes. short: such as "-o". several: the value is a list of them. read: a
    path from which something is read. acts_on: how the names of the sub-layers begin that a switch changes;
    "msa_row with qkv_fusion_msa" where it does so beside another switch alone.
    recomputes: a switch that computes something again in backward, which counts of FLOPs leave out.
    """
    return field(default=default, metadata=dict(
        help=help, low=low, below=below, at_most=at_most, choices=choices, type=type or default.__class__,
        preset=preset, ultra=ultra, title=title, training_only=training_only, resized=resized,
        metavar=metavar, takes=takes, short=short, several=several, read=read, acts_on=acts_on,
        recomputes=recomputes))


@dataclass(frozen=True)
class Checked:
    """Base of the configs: a value outside its field's limits raises a ValueError that names it."""

    def __post_init__(self):
        for f in fields(self):
            value, meta = getattr(self, f.name), f.metadata
            if value is None and f.default is None:
                continue
            if value == "" or meta["several"] and not all(value):
                self.refuse(f.name, "must not be empty")
            if meta["type"] is bool and not isinstance(value, bool):
                self.refuse(f.name, "must be True or False")
            numeric = meta["low"] is not None
            if numeric and (isinstance(value, bool) or not isinstance(value, (int, meta["type"]))):
                self.refuse(f.name, f"must be of type {meta['type'].__name__}")
            if numeric and not math.isfinite(value):
                self.refuse(f.name, "must be finite")
            if numeric and not value >= meta["low"]:
                self.refuse(f.name, f"must be at least {meta['low']}")
            if meta["below"] is not None and not value < meta["below"]:
                self.refuse(f.name, f"must be less than {meta['below']}")
            if meta["at_most"] is not None and not value <= meta["at_most"]:
                self.refuse(f.name, f"must be at most {meta['at_most']}")
            if meta["choices"] and value not in meta["choices"]:
                self.refuse(f.name, f"must be one of {', '.join(meta['choices'])}")

    def refuse(self, name, why):
        """Raise the ValueError for the field of this name."""
        raise ValueError(f"{name} = {getattr(self, name)!r}: {why}")  # flags.parse() splits it at " = "


def flag(name):
    """"seq_len" -> "--seq-len" """
    return "--" + name.replace("_", "-")


def as_flag(name, value):
    """What to pass for a field to have this value; for what has no --disable-X, what not to."""
    if not isinstance(value, bool):
        return f"{flag(name)}={value}"
    if value or name.startswith("enable"):
        return flag(name if value else name.replace("enable", "disable", 1))
    return f"(not) {flag(name)}"


DEVICE, DEVICES = re.compile("auto|cpu|cuda(:[0-9]+)?|[0-9]+"), "auto, cpu, cuda, cuda:N or N"
GRAPHED = ("reduce-overhead", "max-autotune")  # modes in which torch.compile makes CUDA graphs of its own


@dataclass(frozen=True)
class Switches(Checked):
    """Ways to run a step. These any model can have; a model's own switches are fields of a subclass. Every
    bool becomes an --enable-X/--disable-X pair, a variant of --compare-fusion."""
    enable_torch_compile: bool = option(False, "torch.compile", preset=True,
                                        title="Torch Compile")
    enable_cuda_graphs: bool = option(False, "the whole training step in one CUDA graph", preset=True)
    enable_master_weights: bool = option(False, "with --use-amp: low-precision weights and activations, "
                                                "float32 weights cast once a step, instead of autocast",
                                         preset=True)
    enable_triton_adamw: bool = option(False, "master weights: clipping, AdamW and copy in one kernel",
                                       ultra=True)
    torch_compile_mode: str = option("default", "mode of torch.compile", choices=("default", *GRAPHED))

    def __post_init__(self):
        super().__post_init__()
        if self.enable_cuda_graphs and self.torch_compile_mode == "reduce-overhead":
            self.refuse("torch_compile_mode", "makes CUDA graphs of its own; not together with "
                        "--enable-cuda-graphs")

    @property
    def compile_mode(self):
        """The mode as torch.compile knows it: a step in one CUDA graph wants none of the compiler's."""
        autotunes = self.enable_cuda_graphs and self.torch_compile_mode == "max-autotune"
        return "max-autotune-no-cudagraphs" if autotunes else self.torch_compile_mode

    @classmethod
    def names(cls):
        """Fields that are switches."""
        return [f.name for f in fields(cls) if isinstance(f.default, bool)]

    @classmethod
    def baseline(cls):
        """Nothing is on."""
        return cls(**dict.fromkeys(cls.names(), False))

    @classmethod
    def preset(cls):
        """Everything that makes steps faster."""
        return cls(**{f.name: f.metadata["preset"] for f in fields(cls) if isinstance(f.default, bool)})

    @classmethod
    def ultra(cls):
        """The preset and what was measured to win beyond it."""
        wins = {f.name: True for f in fields(cls) if f.metadata["ultra"]}
        return replace(cls.preset(), **wins)

    def idle(self, settings, on_gpu):
        """{field: why it changes nothing in these settings here}, of switches that are on and other fields
        that are not at their defaults."""
        graphs = self.enable_cuda_graphs or self.enable_torch_compile and self.torch_compile_mode in GRAPHED
        masters_run = on_gpu and HAS_TRITON and settings.training.use_amp and self.enable_master_weights
        return {name: why for name, why, holds in (
            ("enable_cuda_graphs", "CUDA graphs need a GPU", graphs and not on_gpu),
            ("enable_master_weights", "master weights need --use-amp",
             self.enable_master_weights and not settings.training.use_amp),
            ("enable_triton_adamw", "triton-adamw needs a GPU, Triton, --use-amp and master weights",
             self.enable_triton_adamw and not masters_run),
            ("torch_compile_mode", "--torch-compile-mode is for torch.compile",
             self.torch_compile_mode != "default" and not self.enable_torch_compile)) if holds}

    @classmethod
    def titles(cls):
        """{name in the start-up lines: switch}, what every program has last."""
        titled = [f for f in fields(cls) if f.metadata["title"]]
        last = {f.name for f in fields(Switches)}
        return {f.metadata["title"]: f.name for f in sorted(titled, key=lambda f: f.name in last)}

    def untitled(self, in_use):
        """{name in the start-up lines: whether it is on} of the switches without a title that act, or that
        are off against their default. in_use: names of those that act."""
        return {f.name.removeprefix("enable_").replace("_", " ").title(): f.name in in_use
                for f in fields(self) if isinstance(f.default, bool) and not f.metadata["title"]
                and (f.name in in_use or f.default and not getattr(self, f.name))}


def shared(name):
    """A copy of the field of Switches with this name, so that a model can list all of its switches in one
    place."""
    f = next(f for f in fields(Switches) if f.name == name)
    return field(default=f.default, metadata=f.metadata)


# --help has a group for each class of this chain, titled by its docstring (flags.add_config_flags)
@dataclass(frozen=True)
class Learning(Checked):
    """How it learns."""
    learning_rate: float = option(3e-4, "AdamW's learning rate, the highest if it changes", low=0.0)
    lr_schedule: str = option("constant", "constant, or after warm-up linear or cosine, down to 0",
                              choices=("constant", "linear", "cosine"))
    lr_warmup_steps: int = option(0, "steps in which the learning rate rises from 0", low=0)
    weight_decay: float = option(0.01, "AdamW's weight decay", low=0.0)
    grad_clip: float = option(1.0, "gradients are scaled down to this norm", low=1e-12)
    ema_decay: float = option(0.0, "evaluate and save a moving average of the weights with this decay, "
                                   "such as 0.999; 0: none", low=0.0, below=1.0)
    early_stopping: int | None = option(None, "end after this many evaluations without a better one", low=1,
                                        type=int)


@dataclass(frozen=True)
class Checkpoints(Learning):
    """Checkpoints."""
    save_checkpoint: str | None = option(
        None, "checkpoint file", type=str, training_only=True, metavar="FILE")
    save_every: int | None = option(None, "steps between checkpoints; there is always one at the end", low=1,
                                    type=int)
    save_best: str | None = option(
        None, "checkpoint file of the best evaluation", type=str, training_only=True, metavar="FILE")
    resume: str | None = option(
        None, "checkpoint to continue from", type=str, training_only=True, metavar="FILE", read=True)
    init_from: str | None = option(
        None, "checkpoint or model file with whose weights a new run starts; the moving average, if any",
        type=str, training_only=True, metavar="FILE", read=True)


@dataclass(frozen=True)
class TrainingConfig(Checkpoints):
    """The training run."""
    num_steps: int = option(50, "training steps; all are measured", low=1)
    warmup_steps: int = option(5, "untimed steps before the clock starts; weights are restored after them",
                               low=0)
    batch_size: int = option(4, "samples per step, on each GPU", low=1)
    use_amp: bool = option(False, "mixed precision")
    use_tf32: bool = option(False, "TF32 matrix products for float32, on GPUs that have them")
    amp_dtype: str | None = option(
        None, "float16 (with a gradient scaler) or bfloat16; default: float16 on a GPU, bfloat16 on CPU",
        choices=("float16", "bfloat16"), type=str)
    seed: int = option(42, "seed of weights, data and dropout", low=0, below=2 ** 63)
    device: str = option("auto", "auto (cuda or cpu), cpu, cuda, cuda:N or a bare GPU index N")
    deterministic: bool = option(False, "deterministic kernels (slower)")
    log_every: int = option(10, "steps between log lines", low=1)
    eval_every: int = option(100, "steps between evaluations; there is always one at the end", low=1)

    def __post_init__(self):
        super().__post_init__()
        self.require("save_every", "save_checkpoint")
        if not DEVICE.fullmatch(self.device):
            self.refuse("device", f"must be {DEVICES}")
        if self.lr_warmup_steps >= self.num_steps and self.lr_warmup_steps:
            self.refuse("lr_warmup_steps", f"must be less than --num-steps {self.num_steps}")
        if self.save_best and self.save_checkpoint and \
                os.path.realpath(self.save_best) == os.path.realpath(self.save_checkpoint):
            self.refuse("save_best", "must be another file than --save-checkpoint")
        if self.resume and self.init_from:
            self.refuse("init_from", "allowed without --resume only")
        if self.amp_dtype and not self.use_amp:
            self.refuse("amp_dtype", "needs --use-amp")

    def require(self, name, needed):
        """Refuse a field that is given without another one."""
        if getattr(self, name) is not None and getattr(self, needed) is None:
            self.refuse(name, f"needs {flag(needed)}")


@dataclass(frozen=True)
class ProfilerConfig(Checked):
    """What is recorded beside the timings, and where results go."""
    enable_pytorch_profiler: bool = option(False, "trace of the measured steps for Perfetto",
                                           training_only=True)
    profile_steps: int = option(5, "how many of the last steps the trace holds", low=1)
    enable_memory_profiling: bool = option(False, "saved activations by sub-layer, and a memory timeline",
                                           training_only=True)
    enable_rocm_profiling: bool = option(False, "roctx/NVTX ranges and profiler start/stop round the "
                                                "measured steps, for an outer profiler")
    profile_dir: str = option("./pytorch_profiles_v2", "where results go")
    force: bool = option(False, "write into a --profile-dir that is not empty: what it holds is set aside")
    json: bool = option(False, "end with the result as a line of JSON on a terminal too")
