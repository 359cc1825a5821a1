#!/usr/bin/env python3
"""TinyLlama V2: LLaMA in one file, with its kernel fusions as switches.

    python companions/tiny_llama.py                     # learns bytes of Python
    python companions/tiny_llama.py --compare-fusion    # what a switch buys
    python companions/tiny_llama.py --compare-ultra     # one kernel a block (ultra_block.py)

This companion runs the lab on the model that most people know. Its matrix products are large, so packing them
gains more than in the Evoformer, and saving kernel launches gains less. LLaMA (Touvron et al. 2023) is as in
transformers, under its parameter names: RMSNorm before each layer, rotary positions, grouped-query attention,
SwiGLU. It learns the standard library of the Python that runs it (text.py). Read FusedTransformerBlock first,
then its four parts above.

Letters in shape comments: B samples, S bytes, c channels, H heads, G of them for keys and values, D = c / H.
"""
import sys
from dataclasses import dataclass
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parent.parent))
from fusion_lab.training import errors

errors.begin(__name__)

from companions.kernels import ULTRA_WIDTHS
from evoformer_kernels.limits import HAS_TRITON, runs
from fusion_lab.training import flags
from fusion_lab.training.options import Checked, Switches, TrainingConfig, option
from fusion_lab.training.program import Cost, Model, Program


@dataclass(frozen=True)
class LlamaConfig(Checked):
    """Sizes of the model and of its input."""
    hidden_size: int = option(512, "channels c", low=2)
    intermediate_size: int = option(2048, "channels within SwiGLU", low=1)
    num_layers: int = option(8, "blocks", low=1)
    num_heads: int = option(8, "heads; must divide --hidden-size into even widths", low=1)
    num_kv_heads: int = option(4, "heads of keys and values; must divide --num-heads", low=1)
    seq_len: int = option(256, "bytes S of a sample", low=2, resized=True)
    vocab_size: int = option(256, "tokens that the head knows; text needs 256, more of them cost", low=1)
    tie_word_embeddings: bool = option(False, "the head's weight is the embedding's")
    rope_theta: float = option(1e4, "base of the rotary angles", low=1.0)
    rms_norm_eps: float = option(1e-6, "RMSNorm's epsilon", low=0.0)

    def __post_init__(self):
        super().__post_init__()
        if self.hidden_size % (2 * self.num_heads):
            self.refuse("num_heads", f"must divide hidden_size = {self.hidden_size} into even widths")
        if self.num_heads % self.num_kv_heads:
            self.refuse("num_kv_heads", f"must divide num_heads = {self.num_heads}")


@dataclass(frozen=True)
class LlamaTraining(TrainingConfig):
    """Text to learn, and a mode of its own."""
    data: str = option(None, "file or directory of text; default: this Python's standard library", type=str,
                       metavar="PATH")
    compare_ultra: bool = option(
        False, "one kernel a block, beside CUDA graphs and torch.compile, four shapes",
        takes=("hidden_size", "intermediate_size", "num_layers", "num_heads", "num_kv_heads", "seed",
               "device", "profile_dir", "json"))


@dataclass(frozen=True)
class LlamaSwitches(Switches):
    """Which operations run fused."""
    enable_qkv_fusion: bool = option(True, "Q, K and V in one GEMM", preset=True, title="QKV Fusion")
    enable_flash_attention: bool = option(True, "fused attention, without copies of K and V", preset=True,
                                         title="Flash Attention")
    enable_swiglu_fusion: bool = option(True, "gate and up of SwiGLU in one GEMM", preset=True,
                                        title="SwiGLU Fusion")
    enable_norm_fusion: bool = option(True, "RMSNorm in one operation", preset=True, title="Norm Fusion")
    enable_activation_checkpointing: bool = option(
        False, "keep only the inputs of every block, recompute the rest in backward", recomputes=True)
    enable_pointwise_kernel: bool = option(False, "SwiGLU and rotary positions in Triton", ultra=True)
    enable_ultra_block: bool = option(False, "one persistent Triton kernel a block; backward recomputes")

    def idle(self, settings, on_gpu):
        found, width = super().idle(settings, on_gpu), settings.model.hidden_size // settings.model.num_heads
        kernels_run = on_gpu and HAS_TRITON and settings.training.use_amp
        if self.enable_pointwise_kernel and not (
                kernels_run and (self.enable_qkv_fusion or self.enable_swiglu_fusion)):
            found["enable_pointwise_kernel"] = (
                "the pointwise kernel needs a GPU, Triton, --use-amp and packed projections "
                "(--enable-qkv-fusion, --enable-swiglu-fusion)")
        if self.enable_ultra_block and not kernels_run:
            found["enable_ultra_block"] = "the ultra-fused block needs a GPU, Triton and --use-amp"
        elif self.enable_ultra_block and width not in ULTRA_WIDTHS:
            found["enable_ultra_block"] = (
                f"ultra-fused blocks are for heads of {', '.join(map(str, ULTRA_WIDTHS))} channels")
        return found


WITHOUT_TORCH = dict(
    file=__file__, about=__doc__, suffix="tiny_llama_v2", version="tiny_llama_v2", model_config=LlamaConfig,
    training_config=LlamaTraining, fusion_config=LlamaSwitches, axes=dict(batch_size="B", seq_len="S"),
    demo=dict(hidden_size=128, intermediate_size=512, num_layers=4, num_heads=4, num_kv_heads=2, seq_len=128,
              batch_size=16, learning_rate=2e-3, num_steps=500, log_every=50, eval_every=250))

flags.judge(__name__, **WITHOUT_TORCH)  # before torch is imported, which takes seconds

import torch
import torch.nn as nn
import torch.nn.functional as F

from companions import text, ultra_block
from evoformer_kernels.precision import at_least_float32
from fusion_lab.training.words import counted
from tiny_openfold.layers.attention_choice import causal_kernel
from tiny_openfold.layers.custom_gradients import recomputed
from tiny_openfold.layers.packing import PackedProjections
from tiny_openfold_v2 import Trainer, main

if HAS_TRITON:
    from companions.kernels import gated_rotary
    from evoformer_kernels.swiglu import swiglu

# --- The block and its four parts, fused and plain side by side -----------------------------------------


class RMSNorm(nn.Module):
    def __init__(self, config, fusion):
        super().__init__()
        self.fused, self.eps = fusion.enable_norm_fusion, config.rms_norm_eps
        self.weight = nn.Parameter(torch.ones(config.hidden_size))

    def forward(self, x):
        if self.fused:
            return F.rms_norm(x, x.shape[-1:], self.weight, self.eps)
        wide = x.to(at_least_float32(x.dtype))
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
        return self.weight * wide.to(x.dtype)


def rotary(length, width, theta):
    """cos and sin of the angles of positions and pairs of channels, (2, S, D / 2) in float64."""
    rates = theta ** -(torch.arange(0, width, 2, dtype=torch.float64) / width)
    angles = torch.arange(length, dtype=torch.float64)[:, None] * rates
    return torch.stack([angles.cos(), angles.sin()])


def rotate(x, angles):
    """x (B, H, S, D) turned by its position; channel i is a pair with channel i + D / 2."""
    (cos, sin), (first, second) = angles.to(x.dtype), x.chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


class FusedQKVAttention(PackedProjections):
    PACKINGS = dict(qkv_proj=("q_proj", "k_proj", "v_proj"))

    def __init__(self, config, fusion):
        super().__init__()
        self.fusion, self.width = fusion, config.hidden_size // config.num_heads
        self.heads = H, G = config.num_heads, config.num_kv_heads
        layers = {name: nn.Linear(config.hidden_size, count * self.width, bias=False)
                  for name, count in dict(q_proj=H, k_proj=G, v_proj=G).items()}
        self.add_projections(layers, ["qkv_proj"] if fusion.enable_qkv_fusion else [])
        self.o_proj = nn.Linear(config.hidden_size, config.hidden_size, bias=False)

    def forward(self, x, angles):
        """x (B, S, c)"""
        if self.fusion.enable_pointwise_kernel and self.packings and runs(x):
            q, k, v = gated_rotary.rotary(self.qkv_proj(x), angles, *self.heads)
        else:
            q, k, v = (p.unflatten(-1, (-1, self.width)).transpose(1, 2) for p in self.project(x))
            q, k = rotate(q, angles), rotate(k, angles)  # (B, H, S, D), (B, G, S, D)
        if self.fusion.enable_flash_attention:
            out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        else:
            k, v = (p.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for p in (k, v))  # (B, H, S, D)
            later = torch.ones(q.shape[2], q.shape[2], dtype=torch.bool, device=x.device).triu(1)
            scores = (q @ k.transpose(-1, -2) * self.width ** -0.5).masked_fill(later, float("-inf"))
            out = scores.softmax(-1, dtype=at_least_float32(scores.dtype)).to(v.dtype) @ v
        return self.o_proj(out.transpose(1, 2).flatten(2))


class FusedSwiGLU(PackedProjections):
    SIDES = ("gate_proj", "up_proj")
    PACKINGS = dict(gate_up_proj=SIDES)

    def __init__(self, config, fusion):
        super().__init__()
        self.fusion, c, wide = fusion, config.hidden_size, config.intermediate_size
        layers = {name: nn.Linear(c, wide, bias=False) for name in self.SIDES}
        self.add_projections(layers, ["gate_up_proj"] if fusion.enable_swiglu_fusion else [])
        self.down_proj = nn.Linear(wide, c, bias=False)

    def forward(self, x):
        if self.fusion.enable_pointwise_kernel and self.packings and runs(x):
            return self.down_proj(swiglu(self.gate_up_proj(x)))
        gate, up = self.project(x)
        return self.down_proj(F.silu(gate) * up)


class FusedTransformerBlock(nn.Module):
    def __init__(self, config, fusion):
        super().__init__()
        self.self_attn = FusedQKVAttention(config, fusion)
        self.mlp = FusedSwiGLU(config, fusion)
        self.input_layernorm = RMSNorm(config, fusion)
        self.post_attention_layernorm = RMSNorm(config, fusion)

    def forward(self, x, angles):
        if self.ultra and runs(x):
            return ultra_block.run(self, x, angles)
        return self.plain(x, angles)

    def plain(self, x, angles):
        x = x + self.self_attn(self.input_layernorm(x), angles)
        return x + self.mlp(self.post_attention_layernorm(x))


# --- The model ------------------------------------------------------------------------------------------


class Head(nn.Module):
    """Logits of the next byte, or with targets the mean cross-entropy. Tied, it has no weight of its own."""

    def __init__(self, config):
        super().__init__()
        if not config.tie_word_embeddings:
            self.weight = nn.Parameter(torch.empty(config.vocab_size, config.hidden_size))

    def forward(self, x, weight, targets=None):
        logits = F.linear(x, weight)
        if targets is None:
            return logits
        logits = logits.flatten(0, 1)
        return F.cross_entropy(logits.to(at_least_float32(logits.dtype)), targets.flatten())


class Stack(nn.Module):
    """Embedding, blocks and last norm."""

    def __init__(self, config, fusion):
        super().__init__()
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(FusedTransformerBlock(config, fusion) for _ in range(config.num_layers))
        self.norm = RMSNorm(config, fusion)


class TinyLlama(nn.Module, Model):
    """Public parameter names are those of transformers' LlamaForCausalLM."""
    SUBLAYERS = ("input_layernorm", "self_attn", "post_attention_layernorm", "mlp", "norm", "lm_head")

    def __init__(self, config, fusion):
        super().__init__()
        self.config, self.fusion = config, fusion
        self.model, self.lm_head = Stack(config, fusion), Head(config)
        self.initialise()
        angles = rotary(config.seq_len, config.hidden_size // config.num_heads, config.rope_theta)
        self.register_buffer("angles", angles, persistent=False)  # float64: forward rounds them
        self.enable_ultra_mode(fusion.enable_ultra_block)
        if fusion.enable_torch_compile:  # all blocks run the same code, so only the first one compiles
            for module in (*(() if fusion.enable_ultra_block else self.model.layers), self.lm_head):
                module.compile(fullgraph=True, dynamic=False, mode=fusion.compile_mode)

    def initialise(self):
        """Outputs as large as inputs, so that a few hundred steps suffice, where LLaMA's 0.02 is made for
        thousands of channels; the residual's parts add up to one. By projection, packed or not."""
        parts = (2 * self.config.num_layers) ** -0.5
        for module in self.modules():
            if isinstance(module, nn.Embedding):  # a tied one is the head too, which wants small weights
                std = module.embedding_dim ** -0.5 if self.config.tie_word_embeddings else 1.0
                nn.init.normal_(module.weight, std=std)
            elif hasattr(module, "weight") and module.weight.dim() > 1:
                nn.init.normal_(module.weight, std=module.weight.shape[1] ** -0.5)
        with torch.no_grad():
            for block in self.model.layers:
                block.self_attn.o_proj.weight.mul_(parts)
                block.mlp.down_proj.weight.mul_(parts)

    def enable_ultra_mode(self, enabled=True):
        """Blocks as one kernel each, or not, from now on."""
        for block in self.model.layers:
            ultra_block.prepare(block, self.angles, enabled)

    def forward(self, ids, targets=None):
        """ids (B, S), targets (B, S) the bytes that follow, -100 where nothing is asked. Returns a dict:
        hidden (B, S, c) and, with targets, loss, else logits (B, S, vocabulary)."""
        x = self.model.embed_tokens(ids)
        angles = self.angles[:, :ids.shape[1]].to(at_least_float32(x.dtype))  # rounded once for all blocks
        for block in self.model.layers:
            x = recomputed(self.fusion.enable_activation_checkpointing, block, x, angles)
        x = self.model.norm(x)
        weight = self.model.embed_tokens.weight if self.config.tie_word_embeddings else self.lm_head.weight
        result = self.lm_head(x, weight, targets)
        return dict(hidden=x, **{"logits" if targets is None else "loss": result})

    def sublayers(self):
        if self.fusion.enable_torch_compile:
            return []
        return [*((name, getattr(block, name)) for block in self.model.layers for name in self.SUBLAYERS[:4]),
                ("norm", self.model.norm), ("lm_head", self.lm_head)]

    @staticmethod
    def least_bytes(settings):
        """Weights with their gradients, and what every block keeps: its input, Q, K, V and their output, and
        both halves of SwiGLU; but where blocks are recomputed only inputs, and one block."""
        c, fusion = settings.model, settings.fusion
        positions = settings.training.batch_size * c.seq_len * (2 if settings.training.use_amp else 4)
        qkv = c.hidden_size * (c.num_heads + 2 * c.num_kv_heads) // c.num_heads
        kept = positions * (2 * c.hidden_size + qkv + 2 * c.intermediate_size)
        weights = c.hidden_size * (c.hidden_size + qkv + 3 * c.intermediate_size) * c.num_layers
        lean = fusion.enable_activation_checkpointing or fusion.enable_ultra_block
        inputs = positions * c.hidden_size * (c.num_layers - 1)
        return 8 * weights + (kept + inputs if lean else c.num_layers * kept)

    def costs(self, training):
        """Of one ideal kernel for each of: a norm; Q, K, V; attention; its output; SwiGLU and the head, which
        keep what is wide on the chip and compute it again in backward."""
        c, block, element = self.config, self.model.layers[0], 2 if training.use_amp else 4
        x = training.batch_size * c.seq_len * c.hidden_size * element  # one pass over (B, S, c)
        qkv = x * (c.num_heads + 2 * c.num_kv_heads) // c.num_heads
        norm = Cost.of(block.input_layernorm, 2 * x, 3 * x, element)
        of_a_block = dict(input_layernorm=norm, post_attention_layernorm=norm,
                          self_attn=Cost.of(block.self_attn, 4 * x + 2 * qkv, 7 * x + 3 * qkv, element),
                          mlp=Cost.of(block.mlp, 2 * x, 3 * x, element))
        head = self.model.embed_tokens if c.tie_word_embeddings else self.lm_head
        return {**{name: cost.times(c.num_layers) for name, cost in of_a_block.items()},
                "norm": norm, "lm_head": Cost.of(head, x, 2 * x, element)}

    def in_words(self, dtype):
        c, weight = self.config, self.model.embed_tokens.weight
        kernel = causal_kernel((c.num_heads, c.num_kv_heads, c.num_kv_heads), c.seq_len,
                               c.hidden_size // c.num_heads, weight.device, dtype or weight.dtype)
        return dict(sizes=f"{counted(c.num_layers, 'block')}, c {c.hidden_size}, heads {c.num_heads} and "
                    f"{c.num_kv_heads}", remarks=dict(enable_flash_attention=kernel))


PROGRAM = Program(**WITHOUT_TORCH, model=TinyLlama, data=text.Bytes, trainer=Trainer,
                  modes={"--compare-ultra": ultra_block.compare_ultra})

if __name__ == "__main__":
    sys.exit(main(program=PROGRAM))
