#!/usr/bin/env python3
r"""companions/tiny_llama.py against transformers' LLaMA and Liger's kernels: one training step, in one run.

    pip install transformers liger-kernel       # the peers; without them ours alone is measured
    python benchmarks/compare_llama.py --out OUT
    python benchmarks/compare_llama.py --out OUT --hidden-size 1024 --num-layers 12 --batch-size 16 \
        --seq-len 512

The same weights, batch and sizes for all, in bfloat16. Before anything is timed, losses and all gradients are
compared in float32 (transformers' norms and rotary angles are float32 in any case). Steps (forward, loss,
backward, clipping, fused AdamW) alternate. Peers run with SDPA under autocast, compiled, and with Liger's
rotary, RMSNorm and SwiGLU. Memory is what each needs beside the others: weights, optimizer, libraries'
workspaces. Writes OUT/llama.json. Exit code 1 if numbers disagree.
"""
import contextlib
import sys
from functools import partial
from importlib.util import find_spec
from unittest import mock

from script import ROOT, begin, parser_of, write_result

begin(__name__, "torch")

import torch
import torch.nn.functional as F

from evoformer_kernels.limits import HAS_TRITON
from fusion_lab.measuring.bench import clipped_step, contest, contest_table, failed, ours
from fusion_lab.training.errors import exit_code
from fusion_lab.training.feeding import to_device
from fusion_lab.training.flags import whole_number
from fusion_lab.training.machine import choose_device, process_settings
from fusion_lab.training.program import load_program

TOLERANCE = 1e-4  # of the loss, and of gradients relative to their largest element, in float32
GRAPH = ("enable_torch_compile", "enable_cuda_graphs")
OURS = {  # name: switches beside the defaults
    "ours, baseline": None,
    "ours, fused": (),
    "ours, compiled, graph": GRAPH,
    "ours, compiled, graph, Triton kernels": (*GRAPH, "enable_pointwise_kernel", "enable_triton_adamw"),
    "ours, ultra-fused blocks, graph": ("enable_cuda_graphs", "enable_ultra_block")}
SIZES = dict(batch_size=8, seq_len=256, hidden_size=512, num_layers=8, num_heads=8, num_kv_heads=4,
             vocab_size=256)


class Peer:
    """transformers' LlamaForCausalLM with a step like Trainer's."""

    def __init__(self, program, settings, device, amp, compiled=False, liger=False):
        from transformers import LlamaConfig, LlamaForCausalLM
        from transformers.models.llama import modeling_llama
        c = settings.model
        config = LlamaConfig(
            vocab_size=c.vocab_size, hidden_size=c.hidden_size, intermediate_size=c.intermediate_size,
            num_hidden_layers=c.num_layers, num_attention_heads=c.num_heads,
            num_key_value_heads=c.num_kv_heads, max_position_embeddings=c.seq_len, use_cache=False,
            rms_norm_eps=c.rms_norm_eps, rope_theta=c.rope_theta,
            tie_word_embeddings=c.tie_word_embeddings, attn_implementation="sdpa")
        self.device, self.amp, self.patches = device, amp, {}
        with contextlib.ExitStack() as stack:
            if liger:
                from liger_kernel.transformers import LigerRMSNorm, LigerSwiGLUMLP, liger_rotary_pos_emb
                for name, kernel in (("LlamaRMSNorm", LigerRMSNorm), ("LlamaMLP", LigerSwiGLUMLP)):
                    stack.enter_context(mock.patch.object(modeling_llama, name, kernel))
                self.patches = dict(target=modeling_llama, apply_rotary_pos_emb=liger_rotary_pos_emb)
            self.model = LlamaForCausalLM(config).to(device)
        weights = program.trainer(program, settings, device).model.state_dict()
        self.model.load_state_dict(weights, strict=not c.tie_word_embeddings)
        self.run = torch.compile(self.model) if compiled else self.model
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=settings.training.learning_rate,
                                           fused=True)

    def loss(self, batch):
        patched = mock.patch.multiple(**self.patches) if self.patches else contextlib.nullcontext()
        with patched, torch.autocast(self.device.type, self.amp, enabled=self.amp is not None):
            logits = self.run(input_ids=batch["ids"]).logits
            return F.cross_entropy(logits.float().flatten(0, 1), batch["targets"].flatten())

    def step(self, batch, mark=lambda: None):
        return clipped_step(self.loss(batch), self.model, self.optimizer, mark)


def disagreement(program, settings, device):
    """(of losses, of gradients relative to their largest element): the largest, in float32."""
    batch = to_device(program.data(settings).check_batch(), device)
    trainer, peer = program.trainer(program, settings, device), Peer(program, settings, device, None)
    mine, theirs = trainer.forward(batch)["loss"], peer.loss(batch)
    mine.backward()
    theirs.backward()
    expected = {name: p.grad for name, p in peer.model.named_parameters()}
    found = {name: p.grad for name, p in trainer.model.named_parameters()}
    for module, prefix in ((m, f"{n}.") for n, m in trainer.model.named_modules() if hasattr(m, "PACKINGS")):
        module.split_packed(found, prefix)
    assert expected.keys() == found.keys()
    worst = torch.stack([(found[name] - g).abs().max() / g.abs().max() for name, g in expected.items()])
    return (mine - theirs).abs().item(), worst.max().item()  # torch's max keeps NaN


def peers(program, settings, device, amp):
    """{name: what makes a contender} of those that are installed."""
    if not find_spec("transformers"):
        return {}
    make = partial(Peer, program, settings, device, amp)
    found = {"transformers, SDPA": make, "transformers, compiled": partial(make, compiled=True)}
    if find_spec("liger_kernel") and HAS_TRITON and device.type == "cuda":
        liger = partial(make, liger=True)
        found |= {"Liger": liger, "Liger, compiled": partial(liger, compiled=True)}
    return found


def run(argv=None):
    parser = parser_of(__file__, __doc__, required=True, steps=20, only="contenders")
    for name, value in SIZES.items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=whole_number(), default=value,
                            help="(default: %(default)s)")
    parser.add_argument("--device", default="auto", help="(default: %(default)s)")
    a = parser.parse_args(argv)
    program, device = load_program(ROOT / "companions" / "tiny_llama.py"), choose_device(a.device)
    sizes = {name: getattr(a, name) for name in SIZES} | dict(intermediate_size=4 * a.hidden_size)
    settings = program.settings(**sizes)
    process_settings(settings, device)
    small = settings.having(batch_size=2, seq_len=min(a.seq_len, 64), num_layers=2)
    different = disagreement(program, small, device) if find_spec("transformers") else None
    print(f"Against transformers in float32, loss and gradients: {different or 'not installed'}")
    now, amp = settings.having(use_amp=True, amp_dtype="bfloat16"), torch.bfloat16
    made = ours(program, now, device, OURS) | peers(program, now, device, amp)
    rows = contest(made, a.only, program.data(settings).batch(0), device, a.steps)
    print(contest_table("bfloat16", rows))
    write_result(a.out / "llama.json", device, **sizes, rows=rows, disagreement=different)
    return int(not all(error <= TOLERANCE for error in different or ()) or bool(failed(rows, "ours")))


if __name__ == "__main__":
    sys.exit(exit_code(run, None, "compare_llama.py"))
