#!/usr/bin/env python3
r"""companions/tiny_llama.py against transformers' LLaMA and Liger's kernels: one training step, in one run.

    pip install transformers liger-kernel       # the peers; without them ours alone is measured
    python benchmarks/compare_llama.py --out OUT
    python benchmarks/compare_llama.py --out OUT --hidden-size 1024 --num-layers 12 --batch-size 16 \
        --seq-len 512

The same weights, batch and sizes for all; losses and all gradients must agree in float32 before anything is
timed (transformers' norms and rotary angles are float32 in any case). Steps (forward, loss, backward,
clipping, fused AdamW) alternate. Peers run with SDPA under autocast, compiled, and with Liger's rotary,
RMSNorm and SwiGLU; and once more with bfloat16 weights without float32 masters, which is faster and less
exact. Memory is what each needs beside the others: weights, optimizer, libraries' workspaces. Writes
OUT/llama.json, with the names of the kernels that ran. Exit code 1 if numbers disagree.
"""
import contextlib
import importlib.util
import pathlib
import re
import sys
from collections import Counter
from dataclasses import replace
from functools import partial
from unittest import mock

ROOT = pathlib.Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
from fusion_lab.training import interrupts

interrupts.quiet(__name__)

import torch
import torch.nn.functional as F

from fusion_lab.kernels.limits import HAS_TRITON
from fusion_lab.measuring.contest import Contender, cells, named, race
from fusion_lab.measuring.counters import gpu_kernels
from fusion_lab.measuring.tables import aligned
from fusion_lab.training.feeding import to_device
from fusion_lab.training.files import exit_code, write_json
from fusion_lab.training.flags import Parser, regular_expression, whole_number
from fusion_lab.training.machine import choose_device, process_settings, system_info
from fusion_lab.training.program import load_program

TOLERANCE = 1e-4  # of the loss, and of gradients relative to their largest element, in float32
OURS = {  # name: switches beside the defaults
    "ours, baseline": None,
    "ours, fused": {},
    "ours, compiled": dict(enable_torch_compile=True),
    "ours, compiled, graph": dict(enable_torch_compile=True, enable_cuda_graphs=True),
    "ours, compiled, graph, Triton kernels": dict(enable_torch_compile=True, enable_cuda_graphs=True,
                                                  enable_pointwise_kernel=True, enable_triton_adamw=True),
    "ours, compiled, graph, loss fusion": dict(enable_torch_compile=True, enable_cuda_graphs=True,
                                               enable_loss_fusion=True),
    "ours, ultra-fused blocks, graph": dict(enable_cuda_graphs=True, enable_ultra_block=True)}
LOW = "bf16 weights"  # no float32 masters: small updates are lost
GOAL = 0.8  # of the best peer's time, and no more memory


def installed(name):
    return importlib.util.find_spec(name) is not None


class Peer:
    """transformers' LlamaForCausalLM with a step like Trainer's."""

    def __init__(self, program, settings, device, amp, compiled=False, liger=False, low=False):
        from transformers import LlamaConfig, LlamaForCausalLM
        from transformers.models.llama import modeling_llama
        c = settings.model
        config = LlamaConfig(
            vocab_size=c.vocab_size, hidden_size=c.hidden_size, intermediate_size=c.intermediate_size,
            num_hidden_layers=c.num_layers, num_attention_heads=c.num_heads,
            num_key_value_heads=c.num_kv_heads, max_position_embeddings=c.seq_len, use_cache=False,
            rms_norm_eps=c.rms_norm_eps, rope_theta=c.rope_theta,
            tie_word_embeddings=c.tie_word_embeddings, attn_implementation="sdpa")
        self.device, self.amp, self.patches = device, None if low else amp, {}
        with contextlib.ExitStack() as stack:
            if liger:
                from liger_kernel.transformers import LigerRMSNorm, LigerSwiGLUMLP, liger_rotary_pos_emb
                for name, kernel in (("LlamaRMSNorm", LigerRMSNorm), ("LlamaMLP", LigerSwiGLUMLP)):
                    stack.enter_context(mock.patch.object(modeling_llama, name, kernel))
                self.patches = dict(target=modeling_llama, apply_rotary_pos_emb=liger_rotary_pos_emb)
            self.model = LlamaForCausalLM(config).to(device)
        weights = program.trainer(program, settings, device).model.state_dict()
        self.model.load_state_dict(weights, strict=not c.tie_word_embeddings)
        if low:
            self.model.to(amp)
        self.run = torch.compile(self.model) if compiled else self.model
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=settings.training.learning_rate,
                                           fused=True)

    def loss(self, batch):
        patched = mock.patch.multiple(**self.patches) if self.patches else contextlib.nullcontext()
        with patched, torch.autocast(self.device.type, self.amp, enabled=self.amp is not None):
            logits = self.run(input_ids=batch["ids"]).logits
            return F.cross_entropy(logits.float().flatten(0, 1), batch["targets"].flatten())

    def step(self, batch):
        loss = self.loss(batch)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return loss.detach()


def disagreement(program, settings, device):
    """(of losses, of gradients relative to their largest element): the largest, in float32."""
    batch = program.check_batch(settings, device)
    trainer, peer = program.trainer(program, settings, device), Peer(program, settings, device, None)
    mine, theirs = trainer.forward(batch)["loss"], peer.loss(batch)
    mine.backward()
    theirs.backward()
    expected = {name: p.grad for name, p in peer.model.named_parameters()}
    found = {name: p.grad for name, p in trainer.model.named_parameters()}
    for module, prefix in ((m, f"{n}.") for n, m in trainer.model.named_modules() if hasattr(m, "PACKINGS")):
        module.split_packed(found, prefix)
    assert expected.keys() == found.keys()
    return (mine - theirs).abs().item(), max(
        ((found[name] - g).abs().max() / g.abs().max()).item() for name, g in expected.items())


def contenders(program, settings, device, amp):
    """{name: a function that makes what has step()}"""
    found = {}
    for name, switches in OURS.items():
        kind = program.fusion_config
        fusion = kind.preset(False) if switches is None else replace(
            kind(), **switches, enable_master_weights=amp is not None)
        chosen = replace(settings, fusion=fusion)
        if not chosen.idle(device.type == "cuda"):
            found[name] = partial(program.trainer, program, chosen, device)
    if installed("transformers"):
        make = partial(Peer, program, settings, device, amp)
        found |= {"transformers, SDPA": make, "transformers, compiled": partial(make, compiled=True)}
        if amp is not None:
            found[f"transformers, compiled, {LOW}"] = partial(make, compiled=True, low=True)
        if installed("liger_kernel") and HAS_TRITON and device.type == "cuda":
            found["Liger"] = partial(make, liger=True)
            found["Liger, compiled"] = partial(make, liger=True, compiled=True)
    return found


def measure(made, batch, device, steps):
    """Rows of contenders that could run; the others' say why not."""
    entered, rows, batch = [], [], to_device(batch, device)
    for name, make in made.items():
        try:
            one = Contender(name, make, batch, device)
            kernels = gpu_kernels(lambda one=one: one.step(batch)) if device.type == "cuda" else []
        except Exception as error:  # peers fail in their own ways, and the rest is still wanted
            first = str(error).strip().partition("\n")[0]
            rows.append(dict(name=name, reason=f"{type(error).__name__}: {first[:150]}"))
            continue
        one.row["kernels"] = dict(Counter(kernels).most_common())
        entered.append(one)
        rows.append(one.row)
    race(entered, batch, steps)
    return rows


def verdict(rows):
    """Ours, the fastest, beside the fastest peer with float32 weights, and beside bfloat16 ones."""
    timed = [row for row in rows if "median" in row]
    ours = [row for row in timed if row["name"].startswith("ours")]
    low = [row for row in timed if row["name"].endswith(LOW)]
    peers = [row for row in timed if row not in ours + low]
    if not (ours and peers):
        return "no peer was measured" if ours else "none of ours was measured"
    mine, theirs = (min(found, key=lambda row: row["median"]) for found in (ours, peers))
    share, memory = beside(mine, theirs)
    said = f"{mine['name']} takes {in_words(share, memory)} {theirs['name']}"
    if memory is not None:
        reached = share <= GOAL and memory <= 1
        said += f": the goal ({GOAL}, no more memory) is {'reached' if reached else 'missed'}"
    for row in low:
        said += f"; {in_words(*beside(mine, row))} {row['name']}, which is less exact"
    return said


def beside(mine, theirs):
    """(share of the time, of the memory or None)"""
    known = mine["peak_mb"] is not None
    return mine["median"] / theirs["median"], mine["peak_mb"] / theirs["peak_mb"] if known else None


def in_words(share, memory):
    return f"{share:.2f} times the time" + (f" and {memory:.2f} times the memory" if memory else "") + " of"


def lines_of(name, rows):
    lines = [[name, "step ms (p20, p80)", "peak MB", "kernels", "attention"]]
    for r in rows:
        if "reason" in r:
            lines.append([r["name"], r["reason"]])
            continue
        attention = next((k for k in r["kernels"] if re.search("flash|attn|fmha", k.lower())), "")
        lines.append([r["name"], *cells(r), str(sum(r["kernels"].values()) or ""), attention[:40]])
    return lines


def run(argv=None):
    parser = Parser(prog="compare_llama.py", description=__doc__)
    parser.add_argument("--out", required=True)
    sizes = dict(batch_size=8, seq_len=256, hidden_size=512, num_layers=8, num_heads=8, num_kv_heads=4,
                 intermediate_size=None, vocab_size=256)
    for name, value in sizes.items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=whole_number(), default=value)
    parser.add_argument("--steps", type=whole_number(), default=20)
    parser.add_argument("--data", help="text (default: the standard library)")
    parser.add_argument("--precisions", nargs="+", choices=("float32", "bfloat16"), default=["bfloat16"])
    parser.add_argument("--only", type=regular_expression, default="", help="contenders (default: all)")
    parser.add_argument("--device", default="auto")
    a = parser.parse_args(argv)
    a.intermediate_size = a.intermediate_size or 4 * a.hidden_size
    program, device = load_program(ROOT / "companions" / "tiny_llama.py"), choose_device(a.device)
    settings = program.settings(**{name: getattr(a, name) for name in sizes}, data=a.data)
    process_settings(settings, device)
    small = settings.having(batch_size=2, seq_len=min(a.seq_len, 64), num_layers=2)
    result = dict(mode="compare_llama", **{name: getattr(a, name) for name in sizes}, tables={},
                  system_info=system_info(device), disagreement=None)
    if installed("transformers"):
        result["disagreement"] = disagreement(program, small, device)
    print(f"Against transformers in float32, loss and gradients: {result['disagreement'] or 'not installed'}")
    wrong = max(result["disagreement"] or [0.0]) > TOLERANCE
    batch = program.open_source(settings).batch(0)
    for name in a.precisions:
        amp = None if name == "float32" else torch.bfloat16
        now = settings if amp is None else settings.having(use_amp=True, amp_dtype="bfloat16")
        made = named(contenders(program, now, device, amp), a.only)
        rows = measure(made, batch, device, a.steps)
        result["tables"][name] = dict(rows=rows, verdict=verdict(rows))
        print("\n".join([*aligned(lines_of(name, rows)), verdict(rows)]), flush=True)
        pathlib.Path(a.out).mkdir(parents=True, exist_ok=True)
        write_json(pathlib.Path(a.out) / "llama.json", result)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(exit_code(run, None, "compare_llama.py"))
