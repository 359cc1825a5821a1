"""Linear projections of one input as one wide GEMM or as many, under the same parameter names."""
import torch
import torch.nn as nn
import torch.nn.functional as F

from tiny_openfold.layers.custom_gradients import ChannelBias


class WideLinear(nn.Module):
    """Linear layers of one input as one: weights below each other. Where only the last one has a bias, the
    GEMM runs without and PackedProjections.project adds it."""

    def __init__(self, layers):
        super().__init__()
        with torch.no_grad():
            self.weight = nn.Parameter(torch.cat([layer.weight for layer in layers]))
            biases = [layer.bias for layer in layers if layer.bias is not None]
            self.bias = nn.Parameter(torch.cat(biases)) if biases else None
        self.unbiased = sum(layer.out_features for layer in layers if layer.bias is None)

    def forward(self, x):
        return F.linear(x, self.weight, None if self.unbiased else self.bias)


def channels_first(layer, x):
    """layer(x) as (c_out, B, S, S) for x (B, S, S, c_in): the same GEMM writes it so at no cost."""
    y = (layer.weight @ x.flatten(0, -2).t()).unflatten(1, x.shape[:-1])
    return ChannelBias.apply(y, layer.bias.to(y.dtype))


def split(x, widths, dim):
    """x in parts of these widths along dim. Eager code splits: gradients of slices would each be padded to
    full width and added. The compiler fuses that, and saves fewer activations for slices."""
    if not torch.compiler.is_compiling():
        return x.split(widths, dim)
    return [x.narrow(dim, sum(widths[:i]), width) for i, width in enumerate(widths)]


class PackedProjections(nn.Module):
    """A module whose linear projections of one input are packed into one wide GEMM, or not.

    Packed, x is read once and one kernel runs; unpacked, there are n layers with n parameters. State dicts
    always hold the unpacked names, and every form loads into every other, so checkpoints do not depend on
    the switches. All forms draw the same random numbers: same seed, same weights.
    """
    PACKINGS = {}  # packed name -> the projections that it holds; one bias, if any lack it, comes last

    def __init__(self):
        super().__init__()
        self.widths, self.packings = {}, ()  # outputs of every projection; keys of PACKINGS in use
        self._register_state_dict_hook(lambda module, state, prefix, _: module.split_packed(state, prefix))
        self.register_load_state_dict_pre_hook(lambda module, state, prefix, *_: module.adapt(state, prefix))

    def add_projections(self, layers, packings=()):
        """Register layers, a dict of nn.Linear by name, those of each of the packings as one."""
        self.packings = packings
        self.widths = {name: layer.out_features for name, layer in layers.items()}
        self.biased = {name for name, layer in layers.items() if layer.bias is not None}
        for packed_name in packings:
            layers[packed_name] = WideLinear([layers.pop(name) for name in self.PACKINGS[packed_name]])
        for name, layer in layers.items():
            self.add_module(name, layer)

    def project(self, x, *groups, dim=-1):
        """The outputs of the projections for x; channels are dimension dim, -1 or 0. One tensor for each
        name, in the order of add_projections; or for each group of names, which must be packed together,
        next to each other and in that order."""
        groups = groups or [(name,) for name in self.widths]
        run = channels_first if dim == 0 else nn.Module.__call__
        made = {}
        for packed_name in self.packings:
            layer = getattr(self, packed_name)
            own = [names for names in groups if names[0] in self.PACKINGS[packed_name]]
            widths = [sum(self.widths[name] for name in names) for names in own]
            made.update(zip(own, split(run(layer, x), widths, dim), strict=True))
            if layer.unbiased and layer.bias is not None:  # of the last group alone
                made[own[-1]] = made[own[-1]] + layer.bias.to(made[own[-1]].dtype)
        return [made[names] if names in made else run(getattr(self, *names), x) for names in groups]

    def packed(self, *names):
        """Weight and bias of these projections below each other, as one packing or several hold them; no bias
        where none of them has one."""
        layers = [getattr(self, name) for name in self.packings if self.PACKINGS[name][0] in names]
        layers += [getattr(self, name) for name in names if hasattr(self, name)]  # in no packing
        if len(layers) == 1:
            return layers[0].weight, layers[0].bias
        biases = [layer.bias for layer in layers if layer.bias is not None]
        return torch.cat([layer.weight for layer in layers]), torch.cat(biases) if biases else None

    def split_packed(self, tensors, prefix):
        """In a dict of tensors by parameter name, replace packed entries by their parts (views)."""
        for packed_name, order in self.PACKINGS.items():
            for kind, names in (("weight", order), ("bias", [name for name in order if name in self.biased])):
                whole = tensors.pop(f"{prefix}{packed_name}.{kind}", None)
                if whole is not None:
                    views = whole.split([self.widths[name] for name in names])
                    tensors.update({f"{prefix}{n}.{kind}": v for n, v in zip(names, views, strict=True)})

    def adapt(self, tensors, prefix):
        """The reverse: bring a dict in any form to the form this module has."""
        self.split_packed(tensors, prefix)
        for packed_name in self.packings:
            for kind in ("weight", "bias"):
                keys = [f"{prefix}{name}.{kind}" for name in self.PACKINGS[packed_name]
                        if kind == "weight" or name in self.biased]
                if keys and all(key in tensors for key in keys):
                    tensors[f"{prefix}{packed_name}.{kind}"] = torch.cat([tensors.pop(key) for key in keys])
