#!/usr/bin/env python3
"""OpenFold's own Evoformer block, as it is and with this project's triangle kernels put into it.

    pip install openfold (or put a checkout on PYTHONPATH)
    python benchmarks/patch_openfold.py --out OUT [--sizes 256] [--rows 64]

`patch(block)` is what a user of OpenFold would write: it replaces forward of every triangle multiplication
and triangle attention within a module by calls of fusion_lab.kernels, on OpenFold's own parameters, so that
checkpoints stay. Both blocks get the same weights, masks and inputs, in bfloat16 and, compared element by
element, against the unpatched block in float64: errors may be three times the unpatched one's own. Forward
and backward of each are one CUDA graph; replays alternate. Writes OUT/openfold.json. Exit code 1 if outputs
or gradients differ by more, 3 where OpenFold, Triton or a GPU is missing.
"""
import copy
import inspect
import pathlib
import sys
import time
from functools import partial

ROOT = pathlib.Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
from fusion_lab.training import interrupts

interrupts.quiet(__name__)

from fusion_lab.training.files import MISSING, UserError, exit_code, require_packages, write_json

require_packages("patch_openfold.py", "torch", "triton")

import torch

from fusion_lab.kernels.attention import operator as attention_operator
from fusion_lab.kernels.triangle_multiplication import operator as triangle_operator
from fusion_lab.measuring.accuracy import ERROR_FACTOR
from fusion_lab.measuring.clocks import PhaseTimer, quantiles
from fusion_lab.training.cuda_graphs import GraphedStep
from fusion_lab.training.flags import Parser, whole_number
from fusion_lab.training.machine import system_info

SIZES = dict(c_m=256, c_z=128, c_hidden_msa_att=32, c_hidden_opm=32, c_hidden_mul=128, c_hidden_pair_att=32,
             no_heads_msa=8, no_heads_pair=4, transition_n=4, msa_dropout=0.0, pair_dropout=0.0,
             no_column_attention=False, opm_first=False, fuse_projection_weights=False, inf=1e9, eps=1e-3)
QUICK = dict(SIZES, c_m=16, c_z=16, c_hidden_msa_att=8, c_hidden_opm=4, c_hidden_mul=16, c_hidden_pair_att=8,
             no_heads_msa=2, no_heads_pair=2)


def attention_forward(layer, x, mask=None, *_, **__):
    """Of OpenFold's TriangleAttention: x (*, I, J, c), mask (*, I, J)."""
    mask = x.new_ones(x.shape[:-1]) if mask is None else mask
    if not layer.starting:
        x, mask = x.transpose(-2, -3), mask.transpose(-1, -2)
    x, mha = layer.layer_norm(x), layer.mha
    parts = [linear(x).view(-1, *x.shape[-3:-1], linear.out_features)
             for linear in (mha.linear_q, mha.linear_k, mha.linear_v, mha.linear_g)]
    bias = layer.linear(x).view(-1, *x.shape[-3:-1], layer.no_heads).permute(0, 3, 1, 2)
    out = attention_operator.gated_attention(parts, layer.no_heads, 2, bias,
                                             mask.reshape(-1, *mask.shape[-2:]))
    out = mha.linear_o(out.view(*x.shape[:-1], -1))
    return out if layer.starting else out.transpose(-2, -3)


def multiplication_forward(layer, z, mask=None, *_, **__):
    """Of OpenFold's TriangleMultiplicativeUpdate: z (*, I, J, c), mask (*, I, J)."""
    pair = z.reshape(-1, *z.shape[-3:])
    mask = None if mask is None else mask.reshape(-1, *mask.shape[-2:])
    inner = [layer.linear_a_p, layer.linear_b_p, layer.linear_a_g, layer.linear_b_g]
    weight, bias = (torch.cat([getattr(linear, kind) for linear in inner]) for kind in ("weight", "bias"))
    before, behind = layer.layer_norm_in, layer.layer_norm_out
    out = triangle_operator.triangle_multiplication(
        pair, before.weight, before.bias, weight, bias, behind.weight, behind.bias, layer.linear_z.weight,
        layer.linear_z.bias, layer.linear_g.weight, layer.linear_g.bias, mask, layer._outgoing,
        getattr(before, "eps", 1e-5))
    return out.view(z.shape)


def patch(module):
    """Put the kernels into every triangle sub-layer of OpenFold's within module; returns how many."""
    from openfold.model.triangular_attention import TriangleAttention
    from openfold.model.triangular_multiplicative_update import TriangleMultiplicativeUpdate
    forwards = {TriangleAttention: attention_forward, TriangleMultiplicativeUpdate: multiplication_forward}
    found = 0
    for layer in module.modules():
        for kind, forward in forwards.items():
            if isinstance(layer, kind):
                layer.forward = partial(forward, layer)
                found += 1
    return found


def make_block(sizes):
    """OpenFold's block, with the arguments that this release of it takes; weights away from zero."""
    from openfold.model.evoformer import EvoformerBlock
    known = inspect.signature(EvoformerBlock.__init__).parameters
    torch.manual_seed(0)
    block = EvoformerBlock(**{name: value for name, value in sizes.items() if name in known})
    with torch.no_grad():
        for parameter in block.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.02)
    return block.eval()  # no dropout


def step(block, batch):
    """{name: output or gradient} of a block."""
    m, z = (batch[name].detach().requires_grad_() for name in ("m", "z"))
    out = block(m, z, msa_mask=batch["msa_mask"], pair_mask=batch["pair_mask"])
    named = dict(block.named_parameters())
    loss = sum((o * batch[f"{name}_weight"]).sum() for o, name in zip(out, "mz", strict=True))
    grads = torch.autograd.grad(loss, [m, z, *named.values()], allow_unused=True)
    names = ["m", "z", "gradient of m", "gradient of z", *(f"gradient of {name}" for name in named)]
    return {name: t.detach() for name, t in zip(names, [*out, *grads], strict=True) if t is not None}


def make_batch(sizes, rows, size, device, dtype):
    generator = torch.Generator(device).manual_seed(1)
    shapes = dict(m=(1, rows, size, sizes["c_m"]), z=(1, size, size, sizes["c_z"]))
    batch = {f"{name}{end}": torch.randn(shape, device=device, generator=generator).to(dtype)
             for name, shape in shapes.items() for end in ("", "_weight")}
    present = torch.ones(1, size, device=device, dtype=dtype)
    present[:, size - 2:] = 0
    batch["msa_mask"] = present[:, None].expand(-1, rows, -1).contiguous()
    batch["pair_mask"] = present[:, :, None] * present[:, None]
    for name, mask in (("m_weight", "msa_mask"), ("z_weight", "pair_mask")):
        batch[name] = batch[name] * batch[mask][..., None]  # what lies in masked places is not defined
    return batch


def worst(found, exact, masks):
    """{name: error relative to the largest element, or to a thousandth of that of all gradients}"""
    top = max(t.abs().max().item() for name, t in exact.items() if name.startswith("gradient"))
    errors = {}
    for name, truth in exact.items():
        mask = masks.get(name, 1)
        error = ((found[name].double() - truth) * mask).abs().max().item()
        errors[name] = error / max((truth * mask).abs().max().item(), 1e-3 * top)
    return errors


def compare(sizes, rows, size, arguments, device, dtype):
    """{block: row} of one size, interleaved."""
    plain = make_block(sizes).to(device)
    blocks = dict(openfold=plain.to(dtype), patched=copy.deepcopy(plain).to(dtype))
    if patch(blocks["patched"]) != 4:
        raise UserError("this release of OpenFold has other triangle sub-layers than the four known ones")
    batch = make_batch(sizes, rows, size, device, dtype)
    wide = {name: t.double() for name, t in batch.items()}
    masks = dict(m=wide["msa_mask"][..., None], z=wide["pair_mask"][..., None])
    exact = step(copy.deepcopy(blocks["openfold"]).double(), wide)
    errors = {name: worst(step(block, batch), exact, masks) for name, block in blocks.items()}
    floor = 2 * torch.finfo(dtype).eps if dtype != torch.float32 else 16 * torch.finfo(dtype).eps
    broken = [f"{name}: {error:.1e}, OpenFold's own {errors['openfold'][name]:.1e}" for name, error
              in errors["patched"].items() if error > ERROR_FACTOR * errors["openfold"][name] + floor]
    runs, timers = {}, {}
    for name, block in blocks.items():
        runs[name], timers[name] = partial(step, block, batch), PhaseTimer(device)
        if device.type == "cuda":
            graph = GraphedStep(partial(step, block), batch, device)
            runs[name] = lambda graph=graph: graph.graph.replay()
    for _ in range(arguments.steps):
        for name, run in runs.items():
            timers[name].start()
            run()
            timers[name].mark()
    return {name: dict(zip(("p20_ms", "median_ms", "p80_ms"),
                           (1e3 * t for t in quantiles(timers[name].seconds()[:, 0])), strict=True),
                       worst_error=max(errors[name].values()),
                       broken=broken if name == "patched" else []) for name in blocks}


def main(argv=None):
    parser = Parser(prog="patch_openfold.py", description=__doc__)
    parser.add_argument("--out", type=pathlib.Path, help="directory for openfold.json (default: none)")
    parser.add_argument("--sizes", nargs="+", type=whole_number(), default=[128, 256, 384],
                        help="residues (default: %(default)s)")
    parser.add_argument("--rows", type=whole_number(), default=64, help="MSA rows (default: %(default)s)")
    parser.add_argument("--steps", type=whole_number(), default=20, help="timed (default: %(default)s)")
    parser.add_argument("--quick", action="store_true",
                        help="narrow, float32, on a CPU: with TRITON_INTERPRET=1, which must be set before")
    arguments = parser.parse_args(argv)
    try:
        import openfold.model.evoformer  # noqa: F401
    except ImportError as error:
        raise UserError(f"OpenFold cannot be imported ({error}): install it or put it on PYTHONPATH",
                        code=MISSING) from None
    if not torch.cuda.is_available() and not arguments.quick:
        raise UserError("needs a GPU", code=MISSING)
    device, dtype = torch.device("cpu" if arguments.quick else "cuda"), torch.bfloat16
    dtype, results = torch.float32 if arguments.quick else dtype, {}
    for size in arguments.sizes:
        found = compare(QUICK if arguments.quick else SIZES, arguments.rows, size, arguments, device, dtype)
        results[f"S {size}, N {arguments.rows}"] = found
        for name, row in found.items():
            print(f"S {size:4d} {name:10s} {row['median_ms']:8.2f} ms ({row['p20_ms']:.2f}, "
                  f"{row['p80_ms']:.2f})  worst error {row['worst_error']:.1e}  "
                  f"{'; '.join(row['broken'][:2]) or 'ok'}", flush=True)
        if arguments.out:
            write_json(arguments.out / "openfold.json", dict(
                command=" ".join(["python benchmarks/patch_openfold.py", *sys.argv[1:]]), results=results,
                date=time.strftime("%F"), system_info=system_info(device)))
    return int(any(row["broken"] for rows in results.values() for row in rows.values()))


if __name__ == "__main__":
    sys.exit(exit_code(main, None, "patch_openfold.py"))
