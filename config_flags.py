"""The configs, whose fields are the command-line flags, and the command line made of them: defaults, limits
and help are written once, here. Needs no torch, so that a command line can be judged anywhere."""
import argparse
import math
import re
from dataclasses import asdict, dataclass, field, fields


def option(default, help, low=None, choices=None, type=None, below=None):
    """A dataclass field that is also a command-line flag."""
    return field(default=default, metadata=dict(help=help, low=low, below=below, choices=choices,
                                                type=type or default.__class__))


class Checked:
    """Base of the configs: a value outside its field's limits raises a ValueError that names it."""

    def __post_init__(self):
        for f in fields(self):
            value, meta = getattr(self, f.name), f.metadata
            if value is None and f.default is None:
                continue
            if value == "":
                raise ValueError(f"{f.name} = '': must not be empty")
            if meta["type"] is bool and not isinstance(value, bool):
                raise ValueError(f"{f.name} = {value!r}: must be True or False")
            numeric = meta["low"] is not None
            if numeric and (isinstance(value, bool) or not isinstance(value, (int, meta["type"]))):
                raise ValueError(f"{f.name} = {value!r}: must be of type {meta['type'].__name__}")
            if numeric and not (value >= meta["low"] and math.isfinite(value)):
                raise ValueError(f"{f.name} = {value!r}: must be at least {meta['low']}")
            if meta["below"] is not None and not value < meta["below"]:
                raise ValueError(f"{f.name} = {value!r}: must be less than {meta['below']}")
            if meta["choices"] and value not in meta["choices"]:
                raise ValueError(f"{f.name} = {value!r}: must be one of {', '.join(meta['choices'])}")


@dataclass
class TinyOpenFoldConfig(Checked):
    """Sizes of the model and of its input."""
    msa_dim: int = option(64, "MSA channels c_m", low=1)
    pair_dim: int = option(128, "pair channels c_z", low=1)
    num_blocks: int = option(4, "Evoformer blocks", low=1)
    num_seqs: int = option(16, "alignment rows N of a sample", low=1)
    seq_len: int = option(64, "residues S of a sample (crop length)", low=1)
    msa_heads: int = option(4, "heads of MSA attention; must divide --msa-dim", low=1)
    pair_heads: int = option(4, "heads of triangle attention; must divide --pair-dim", low=1)
    outer_product_dim: int = option(32, "hidden width of the outer product mean", low=1)
    dropout: float = option(0.0, "AF2's shared dropout, one rate for all sub-layers that have it", low=0.0,
                            below=1.0)

    def __post_init__(self):
        super().__post_init__()
        for channels, heads in (("msa_dim", "msa_heads"), ("pair_dim", "pair_heads")):
            if getattr(self, channels) % getattr(self, heads):
                raise ValueError(f"{heads} = {getattr(self, heads)}: must divide {channels} = "
                                 f"{getattr(self, channels)}")


BACKENDS = ("auto", "math", "sdpa", "flex")
COMPILE_MODES = ("default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs")
COMBO_KERNELS_UP_TO = 128  # residues: gains 4% at 64, costs 1.5% at 256, 2% at 384 (benchmarks/LOG.md)
MODES_WITH_GRAPHS = ("reduce-overhead", "max-autotune")  # torch.compile makes CUDA graphs of its own


@dataclass
class FusionConfig(Checked):
    """Which operations run fused. Every bool becomes an --enable-X/--disable-X pair."""
    enable_qkv_fusion_msa: bool = option(True, "Q, K, V of MSA row and column attention in one GEMM")
    enable_qkv_fusion_triangle: bool = option(True, "Q, K, V of both triangle attentions in one GEMM")
    enable_flash_attention: bool = option(True, "fused attention instead of matmul, softmax, matmul")
    enable_triangle_fusion: bool = option(True, "left and right of triangle multiplication: projections in "
                                                "one GEMM, gates in one GEMM")
    enable_opm_fusion: bool = option(True, "outer product mean re-associated where that is cheaper "
                                           "(few rows, many residues), without the (S, S, h*h) tensor")
    enable_torch_compile: bool = option(False, "torch.compile: one Evoformer block for all; on a GPU also "
                                               "the embedding and the heads")
    enable_cuda_graphs: bool = option(False, "the whole training step in one CUDA graph")
    enable_master_weights: bool = option(False, "with --use-amp: low-precision weights and activations, "
                                                "float32 weights cast once a step, instead of autocast")
    enable_projection_fusion: bool = option(False, "gates in one GEMM with Q, K, V and with left and right, "
                                                   "where those are packed; and the outer product's left "
                                                   "with right")
    enable_transition_fusion: bool = option(False, "bias and ReLU of the transitions in the epilogue of "
                                                   "their GEMM")
    enable_combo_kernels: bool = option(False, "with --enable-torch-compile on a GPU, up to "
                                               f"{COMBO_KERNELS_UP_TO} residues: independent small kernels, "
                                               "such as sums for bias gradients, share launches")
    enable_activation_checkpointing: bool = option(False, "keep only the inputs of every block, recompute "
                                                          "the rest in backward: less memory, more time")
    torch_compile_mode: str = option("default", "mode of torch.compile", choices=COMPILE_MODES)
    attention_backend: str = option("auto", "implementation of fused attention", choices=BACKENDS)
    activation_memory_budget: float = option(1.0, "share of the activations that torch.compile may keep for "
                                                  "backward; below 1 it recomputes the cheapest", low=0.0)

    def __post_init__(self):
        super().__post_init__()
        if self.enable_cuda_graphs and self.torch_compile_mode in MODES_WITH_GRAPHS:
            raise ValueError(f"torch_compile_mode = {self.torch_compile_mode!r}: makes CUDA graphs of its "
                             "own; not together with --enable-cuda-graphs")
        if self.activation_memory_budget > 1:
            raise ValueError(f"activation_memory_budget = {self.activation_memory_budget}: must be at most 1")
        if self.activation_memory_budget < 1 and not self.enable_torch_compile:
            raise ValueError(f"activation_memory_budget = {self.activation_memory_budget}: needs "
                             "--enable-torch-compile")

    def combo_kernels_at(self, seq_len):
        return self.enable_combo_kernels and seq_len <= COMBO_KERNELS_UP_TO

    def idle(self, use_amp, on_gpu, seq_len):
        """Why switches that are on change nothing here, a sentence for each."""
        graphs = self.enable_cuda_graphs or (self.enable_torch_compile
                                             and self.torch_compile_mode in MODES_WITH_GRAPHS)
        combo = self.enable_combo_kernels and not (self.enable_torch_compile and on_gpu)
        return [text for text, holds in (
            ("CUDA graphs need a GPU", graphs and not on_gpu),
            ("combo kernels need torch.compile on a GPU", combo),
            (f"combo kernels cost time above {COMBO_KERNELS_UP_TO} residues",
             self.enable_combo_kernels and not combo and not self.combo_kernels_at(seq_len)),
            ("master weights need --use-amp", self.enable_master_weights and not use_amp),
            ("--attention-backend is for fused attention",
             self.attention_backend != "auto" and not self.enable_flash_attention),
            ("--torch-compile-mode is for torch.compile",
             self.torch_compile_mode != "default" and not self.enable_torch_compile)) if holds]

    def beside(self, named):
        """Flags of the switches that differ from their defaults, those in named apart."""
        return [flag(f.name if getattr(self, f.name) else f.name.replace("enable", "disable", 1))
                for f in fields(self) if isinstance(f.default, bool) and f.name not in named
                and getattr(self, f.name) != f.default]

    @classmethod
    def preset(cls, enabled):
        """Everything that makes steps faster, or nothing at all (the baseline)."""
        switches = [f.name for f in fields(cls) if isinstance(f.default, bool)]
        return cls(**{name: enabled and name != "enable_activation_checkpointing" for name in switches})


@dataclass
class TrainingConfig(Checked):
    """The training run, its data and its files."""
    num_steps: int = option(50, "training steps; all are measured", low=1)
    warmup_steps: int = option(5, "untimed steps before the clock starts; weights are restored after them",
                               low=0)
    batch_size: int = option(4, "samples per step", low=1)
    learning_rate: float = option(3e-4, "AdamW's learning rate", low=0.0)
    grad_clip: float = option(1.0, "gradients are scaled down to this norm", low=1e-12)
    use_amp: bool = option(False, "mixed precision")
    use_tf32: bool = option(False, "TF32 matrix products for float32, on GPUs that have them")
    amp_dtype: str = option(None, "float16 (with a gradient scaler) or bfloat16; default: float16 on a GPU, "
                                  "bfloat16 on CPU", choices=("float16", "bfloat16"), type=str)
    seed: int = option(42, "seed of weights, data and dropout", low=0, below=2 ** 63)
    device: str = option("auto", "auto, cpu, cuda, cuda:N or a bare GPU index N")
    deterministic: bool = option(False, "deterministic kernels (slower)")
    log_every: int = option(10, "steps between log lines", low=1)
    eval_every: int = option(100, "steps between contact evaluations; there is always one at the end", low=1)
    eval_seqs: int = option(None, "alignment rows in the evaluation of real proteins; default: --num-seqs",
                            low=1, type=int)
    synthetic_world: str = option("paired", "built-in proteins: paired (easy: one table of partners) or "
                                  "covarying (hard, nearer to real alignments)",
                                  choices=("paired", "covarying"))
    data: str = option(None, "directory of real proteins: NAME.a3m, .sto or .fasta beside NAME.cif or "
                             "NAME.pdb", type=str)
    msa: str = option(None, "alignment of one real protein", type=str)
    structure: str = option(None, "its structure, FILE or FILE:CHAIN", type=str)
    query: str = option(None, "name of the query row in --msa; default: the first row", type=str)
    holdout: str = option(None, "names of families kept out of training, NAME[,NAME...]", type=str)
    holdout_fraction: float = option(None, "share of families kept out of training", low=0.0, below=1.0,
                                     type=float)
    plot_contacts: str = option(None, "directory for contact maps of held-out proteins (PNG)", type=str)
    save_checkpoint: str = option(None, "checkpoint file", type=str)
    save_every: int = option(None, "steps between checkpoints; there is always one at the end", low=1,
                             type=int)
    resume: str = option(None, "checkpoint to continue from", type=str)

    def __post_init__(self):
        super().__post_init__()
        if (self.msa is None) != (self.structure is None):
            given, missing = ("msa", "structure") if self.msa else ("structure", "msa")
            raise ValueError(f"{given} = {getattr(self, given)!r}: must come together with --{missing}")
        for name, needs in (("holdout", "data"), ("holdout_fraction", "data"), ("query", "msa"),
                            ("save_every", "save_checkpoint")):
            if getattr(self, name) is not None and getattr(self, needs) is None:
                raise ValueError(f"{name} = {getattr(self, name)!r}: needs --{needs.replace('_', '-')}")
        if self.amp_dtype and not self.use_amp:
            raise ValueError(f"amp_dtype = {self.amp_dtype!r}: needs --use-amp")
        if self.data and self.msa:
            raise ValueError(f"msa = {self.msa!r}: allowed without --data only")
        if self.holdout and self.holdout_fraction is not None:
            raise ValueError(f"holdout = {self.holdout!r}: allowed without --holdout-fraction only")


@dataclass
class ProfilerConfig(Checked):
    """What is recorded beside the timings, and where results go."""
    enable_pytorch_profiler: bool = option(False, "trace of the measured steps for Perfetto and TensorBoard")
    enable_memory_profiling: bool = option(False, "saved activations by sub-layer, and a memory timeline "
                                                 "(over lengths: run_pytorch_profiler.py --seq-lens)")
    enable_rocm_profiling: bool = option(False, "roctx/NVTX ranges and profiler start/stop round the "
                                                "measured steps, for an outer profiler")
    profile_dir: str = option("./pytorch_profiles_v2", "where results go")


class Parser(argparse.ArgumentParser):
    def error(self, message):
        self.exit(2, f"{self.prog}: error: {message}\n")


def whole_number(text):
    """For argparse: a whole number from 1 on."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r}: must be a whole number of at least 1")
    return int(text)


def regular_expression(text):
    """For argparse: text, if re can compile it."""
    try:
        re.compile(text)
    except re.error as error:
        raise argparse.ArgumentTypeError(f"{text!r}: no regular expression ({error})") from None
    return text


def flag(name):
    return "--" + name.replace("_", "-")


def converter(kind):
    def convert(text):
        try:
            return kind(text)
        except ValueError:
            allowed = {int: "a whole number", float: "a number"}[kind]
            raise argparse.ArgumentTypeError(f"{text!r}: must be {allowed}") from None
    return convert if kind in (int, float) else kind


def add_config_flags(parser, config_class, paired=False):
    """One flag for every field. A bool is a switch; with paired, an --enable-X/--disable-X pair of which the
    later one on the command line wins. A flag that is not given leaves no trace in the parsed arguments."""
    group = parser.add_argument_group(config_class.__doc__.strip().rstrip("."))
    for f in fields(config_class):
        words = {True: "on", False: "off", None: "none"}
        allowed = f"; {', '.join(f.metadata['choices'])}" if f.metadata["choices"] else ""
        default = words.get(f.default, f.default) if isinstance(f.default, (bool, type(None))) else f.default
        text = f"{f.metadata['help']}{allowed} (default: {default})".replace("%", "%%")
        if f.metadata["type"] is not bool:
            group.add_argument(flag(f.name), type=converter(f.metadata["type"]),
                               choices=f.metadata["choices"], metavar=f.name.split("_")[-1].upper(),
                               help=text, default=argparse.SUPPRESS)
            continue
        group.add_argument(flag(f.name), action="store_true", help=text, default=argparse.SUPPRESS)
        if paired:
            group.add_argument(flag(f.name).replace("--enable", "--disable", 1), dest=f.name,
                               action="store_false", help="the opposite", default=argparse.SUPPRESS)


CONFIGS = (TinyOpenFoldConfig, TrainingConfig, FusionConfig, ProfilerConfig)
MODES = {"--validate-setup": "quick check of the chosen fusions on this machine: numerics, five steps",
         "--verify-accuracy": "fused against baseline against float64: outputs and all gradients",
         "--compare-fusion": "measure baseline, each fusion alone, all, and a ladder up to everything"}


def make_parser(about="", prog="tiny_openfold_v2.py"):
    """The trainer's command line; about is the text of --help."""
    summary, _, rest = about.partition("\n")
    parser = Parser(prog=prog, description=summary, epilog=rest, allow_abbrev=False,
                    formatter_class=argparse.RawDescriptionHelpFormatter)
    for config_class in CONFIGS:
        add_config_flags(parser, config_class, paired=config_class is FusionConfig)
    presets = parser.add_argument_group("Presets; single flags win over them, wherever they stand")
    presets.add_argument("--enable-all-fusion", dest="fusion_preset", action="store_const", const=True,
                         help="everything that makes steps faster, torch.compile included (default: off)")
    presets.add_argument("--disable-all-fusion", dest="fusion_preset", action="store_const", const=False,
                         help="the baseline, V1: no fusion at all (default: off)")
    presets.add_argument("--enable-all-profiling", action="store_true",
                         help="all three profilers (default: off)")
    modes = parser.add_argument_group("Modes, instead of training").add_mutually_exclusive_group()
    for name, text in MODES.items():
        modes.add_argument(name, action="store_true", help=f"{text} (default: off)")
    parser.add_argument("--combinations", action="store_true", help="with --compare-fusion: all 16 "
                        "combinations of the four of qkv, flash-attention and triangle-fusion (default: off)")
    parser.add_argument("--compare-with-v1", metavar="FILE", default=None,
                        help="after training, speed-up and memory against an earlier summary (default: None)")
    return parser


def read_configs(arguments):
    """Parsed arguments -> (model, training, fusion, profiler) configs; ValueError on impossible values."""
    given = vars(arguments)
    if given["enable_all_profiling"]:
        given = {**{f.name: True for f in fields(ProfilerConfig) if f.metadata["type"] is bool}, **given}
    fusion = FusionConfig() if given["fusion_preset"] is None else FusionConfig.preset(given["fusion_preset"])
    given = {**asdict(fusion), **given}
    return tuple(cls(**{f.name: given[f.name] for f in fields(cls) if f.name in given}) for cls in CONFIGS)


def needs_training(parser, arguments, instead):
    """End the program if a file is named that only training reads or writes."""
    for name in ("resume", "save_checkpoint", "plot_contacts", "compare_with_v1"):
        if getattr(arguments, name, None) is not None:
            parser.error(f"argument {flag(name)}: belongs to training, not to {instead}")


def parse(parser, argv):
    """(arguments, their four configs, the mode flag or None); wrong use is one line and exit code 2."""
    arguments = parser.parse_args(argv)
    try:
        configs = read_configs(arguments)
    except ValueError as error:
        name, _, rest = str(error).partition(" = ")
        parser.error(f"argument {flag(name)}: {rest}")
    mode = next((name for name in MODES if getattr(arguments, name[2:].replace("-", "_"))), None)
    if arguments.combinations and mode != "--compare-fusion":
        parser.error("argument --combinations: needs --compare-fusion")
    if mode is not None:
        needs_training(parser, arguments, mode)
        for name in ("enable_pytorch_profiler", "enable_memory_profiling"):
            if getattr(arguments, name, False):
                parser.error(f"argument {flag(name)}: belongs to training, not to {mode}")
    return arguments, configs, mode
