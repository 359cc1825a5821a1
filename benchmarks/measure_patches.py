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
import importlib
import inspect
import os
import sys
import time
import warnings
from functools import partial
from importlib.util import find_spec
from statistics import median
from typing import NamedTuple

for operation in ("TRIATTN", "TRIMUL"):  # or cuEquivariance runs short sequences in plain torch, unsaid
    os.environ.setdefault(f"CUEQ_{operation}_FALLBACK_THRESHOLD", "0")

from script import begin, gpu_or_trial, parser_of, write_result

begin(__name__, "torch")

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from evoformer_kernels import patch
from fusion_lab.measuring.accuracy import ERROR_FACTOR
from fusion_lab.measuring.counters import gpu_times
from fusion_lab.training.errors import MISSING, UserError, exit_code
from fusion_lab.training.flags import whole_number
from fusion_lab.training.machine import MEGABYTE

ROWS = 64  # of OpenFold's alignment
PLAIN, PEER, OURS, GRAPHS = "as it is", "cuEquivariance", "patched", "patched, graphs"
COMPILED = {"compiled": PLAIN, "patched, compiled": OURS}  # and what is compiled
WAYS = {f"{kind}{', checkpointed' * again}": (kind, again)
        for again in (False, True) for kind in (PLAIN, *COMPILED, PEER, OURS, GRAPHS)
        if not (again and kind in COMPILED)}


class Block(NamedTuple):
    """A project's block. tensors and masks: {argument: which of SHAPES}, and the tensors' channels."""
    module: str
    name: str
    sizes: dict
    tensors: dict
    masks: dict
    batch: tuple = (1,)  # dimensions before those of SHAPES


SHAPES = dict(single=lambda present: present, pair=lambda present: present[:, None] * present,
              rows=lambda present: present.expand(ROWS, -1))  # from which residues are present: a mask
MODELS = dict(
    boltz=Block("boltz.model.layers.pairformer", "PairformerLayer", dict(
        token_s=384, token_z=128, num_heads=16, dropout=0.0, v2=True, pairwise_head_width=32),
        dict(s=("single", 384), z=("pair", 128)), dict(mask="single", pair_mask="pair")),
    openfold3=Block("openfold3.core.model.latent.pairformer", "PairFormerBlock", dict(
        c_s=384, c_z=128, c_hidden_pair_bias=24, no_heads_pair_bias=16, c_hidden_mul=128,
        c_hidden_pair_att=32, no_heads_pair=4, transition_n=4, transition_type="swiglu", pair_dropout=0.0,
        fuse_projection_weights=False, inf=1e9),
        dict(s=("single", 384), z=("pair", 128)), dict(single_mask="single", pair_mask="pair")),
    protenix=Block("protenix.model.modules.pairformer", "PairformerBlock", dict(  # as in templates and MSA
        c_s=0, c_z=128, c_hidden_mul=128, num_intermediate_factor=4, c_hidden_pair_att=32, no_heads_pair=4,
        dropout=0.0), dict(z=("pair", 128)), dict(pair_mask="pair"), batch=()),
    openfold=Block("openfold.model.evoformer", "EvoformerBlock", dict(
        c_m=256, c_z=128, c_hidden_msa_att=32, c_hidden_opm=32, c_hidden_mul=128, c_hidden_pair_att=32,
        no_heads_msa=8, no_heads_pair=4, transition_n=4, msa_dropout=0.0, pair_dropout=0.0,
        no_column_attention=False, opm_first=False, fuse_projection_weights=False, inf=1e9, eps=1e-3),
        dict(m=("rows", 256), z=("pair", 128)), dict(msa_mask="rows", pair_mask="pair")))


class Layer(nn.Module):
    """A project's block, called alike: by its tensors in their order and by which residues are present."""
    by_peer = False  # whether Boltz-2's calls cuEquivariance

    def __init__(self, name):
        super().__init__()
        self.name, self.block = name, MODELS[name]
        kind = getattr(importlib.import_module(self.block.module), self.block.name)
        known = inspect.signature(kind.__init__).parameters  # releases of OpenFold differ
        self.layer = kind(**{key: value for key, value in self.block.sizes.items() if key in known})

    def mask(self, kind, present):
        there = SHAPES[kind](present)
        return there.expand(*self.block.batch, *there.shape)

    def forward(self, *inputs):
        *x, present = inputs
        given = dict(zip(self.block.tensors, x, strict=True))
        given |= {name: self.mask(kind, present) for name, kind in self.block.masks.items()}
        given |= dict(s=None) if self.name == "protenix" else {}
        given |= dict(use_kernels=self.by_peer) if self.name == "boltz" else {}
        outs = self.layer(**given)
        return [out for out in outs if out is not None]


class Stack(nn.Module):
    """So many blocks behind each other; again: each with activation checkpointing."""

    def __init__(self, name, blocks):
        super().__init__()
        self.blocks, self.again = nn.ModuleList(Layer(name) for _ in range(blocks)), False

    def forward(self, *inputs):
        *x, present = inputs
        for block in self.blocks:
            x = checkpoint(block, *x, present, use_reentrant=False) if self.again else block(*x, present)
        return x


class Problem:
    """A model with inputs, a mask, and gradients of its outputs that are 0 where outputs are undefined."""

    def __init__(self, name, S, device, blocks):
        torch.manual_seed(1)
        self.model, self.device = Stack(name, blocks), device
        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter.add_(torch.randn_like(parameter), alpha=0.05)  # many begin with zeros
        self.model.to(device).train()
        self.present = torch.ones(S, device=device)
        self.present[S - max(1, S // 9):] = 0
        first, self.inputs, self.keeps = self.model.blocks[0], [], []
        for kind, channels in first.block.tensors.values():
            self.keeps.append(first.mask(kind, self.present)[..., None])
            shape = *self.keeps[-1].shape[:-1], channels
            self.inputs.append(torch.randn(shape, device=device).requires_grad_())
        self.weights = [torch.randn_like(x) * keep for x, keep in zip(self.inputs, self.keeps, strict=True)]

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


def compare(name, S, device, arguments):
    """{way: row} of one model and size."""
    problem, on_gpu = Problem(name, S, device, arguments.blocks), device.type == "cuda"
    peer = on_gpu and name == "boltz" and find_spec("cuequivariance_torch")
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
                        rows[way]["gpu_ms"] = sum(ms for *_, ms in gpu_times(partial(problem.step, again)))
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
        Layer(name)
    except ImportError as error:
        return f"{name} cannot be imported ({error})"
    return ""


def main(argv=None):
    parser = parser_of(__file__, __doc__, sizes=[128, 256, 384, 512], steps=10,
                       quick="on a CPU: to try the script")
    parser.add_argument("--path", nargs="+", default=[], help="directories in which the projects lie")
    parser.add_argument("--blocks", type=whole_number(), default=1,
                        help="behind each other (default: %(default)s)")
    parser.add_argument("--compiled", action="store_true", help="torch.compile, too, which takes minutes")
    arguments = parser.parse_args(argv)
    sys.path += arguments.path
    device = gpu_or_trial(arguments.quick)
    absent = {name: reason for name in MODELS if (reason := importable(name))}
    if len(absent) == len(MODELS):
        raise UserError(f"{'; '.join(absent.values())}: install one or name its directory by --path",
                        code=MISSING)
    for reason in absent.values():
        print(f"left out: {reason}")
    if "boltz" not in absent and not find_spec("cuequivariance_torch"):
        print("left out: Boltz with cuEquivariance, which is not installed")
    if device.type == "cuda":
        warnings.filterwarnings("error", ".*(its own forward runs|it runs without a graph)")
    results, wrong = {}, []
    for name in [name for name in MODELS if name not in absent]:
        for S in arguments.sizes:
            rows = results[f"{name} S{S}"] = compare(name, S, device, arguments)
            show(name, S, rows)
            wrong += [f"{name} S{S}, {text}" for text in broken(rows)]
            if arguments.out:
                write_result(arguments.out / "patches.json", device, results=results)
    for text in wrong:
        print(text)
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(exit_code(main, None, "measure_patches.py"))
