#!/usr/bin/env python3
"""A second program for the lab: a residual MLP that learns a fixed map, with two switches of its own."""
import sys
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
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
    enable_fused_residual: bool = option(False, "the residual within its GEMM", preset=True, rung=4)


KNOWN = dict(file=__file__, about=__doc__, suffix="mlp", version="mlp", model_config=MlpConfig,
             training_config=TrainingConfig, fusion_config=MlpSwitches, axes=dict(batch_size="B", width="W"))

flags.judge(__name__, **KNOWN)

import torch
import torch.nn as nn

from fusion_lab.kernels.library.custom_gradients import LinearReLU
from tiny_openfold_v2 import Trainer, main


class Layer(nn.Module):
    def __init__(self, width, fusion):
        super().__init__()
        self.up, self.down, self.fusion = nn.Linear(width, 4 * width), nn.Linear(4 * width, width), fusion

    def forward(self, x):
        hidden = LinearReLU.of(x, self.up) if self.fusion.enable_fused_relu else self.up(x).relu()
        if self.fusion.enable_fused_residual and not torch.is_autocast_enabled(x.device.type):
            return torch.addmm(x, hidden, self.down.weight.t()) + self.down.bias
        return x + self.down(hidden)


class Mlp(nn.Module, Model):
    SUBLAYERS = ("layer",)

    def __init__(self, config, fusion):
        super().__init__()
        self.fusion = fusion
        self.shift = nn.Parameter(torch.zeros(config.width))  # so that the first input wants a gradient
        self.layers = nn.ModuleList(Layer(config.width, fusion) for _ in range(config.depth))
        for layer in self.layers if fusion.enable_torch_compile else ():
            layer.compile()

    def forward(self, x, target):
        """x, target (B, width); returns dict(output=(B, width), loss=())."""
        output = nn.Sequential(*self.layers)(x + self.shift)
        return dict(output=output, loss=(output - target).square().mean())

    def sublayers(self):
        return [("layer", layer) for layer in self.layers if not self.fusion.enable_torch_compile]


class Numbers(Data):
    """Random vectors and their images under a fixed map."""

    def __init__(self, settings):
        self.size, self.seed = (settings.training.batch_size, settings.model.width), settings.training.seed

    def describe(self):
        return "random vectors"

    def batch(self, step):
        x = torch.randn(self.size, generator=torch.Generator().manual_seed(self.seed + step))
        return dict(x=x, target=x.flip(-1) * 0.5)


PROGRAM = Program(**KNOWN, model=Mlp, data=Numbers, trainer=Trainer)

if __name__ == "__main__":
    sys.exit(main(program=PROGRAM))
