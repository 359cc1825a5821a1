#!/usr/bin/env python3
"""Blocks of Boltz-2, OpenFold3, Protenix and OpenFold as they are, and with our kernels by patch(), with and
without CUDA graphs: a training step of each. Boltz-2's also with cuEquivariance's kernels, where installed.

    python benchmarks/measure_patches.py --out OUT [--path DIR ...] [--sizes 128 256 384 512] [--blocks 8]

The blocks are pair blocks (c_z 128) and OpenFold's Evoformer block (64 rows, c_m 256), from installed
packages or from checkouts in --path, as many as --blocks behind each other. A step is forward and backward,
called from Python, under autocast in bfloat16, without dropout, with and without activation checkpointing of
each block; ways alternate. Columns: the step's time, the GPU's share of it (replayed graphs' kernels, too),
peak memory. Errors are against the blocks in float32: of outputs, gradients of inputs and gradients of
parameters, each the largest |difference| / |exact| of a tensor. --compiled adds the block by torch.compile,
as it is and patched. Writes OUT/patches.json after each size. Exit code 1 if an error of ours is above three
times that of the blocks as they are or our kernels did not run, 3 where no project is there, 4 without a GPU
(--quick tries the script on a CPU, where all ways run the blocks' own code).
"""
import copy
import inspect
import os
import pathlib
import sys
import time
import warnings
from importlib.util import find_spec
from statistics import median

for operation in ("TRIATTN", "TRIMUL"):  # or cuEquivariance runs short sequences in plain torch, unsaid
    os.environ.setdefault(f"CUEQ_{operation}_FALLBACK_THRESHOLD", "0")

ROOT = pathlib.Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
from fusion_lab.training import errors

errors.begin(__name__, "torch")

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from evoformer_kernels import patch
from fusion_lab.measuring.accuracy import ERROR_FACTOR
from fusion_lab.training.errors import MISSING, NO_GPU, UserError, exit_code
from fusion_lab.training.files import finite, write_json
from fusion_lab.training.flags import Parser, whole_number
from fusion_lab.training.machine import MEGABYTE, choose_device, system_info

ROWS = 64  # of OpenFold's alignment
PLAIN, PEER, OURS, GRAPHS = "as it is", "cuEquivariance", "patched", "patched, graphs"
COMPILED = {"compiled": PLAIN, "patched, compiled": OURS}  # and what is compiled
WAYS = {f"{kind}{', checkpointed' * again}": (kind, again)
        for again in (False, True) for kind in (PLAIN, *COMPILED, PEER, OURS, GRAPHS)
        if not (again and kind in COMPILED)}


class Boltz(nn.Module):
    """Boltz-2's pairformer layer."""
    by_peer = False  # whether it calls cuEquivariance

    def __init__(self, narrow):
        super().__init__()
        from boltz.model.layers.pairformer import PairformerLayer
        self.single, self.pair = (16, 16) if narrow else (384, 128)
        self.layer = PairformerLayer(self.single, self.pair, self.single // 24 or 2, dropout=0.0, v2=True,
                                     pairwise_head_width=self.pair // 4)

    def inputs(self, present):
        """[(tensor's shape, its mask)]"""
        S = len(present)
        return [((1, S, self.single), present[None]), ((1, S, S, self.pair), pairs(present))]

    def forward(self, s, z, present):
        return self.layer(s, z, present[None], pairs(present), use_kernels=self.by_peer)


class OpenFold(nn.Module):
    """OpenFold's Evoformer block."""

    def __init__(self, narrow):
        super().__init__()
        from openfold.model.evoformer import EvoformerBlock
        sizes = dict(c_m=256, c_z=128, c_hidden_msa_att=32, c_hidden_opm=32, c_hidden_mul=128,
                     c_hidden_pair_att=32, no_heads_msa=8, no_heads_pair=4, transition_n=4)
        if narrow:
            sizes |= dict(c_m=16, c_z=16, c_hidden_mul=16, c_hidden_pair_att=8, no_heads_pair=2)
        sizes |= dict(msa_dropout=0.0, pair_dropout=0.0, no_column_attention=False, opm_first=False,
                      fuse_projection_weights=False, inf=1e9, eps=1e-3)
        known = inspect.signature(EvoformerBlock.__init__).parameters
        self.layer = EvoformerBlock(**{name: value for name, value in sizes.items() if name in known})
        self.c_m, self.c_z = sizes["c_m"], sizes["c_z"]

    def inputs(self, present):
        """[(tensor's shape, its mask)]"""
        S = len(present)
        return [((1, ROWS, S, self.c_m), self.rows(present)), ((1, S, S, self.c_z), pairs(present))]

    def rows(self, present):
        return present.expand(1, ROWS, -1)

    def forward(self, m, z, present):
        return self.layer(m, z, msa_mask=self.rows(present), pair_mask=pairs(present))


class OpenFold3(nn.Module):
    """OpenFold3's pairformer block."""

    def __init__(self, narrow):
        super().__init__()
        from openfold3.core.model.latent.pairformer import PairFormerBlock
        self.single, self.pair = (16, 16) if narrow else (384, 128)
        self.layer = PairFormerBlock(
            c_s=self.single, c_z=self.pair, c_hidden_pair_bias=self.single // 16, no_heads_pair_bias=16,
            c_hidden_mul=self.pair, c_hidden_pair_att=self.pair // 4, no_heads_pair=4, transition_n=4,
            transition_type="swiglu", pair_dropout=0.0, fuse_projection_weights=False, inf=1e9)

    inputs = Boltz.inputs

    def forward(self, s, z, present):
        return self.layer(s, z, single_mask=present[None], pair_mask=pairs(present))


class Protenix(nn.Module):
    """Protenix' pairformer block without the single representation, as in its templates and MSA."""

    def __init__(self, narrow):
        super().__init__()
        from protenix.model.modules.pairformer import PairformerBlock
        self.pair = 16 if narrow else 128
        self.layer = PairformerBlock(c_s=0, c_z=self.pair, c_hidden_mul=self.pair, num_intermediate_factor=4,
                                     c_hidden_pair_att=self.pair // 4, no_heads_pair=4, dropout=0.0)

    def inputs(self, present):
        """[(tensor's shape, its mask)]"""
        S = len(present)
        return [((S, S, self.pair), pairs(present)[0])]

    def forward(self, z, present):
        return self.layer(None, z, pair_mask=pairs(present)[0])[1:]


MODELS = dict(boltz=Boltz, openfold3=OpenFold3, protenix=Protenix, openfold=OpenFold)


def pairs(present):
    return (present[:, None] * present)[None]


class Stack(nn.Module):
    """So many blocks behind each other; again: each with activation checkpointing."""

    def __init__(self, name, narrow, blocks):
        super().__init__()
        self.blocks, self.again = nn.ModuleList(MODELS[name](narrow) for _ in range(blocks)), False

    def forward(self, *inputs):
        *x, present = inputs
        for block in self.blocks:
            x = checkpoint(block, *x, present, use_reentrant=False) if self.again else block(*x, present)
        return x


class Problem:
    """A model with inputs, a mask, and gradients of its outputs that are 0 where outputs are undefined."""

    def __init__(self, name, S, device, narrow, blocks):
        torch.manual_seed(1)
        self.model, self.device = Stack(name, narrow, blocks), device
        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter.add_(torch.randn_like(parameter), alpha=0.05)  # many begin with zeros
        self.model.to(device).train()
        self.present = torch.ones(S, device=device)
        self.present[S - max(1, S // 9):] = 0
        shapes = self.model.blocks[0].inputs(self.present)
        self.inputs = [torch.randn(shape, device=device).requires_grad_() for shape, _ in shapes]
        self.keeps = [mask[..., None] for _, mask in shapes]
        self.weights = [torch.randn(shape, device=device) * mask[..., None] for shape, mask in shapes]

    def step(self, again=False, autocast=True):
        for tensor in (*self.inputs, *self.model.parameters()):
            tensor.grad = None
        with torch.autocast(self.device.type, torch.bfloat16, enabled=autocast):
            self.model.again = again
            outs = self.model(*self.inputs, self.present)
        torch.autograd.backward(outs, [w.to(out.dtype) for w, out in zip(self.weights, outs, strict=True)])
        return outs

    def results(self, **how):
        """[outputs, gradients of inputs, [gradients of all parameters, as one]]"""
        outs = self.step(**how)
        parameters = [p.grad.flatten() for p in self.model.parameters() if p.grad is not None]
        return [[(out * keep).detach().float() for out, keep in zip(outs, self.keeps, strict=True)],
                [x.grad.clone() for x in self.inputs], [torch.cat(parameters)]]


def errors(found, exact):
    return [torch.stack([(a - b).norm() / b.norm() for a, b in zip(*both, strict=True)]).max().item()
            for both in zip(found, exact, strict=True)]  # torch's max keeps NaN


def plainly(way):
    """The way of the blocks as they are beside this one."""
    return PLAIN + ", checkpointed" * WAYS[way][1]


def by(kind, model):
    """A copy of the model that runs in this way."""
    model = copy.deepcopy(model)
    if COMPILED.get(kind, kind) in (OURS, GRAPHS):
        patch(model, graphs=kind == GRAPHS)
    for block in model.blocks:
        if kind == PEER:
            block.by_peer = True
        if kind in COMPILED:
            block.compile(dynamic=False)
    return model


def broken(rows):
    """Lines on our rows of a problem whose errors break the rule of three, or that failed."""
    said = []
    for name, row in rows.items():
        if name.startswith(PEER):
            continue
        own = rows[plainly(name)].get("errors")
        if "failed" in row:
            said.append(f"{name}: {row['failed']}")
        elif own and not all(error <= ERROR_FACTOR * limit + 2 * torch.finfo(torch.bfloat16).eps
                             for error, limit in zip(row["errors"], own, strict=True)):
            said.append(f"{name}: errors {row['errors']}, as it is {own}")
    return said


def seconds(problem, again):
    """Of a step, called from Python and waited for."""
    wait = torch.cuda.synchronize if problem.device.type == "cuda" else (lambda: None)
    wait()
    start = time.perf_counter()
    problem.step(again)
    wait()
    return time.perf_counter() - start


def gpu_seconds(problem, again):
    """Sum over the kernels of a step."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA],
                                acc_events=True) as profiler:
        problem.step(again)
        torch.cuda.synchronize()
    return sum(event.self_device_time_total for event in profiler.key_averages()) / 1e6


def compare(name, S, device, arguments):
    """{way: row} of one model and size."""
    problem, on_gpu = Problem(name, S, device, arguments.quick, arguments.blocks), device.type == "cuda"
    peer = on_gpu and hasattr(problem.model.blocks[0], "by_peer") and find_spec("cuequivariance_torch")
    ways = {way: how for way, how in WAYS.items() if (peer or how[0] != PEER)
            and (arguments.compiled or how[0] not in COMPILED)}
    exact, rows, times = problem.results(autocast=False), {way: {} for way in ways}, {way: [] for way in ways}
    models = {way: by(kind, problem.model) for way, (kind, _) in ways.items()}
    for number in range(-1, arguments.steps):
        for way, (_, again) in ways.items():
            problem.model = models[way]
            try:
                if number < 0:
                    for _ in range(3):  # compiled, captured
                        problem.step(again)
                    rows[way]["errors"] = errors(problem.results(again=again), exact)
                    if on_gpu:
                        rows[way]["gpu_ms"] = 1e3 * gpu_seconds(problem, again)
                        torch.cuda.reset_peak_memory_stats()
                        problem.step(again)
                        rows[way]["peak_mb"] = torch.cuda.max_memory_allocated() / MEGABYTE
                elif "failed" not in rows[way]:
                    times[way].append(1e3 * seconds(problem, again))
            except Exception as error:  # a way that fails is a row with its reason
                rows[way] = dict(failed=" ".join(str(error).split())[:200] or type(error).__name__)
    for way, found in times.items():
        if found:
            rows[way] |= dict(median_ms=median(found), least_ms=min(found), most_ms=max(found))
    return rows


def show(name, S, rows):
    for way, row in rows.items():
        own = rows[plainly(way)]
        label = f"{name:9s} S{S:4d} {way:28s}"
        if "failed" in row:
            print(f"{label} failed: {row['failed']}", flush=True)
            continue
        ratio = f"x{own['median_ms'] / row['median_ms']:.2f}" if "median_ms" in own else ""
        gpu = f"GPU {row['gpu_ms']:7.2f} ms  peak {row['peak_mb']:6.0f} MB  " if "gpu_ms" in row else ""
        print(f"{label} {row['median_ms']:8.2f} ms ({row['least_ms']:.2f}, {row['most_ms']:.2f}) {ratio:6s} "
              f"{gpu}errors {' '.join(f'{error:.1e}' for error in row['errors'])}", flush=True)


def importable(name):
    """"" or why the model cannot be built."""
    try:
        MODELS[name](narrow=True)
    except ImportError as error:
        return f"{name} cannot be imported ({error})"
    return ""


def main(argv=None):
    parser = Parser(prog="measure_patches.py", description=__doc__)
    parser.add_argument("--out", type=pathlib.Path, help="directory for patches.json (default: none)")
    parser.add_argument("--path", nargs="+", default=[], help="directories in which the projects lie")
    parser.add_argument("--sizes", nargs="+", type=whole_number(), default=[128, 256, 384, 512],
                        help="residues (default: %(default)s)")
    parser.add_argument("--blocks", type=whole_number(), default=1,
                        help="behind each other (default: %(default)s)")
    parser.add_argument("--compiled", action="store_true", help="torch.compile, too, which takes minutes")
    parser.add_argument("--steps", type=whole_number(), default=10, help="timed (default: %(default)s)")
    parser.add_argument("--quick", action="store_true", help="narrow, on a CPU: to try the script")
    arguments = parser.parse_args(argv)
    sys.path += arguments.path
    if not (arguments.quick or torch.cuda.is_available()):
        raise UserError("needs a GPU; --quick tries the script on a CPU", code=NO_GPU)
    device = choose_device("cpu" if arguments.quick else "cuda")
    absent = {name: reason for name in MODELS if (reason := importable(name))}
    if len(absent) == len(MODELS):
        raise UserError(f"{'; '.join(absent.values())}: install one or name its directory by --path",
                        code=MISSING)
    for reason in absent.values():
        print(f"left out: {reason}")
    if "boltz" not in absent and not find_spec("cuequivariance_torch"):
        print("left out: Boltz with cuEquivariance, which is not installed")
    if device.type == "cuda":
        warnings.filterwarnings("error", ".*its own forward runs")
    results, wrong = {}, []
    for name in [name for name in MODELS if name not in absent]:
        for S in arguments.sizes:
            rows = results[f"{name} S{S}"] = compare(name, S, device, arguments)
            show(name, S, rows)
            wrong += [f"{name} S{S}, {text}" for text in broken(rows)]
            if arguments.out:
                command = " ".join(["python benchmarks/measure_patches.py", *sys.argv[1:]])
                write_json(arguments.out / "patches.json", finite(dict(
                    command=command, results=results, date=time.strftime("%F"),
                    system_info=system_info(device))))
    for text in wrong:
        print(text)
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(exit_code(main, None, "measure_patches.py"))
