#!/usr/bin/env python3
"""One Evoformer block with everything on, against the same block with cuEquivariance's triangle kernels.

    pip install cuequivariance-torch cuequivariance-ops-torch-cu13     # NVIDIA only; not needed otherwise
    python benchmarks/compare_peers.py --out OUT [--shapes S64] [--steps 30]

"all fusion" and "ultra" are the block under --enable-all-fusion and, on a GPU, --enable-ultra, in bfloat16.
"cuEquivariance" differs from "all fusion" in the four triangle sub-layers alone: attention is
cuequivariance_torch.triangle_attention, multiplication (LayerNorms and gates included)
triangle_multiplicative_update. All three are compiled. "plain" is the baseline block. Forward and backward of
each are one CUDA graph; replays alternate. Errors are against the plain block in float64. Writes
OUT/peers.json after each shape, with the kernels that took the most time, so that one sees whose ran. Exit
code 1 if an error is above three times the plain block's, 3 where the package or a GPU for it is missing.
"""
import os
import pathlib
import re
import sys
import time
from functools import partial

os.environ.setdefault("CUEQ_TRIATTN_FALLBACK_THRESHOLD", "0")  # or short sequences run plain torch instead,
os.environ.setdefault("CUEQ_TRIMUL_FALLBACK_THRESHOLD", "0")  # and say nothing

ROOT = pathlib.Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
from fusion_lab.training import interrupts

interrupts.quiet(__name__)

import torch

import tiny_openfold_v2 as tof
from fusion_lab.kernels.library.attention_choice import prepare_flex_attention
from fusion_lab.measuring.accuracy import shake
from fusion_lab.measuring.clocks import PhaseTimer, quantiles
from fusion_lab.training.checkpoints import unpacked
from fusion_lab.training.cuda_graphs import GraphedStep
from fusion_lab.training.files import MISSING, UserError, exit_code, write_json
from fusion_lab.training.flags import Parser, regular_expression, whole_number
from fusion_lab.training.machine import system_info
from proteins.fast_evoformer import compiler_options

SHAPES = {"B4 S64 N16": dict(batch=4, seq_len=64, num_seqs=16),
          "B1 S256 N64": dict(batch=1, seq_len=256, num_seqs=64),
          "B1 S384 N128 c_m 256": dict(batch=1, seq_len=384, num_seqs=128, msa_dim=256, msa_heads=8)}
QUICK = {"tiny": dict(batch=2, seq_len=8, num_seqs=4, msa_dim=16, pair_dim=16, msa_heads=2, pair_heads=2)}


class PeerTriangleAttention(tof.FusedTriangleAttention):
    """Triangle attention whose softmax(q k^T + bias) v is cuEquivariance's."""

    def attention(self, x, axis, key_mask=None, bias=None):
        from cuequivariance_torch import triangle_attention
        assert key_mask is None
        q, k, v, gate = self.project(x)
        q, k, v = (self.to_heads(p, axis).contiguous() for p in (q, k, v))
        out = triangle_attention(q, k, v, bias[:, None].float().contiguous())
        return self.o_proj(self.from_heads(out, axis) * gate.sigmoid())


class PeerTriangleMultiplication(tof.FusedTriangleMultiplication):
    """Triangle multiplication that is cuEquivariance's from the first LayerNorm to the output gate."""

    def forward(self, pair, seq_mask=None):
        from cuequivariance_torch import triangle_multiplicative_update
        assert seq_mask is None
        parts = dict(norm_in=self.layer_norm, p_in=self.left_right_proj, g_in=self.left_right_gate,
                     norm_out=self.center_norm, p_out=self.output_proj, g_out=self.output_gate)
        weights = {f"{name}_{kind}": getattr(part, kind)
                   for name, part in parts.items() for kind in ("weight", "bias")}
        return triangle_multiplicative_update(pair, "outgoing" if self.outgoing else "incoming", **weights)


def blocks(config, device, dtype):
    """{name: block} with equal weights: plain, ours and with the peer's triangle sub-layers. Our kernels have
    their row on a GPU only."""
    torch.manual_seed(0)
    plain = tof.FusedEvoformerBlock(config, tof.FusionConfig.preset(False))
    shake(tof.PROGRAM, plain)
    everything, packed = tof.FusionConfig.preset(True), tof.FusionConfig(enable_projection_fusion=False)
    ours, peer = tof.FusedEvoformerBlock(config, everything), tof.FusedEvoformerBlock(config, everything)
    peer.triangle_mult_outgoing = PeerTriangleMultiplication(config, packed, outgoing=True)
    peer.triangle_mult_incoming = PeerTriangleMultiplication(config, packed, outgoing=False)
    peer.triangle_attn_starting = PeerTriangleAttention(config, everything, starting=True)
    peer.triangle_attn_ending = PeerTriangleAttention(config, everything, starting=False)
    found = {"plain": plain, "all fusion": ours, "cuEquivariance": peer}
    if device.type == "cuda":
        found["ultra"] = tof.FusedEvoformerBlock(config, tof.FusionConfig.ultra())
    for block in found.values():
        block.load_state_dict(plain.state_dict())
        block.to(device, dtype)
    return found


def gradients_step(block):
    """run(inputs) -> ([msa, pair], gradients of the inputs msa and pair, {parameter name: its gradient})"""
    def run(tensors):
        msa, pair = (tensors[name].detach().requires_grad_() for name in ("msa", "pair"))
        out = block(msa, pair)
        loss = sum((o * tensors[f"{n}_weight"]).sum() for o, n in zip(out, ("msa", "pair"), strict=True))
        named = dict(block.named_parameters())
        found = torch.autograd.grad(loss, [msa, pair, *named.values()])
        return [o.detach() for o in out], found[:2], dict(zip(named, found[2:], strict=True))
    return run


def flat(block, results):
    """Results of a step by name, parameters under unpacked names, in float64."""
    outputs, of_inputs, of_parameters = results
    found = dict(msa=outputs[0], pair=outputs[1], d_msa=of_inputs[0], d_pair=of_inputs[1],
                 **unpacked(block, of_parameters))
    return {name: tensor.double() for name, tensor in found.items()}


def worst_error(found, exact):
    """Largest error over all tensors, each relative to its largest element (but not to a vanishing one)."""
    top = max(tensor.abs().max().item() for tensor in exact.values())
    return max((found[name] - truth).abs().max().item() / max(truth.abs().max().item(), 1e-3 * top)
               for name, truth in exact.items())


def inputs(config, batch, device, dtype):
    """msa (B, N, S, c_m), pair (B, S, S, c_z), and weights of the outputs' elements in a loss."""
    generator = torch.Generator(device).manual_seed(1)
    s, n = config.seq_len, config.num_seqs
    forms = dict(msa=(batch, n, s, config.msa_dim), pair=(batch, s, s, config.pair_dim))
    return {f"{name}{end}": torch.randn(form, device=device, generator=generator).to(dtype)
            for name, form in forms.items() for end in ("", "_weight")}


def compare(shape, steps, device, on_gpu):
    """{block: row}, interleaved."""
    sizes = dict(shape)
    batch, dtype = sizes.pop("batch"), torch.bfloat16 if on_gpu else torch.float32
    config = tof.TinyOpenFoldConfig(num_blocks=1, **sizes)
    tensors = inputs(config, batch, device, dtype)
    found = blocks(config, device, dtype)
    truth = blocks(config, device, torch.float64)["plain"]
    exact = flat(truth, gradients_step(truth)({k: v.double() for k, v in tensors.items()}))
    rows, runs, graphs, timers = {}, {}, {}, {}
    for name, block in found.items():
        if on_gpu and name != "plain":
            fusion = tof.FusionConfig.ultra() if name == "ultra" else tof.FusionConfig.preset(True)
            block.compile(dynamic=False, options=dict(
                combo_kernels=config.seq_len <= 128, **compiler_options(fusion)))
        run = gradients_step(block)
        rows[name] = dict(error=worst_error(flat(block, run(tensors)), exact))
        runs[name] = partial(run, tensors)
        if on_gpu:  # graphs keeps what is captured alive, its inputs above all
            graphs[name] = GraphedStep(run, tensors, device)
            runs[name] = graphs[name].graph.replay
        timers[name] = PhaseTimer(device)
    for _ in range(steps):
        for name in found:
            timers[name].start()
            runs[name]()
            timers[name].mark()
    for name, row in rows.items():
        times = quantiles(timers[name].seconds()[:, 0])
        row["p20_ms"], row["median_ms"], row["p80_ms"] = (1e3 * t for t in times)
        row["top"] = top_kernels(runs[name]) if on_gpu else []
    return rows


def top_kernels(replay):
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        replay()
        torch.cuda.synchronize()
    events = sorted(profiler.key_averages(), key=lambda e: -e.self_device_time_total)
    return [(e.key[:90], e.count, round(e.self_device_time_total / 1e3, 3)) for e in events[:12]]


def run(argv):
    parser = Parser(prog="compare_peers.py", description=__doc__)
    parser.add_argument("--out", type=pathlib.Path, help="directory for peers.json (default: none)")
    parser.add_argument("--steps", type=whole_number(), default=30, help="timed (default: %(default)s)")
    parser.add_argument("--shapes", default="", type=regular_expression,
                        help="regular expression over their names (default: all)")
    parser.add_argument("--quick", action="store_true", help="tiny sizes, eager float32, also on a CPU")
    arguments = parser.parse_args(argv)
    try:
        import cuequivariance_torch
    except ImportError:
        raise UserError("cuequivariance is not installed: pip install cuequivariance-torch "
                        "cuequivariance-ops-torch-cu13 (NVIDIA only)", code=MISSING) from None
    on_gpu = torch.cuda.is_available() and not arguments.quick
    if not on_gpu and not arguments.quick:
        raise UserError("cuEquivariance's kernels need an NVIDIA GPU; there is none", code=MISSING)
    device = torch.device("cuda" if on_gpu else "cpu")
    if on_gpu:
        prepare_flex_attention(torch.device("cuda", torch.cuda.current_device()))
    results = {}
    for name, shape in (QUICK if arguments.quick else SHAPES).items():
        if not re.search(arguments.shapes, name):
            continue
        results[name] = compare(shape, arguments.steps, device, on_gpu)
        for peer, row in results[name].items():
            row["accurate"] = row["error"] <= 3 * results[name]["plain"]["error"] + 2e-6
            print(f"{name:22s} {peer:15s} {row['median_ms']:8.3f} ms ({row['p20_ms']:.3f}, "
                  f"{row['p80_ms']:.3f})  worst error {row['error']:.1e}", flush=True)
        if arguments.out:
            write_json(arguments.out / "peers.json", dict(
                command=" ".join(["python benchmarks/compare_peers.py", *sys.argv[1:]]), results=results,
                date=time.strftime("%F"), system_info=system_info(device),
                cuequivariance=getattr(cuequivariance_torch, "__version__", None)))
    if not results:
        parser.error(f"no shape is left by --shapes {arguments.shapes!r}")
    return int(not all(row["accurate"] for rows in results.values() for row in rows.values()))


if __name__ == "__main__":
    sys.exit(exit_code(run, None, "compare_peers.py"))
