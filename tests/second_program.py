#!/usr/bin/env python3
"""A second program for the lab: a residual MLP that learns a fixed map, with two switches of its own."""
import sys
from dataclasses import dataclass
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parent.parent))
from fusion_lab.training import flags
from fusion_lab.training.options import Checked, Switches, TrainingConfig, option
from fusion_lab.training.program import Data, Model, Program


@dataclass(frozen=True)
class MlpConfig(Checked):
    """Sizes of the perceptron."""
    width: int = option(32, "channels", low=1)
    depth: int = option(2, "layers", low=1)


@dataclass(frozen=True)
class MlpSwitches(Switches):
    """Which of its operations run fused."""
    enable_fused_relu: bool = option(True, "bias and ReLU within their GEMM", preset=True, title="Fused ReLU")
    enable_fused_residual: bool = option(False, "the residual in the epilogue of its GEMM", preset=True)


WITHOUT_TORCH = dict(file=__file__, about=__doc__, suffix="mlp", version="mlp", model_config=MlpConfig,
             training_config=TrainingConfig, fusion_config=MlpSwitches, axes=dict(batch_size="B", width="W"))
flags.judge(__name__, **WITHOUT_TORCH)

import torch
import torch.nn as nn

from tiny_openfold.layers.custom_gradients import LinearReLU
from tiny_openfold_v2 import Trainer, main


class Up(nn.Linear):
    def forward(self, x, fused):
        return LinearReLU.of(x, self) if fused else super().forward(x).relu()


class Down(nn.Linear):
    def forward(self, x, hidden, fused):
        if fused and not torch.is_autocast_enabled(x.device.type):
            return torch.addmm(x, hidden, self.weight.t()) + self.bias
        return x + super().forward(hidden)


class Mlp(nn.Module, Model):
    SUBLAYERS = ("up", "down")

    def __init__(self, config, fusion):
        super().__init__()
        self.fusion, width = fusion, config.width
        self.shift = nn.Parameter(torch.zeros(width))  # so that the first input wants a gradient
        self.up = nn.ModuleList(Up(width, 4 * width) for _ in range(config.depth))
        self.down = nn.ModuleList(Down(4 * width, width) for _ in range(config.depth))
        for layer in (*self.up, *self.down) if fusion.enable_torch_compile else ():
            layer.compile()

    def forward(self, x, target):
        """x, target (B, width); returns dict(output=(B, width), loss=())."""
        x = x + self.shift
        for up, down in zip(self.up, self.down, strict=True):
            x = down(x, up(x, self.fusion.enable_fused_relu), self.fusion.enable_fused_residual)
        return dict(output=x, loss=(x - target).square().mean())

    def sublayers(self):
        both = [("up", self.up), ("down", self.down)]
        return [] if self.fusion.enable_torch_compile else [(n, m) for n, ms in both for m in ms]


class Numbers(Data):
    def __init__(self, settings):
        self.size, self.seed = (settings.training.batch_size, settings.model.width), settings.training.seed

    def describe(self):
        return "random vectors and their images under a fixed map"

    def batch(self, step):
        x = torch.randn(self.size, generator=torch.Generator().manual_seed(self.seed + step))
        return dict(x=x, target=x.flip(-1) * 0.5)


PROGRAM = Program(**WITHOUT_TORCH, model=Mlp, data=Numbers, trainer=Trainer)
if __name__ == "__main__":
    sys.exit(main(program=PROGRAM))
