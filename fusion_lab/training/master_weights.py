"""Low-precision weights with float32 masters, each kind in one flat tensor."""
import torch

ALIGNMENT = 64  # elements; GEMMs and compiled kernels want every weight to begin at a multiple of 16 bytes


class MasterWeights:
    """Turns a model's parameters into views of one tensor of a lower precision; `flat` holds their float32
    originals, which the optimizer updates.

    One tensor, because lists of some hundred small ones are cut into launches of a few dozen, and a block of
    threads works on one of them alone (benchmarks/LOG.md).
    """

    sharded = False

    def __init__(self, model, dtype):
        self.parameters = dict(model.named_parameters())
        sizes = [-(-p.numel() // ALIGNMENT) * ALIGNMENT for p in self.parameters.values()]
        self.starts = [sum(sizes[:i]) for i in range(len(sizes))]
        first = next(iter(self.parameters.values()))
        self.flat = self.join(self.parameters, torch.zeros(sum(sizes), device=first.device))
        self.low = self.flat.to(dtype)
        for p, view in zip(self.parameters.values(), self.views(self.low).values(), strict=True):
            p.data = view

    def views(self, flat):
        """{parameter name: its part of flat, in its shape}"""
        return {name: flat[start:start + p.numel()].view(p.shape)
                for start, (name, p) in zip(self.starts, self.parameters.items(), strict=True)}

    def join(self, tensors, flat):
        """The reverse: tensors by parameter name -> flat, in place."""
        views = self.views(flat)
        with torch.no_grad():
            torch._foreach_copy_([views[name] for name in tensors], list(tensors.values()))
        return flat

    def take_gradients(self):
        """Move the gradients there are to flat.grad, in float32."""
        gradients = {name: p.grad for name, p in self.parameters.items() if p.grad is not None}
        self.flat.grad = self.join(gradients, torch.zeros_like(self.flat))
        for p in self.parameters.values():
            p.grad = None

    def publish(self):
        """Masters -> the model's own weights, in one kernel."""
        self.low.copy_(self.flat)
