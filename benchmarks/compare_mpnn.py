#!/usr/bin/env python3
"""companions/protein_mpnn.py against the code of ProteinMPNN's authors: one training step, in one run.

    git clone https://github.com/dauparas/ProteinMPNN
    python benchmarks/compare_mpnn.py --peer ProteinMPNN/training/model_utils.py --out OUT

The same weights, batch and sizes for all. Before anything is timed, numbers are compared: log-probabilities
with the peer's in float64, under one decoding order, and our fused model with our baseline by the 3x rule.
Steps (forward, backward, fused AdamW) alternate. The peer runs as it is (every layer checkpointed), without
its checkpoints, and that compiled; it makes its graph in every step, ours comes with the data. float32 and
bfloat16 (autocast; ours with master weights) are separate tables, each row with its peak memory: weights,
optimizer, libraries' workspaces. Writes OUT/mpnn.json. Exit code 1 if numbers disagree.
"""
import pathlib
import sys
import types
from functools import partial
from unittest import mock

from script import ROOT, begin, parser_of, write_result

begin(__name__, "torch")

import torch

from fusion_lab.measuring.accuracy import compare_numerics
from fusion_lab.measuring.bench import clipped_step, contest, contest_table, failed, ours
from fusion_lab.training.errors import UserError, exit_code
from fusion_lab.training.feeding import to_device
from fusion_lab.training.flags import whole_number
from fusion_lab.training.machine import choose_device, process_settings
from fusion_lab.training.program import load_program

TOLERANCE = 1e-9  # of log-probabilities in float64
GRAPH = ("enable_torch_compile", "enable_cuda_graphs")
OURS = {  # name: switches beside the defaults
    "ours, baseline": None,
    "ours, fused": (),
    "ours, compiled, graph": GRAPH,
    "ours, compiled, graph, message kernel": (*GRAPH, "enable_message_kernel"),
    "ours, compiled, graph, all kernels": (*GRAPH, "enable_message_kernel", "enable_triton_adamw"),
}
SIZES = dict(batch_size=20, seq_len=512, hidden_dim=128, num_layers=3, neighbors=48)
PRECISIONS = ("float32", "bfloat16")
CHECKPOINT = "torch.utils.checkpoint.checkpoint(layer, "


def load_peer(path, checkpointed):
    """The authors' training/model_utils.py as a module, its layers checkpointed or called."""
    try:
        source = pathlib.Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"--peer {path}: {error}") from None
    if CHECKPOINT not in source:
        raise UserError(f"--peer {path}: not the authors' training/model_utils.py")
    module = types.ModuleType(f"mpnn_peer_{checkpointed}")
    code = compile(source if checkpointed else source.replace(CHECKPOINT, "layer("), path, "exec")
    exec(code, vars(module))
    return module


class Peer:
    """The authors' model with a step like Trainer's."""

    def __init__(self, path, program, settings, device, dtype, checkpointed=True, compiled=False):
        c = settings.model
        self.device, self.dtype = device, dtype
        self.model = load_peer(path, checkpointed).ProteinMPNN(
            node_features=c.hidden_dim, edge_features=c.hidden_dim, hidden_dim=c.hidden_dim,
            num_encoder_layers=c.num_layers, num_decoder_layers=c.num_layers, k_neighbors=c.neighbors,
            augment_eps=0.0, dropout=c.dropout).to(device)
        self.model.load_state_dict(program.trainer(program, settings, device).model.state_dict())
        self.run = torch.compile(self.model) if compiled else self.model
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=settings.training.learning_rate,
                                           fused=True)

    def log_probs(self, batch, noise=None):
        inputs = (batch[key] for key in ("X", "S", "mask", "mask", "residue_idx", "chain"))
        if noise is not None:  # in float64, which its .float() would end
            with mock.patch.object(torch, "randn", lambda *_, **__: noise), \
                    mock.patch.object(torch.Tensor, "float", torch.Tensor.double):
                return self.model(*inputs)
        with torch.autocast(self.device.type, self.dtype, enabled=self.dtype is not None):
            return self.run(*inputs)

    def step(self, batch, mark=lambda: None):
        log_probs = self.log_probs(batch).float()
        nll = -log_probs.gather(2, batch["S"][:, :, None])[:, :, 0]
        loss = (nll * batch["mask"]).sum() / batch["mask"].sum()
        return clipped_step(loss, self.model, self.optimizer, mark)


def disagreement(path, program, settings, device):
    """Largest difference of log-probabilities in float64, of residues that are there."""
    settings = settings.having(dropout=0.0)
    batch = to_device(program.data(settings).check_batch(), device)
    batch = {key: x.double() if x.is_floating_point() else x for key, x in batch.items()}
    ours = program.trainer(program, settings, device).model.double()
    peer = Peer(path, program, settings, device, None, checkpointed=False)
    peer.model.double()
    torch.set_default_dtype(torch.float64)
    length = batch["S"].shape[1]
    noise = torch.empty_like(batch["mask"]).scatter_(  # which argsort turns into our decoding order
        1, batch["decoding_order"], torch.arange(1.0, length + 1, device=device).expand_as(batch["S"]).to(
            batch["mask"]))
    noise = torch.where(batch["mask"] > 0, noise, noise * 1e4)  # padding last, as in our order
    mine = ours(**batch)["log_probs"]
    difference = (mine - peer.log_probs(batch, noise)) * batch["mask"][:, :, None]
    torch.set_default_dtype(torch.float32)
    return difference.abs().max().item()


def peers(path, *given):
    """{name: what makes a contender} of the authors' code, if a path names it."""
    make = partial(Peer, path, *given)
    return {} if path is None else {
        "authors, eager": make, "authors, eager, no checkpoints": partial(make, checkpointed=False),
        "authors, compiled, no checkpoints": partial(make, checkpointed=False, compiled=True)}


def run(argv=None):
    parser = parser_of(__file__, __doc__, required=True, steps=20, only="contenders")
    parser.add_argument("--peer", help="the authors' training/model_utils.py (default: ours alone)")
    for name, value in SIZES.items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=whole_number(), default=value,
                            help="(default: %(default)s)")
    parser.add_argument("--precisions", nargs="+", choices=PRECISIONS, default=PRECISIONS,
                        help="(default: both)")
    parser.add_argument("--device", default="auto", help="(default: %(default)s)")
    a = parser.parse_args(argv)
    program = load_program(ROOT / "companions" / "protein_mpnn.py")
    device, sizes = choose_device(a.device), {name: getattr(a, name) for name in SIZES}
    settings = program.settings(**sizes)
    process_settings(settings, device)
    small = settings.having(batch_size=2, seq_len=96)
    different = disagreement(a.peer, program, small, device) if a.peer else None
    failures = compare_numerics(program, small.having(dropout=0.0), device)[1]
    print(f"Against the authors' code in float64: {different if a.peer else 'no --peer'}; "
          f"3x rule: {failures or 'kept'}")
    batch, tables = program.data(settings).batch(0), {}
    for name in a.precisions:
        amp = None if name == "float32" else torch.bfloat16
        now = settings if amp is None else settings.having(use_amp=True, amp_dtype="bfloat16")
        made = ours(program, now, device, OURS) | peers(a.peer, program, now, device, amp)
        tables[name] = contest(made, a.only, batch, device, a.steps)
        print(contest_table(name, tables[name]), flush=True)
        write_result(a.out / "mpnn.json", device, **sizes, log_probs_difference=different, tables=tables)
    broken = [name for rows in tables.values() for name in failed(rows, "ours")]
    return int(not (different or 0) <= TOLERANCE or bool(failures or broken))


if __name__ == "__main__":
    sys.exit(exit_code(run, None, "compare_mpnn.py"))
