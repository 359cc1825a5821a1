"""A model's weights as its optimizer sees them: as they are, or float32 masters of low-precision ones."""
import torch

from evoformer_kernels.limits import HAS_TRITON

ALIGNMENT = 64  # elements; GEMMs and compiled kernels want every weight to begin at a multiple of 16 bytes


class ModelWeights:
    """The parameters of a model, which an optimizer updates as they are. `tensors` lists what it updates."""

    def __init__(self, model):
        self.parameters = dict(model.named_parameters())
        self.tensors = list(self.parameters.values())

    def named(self, tensors):
        """{parameter name: what belongs to it} of tensors in the form of self.tensors."""
        return dict(zip(self.parameters, tensors, strict=True))

    def listed(self, named):
        """The reverse."""
        return [named[name] for name in self.parameters]

    def optimizer(self, **options):
        """AdamW for them."""
        return torch.optim.AdamW(self.tensors, **options)

    def take_gradients(self):
        """After the backward pass: bring the gradients to self.tensors."""

    def clip(self, limit):
        """Scale the gradients down to this norm; returns the norm before."""
        return torch.nn.utils.clip_grad_norm_(self.tensors, limit)

    def publish(self):
        """Let the model see what self.tensors hold."""

    @torch.no_grad()
    def put(self, tensors):
        """Give self.tensors other values, in place: a captured graph knows them by their addresses."""
        torch._foreach_copy_(self.tensors, tensors)
        self.publish()

    def after_step(self):
        """The optimizer has made a step: let the model see it."""
        self.publish()


class MasterWeights(ModelWeights):
    """Turns a model's parameters into views of one tensor of a lower precision; `flat` holds their float32
    originals, which the optimizer updates.

    One tensor, because lists of some hundred small ones are cut into launches of a few dozen, and a block of
    threads works on one of them alone.
    """

    def __init__(self, model, dtype):
        super().__init__(model)
        self.sizes = [-(-p.numel() // ALIGNMENT) * ALIGNMENT for p in self.parameters.values()]
        self.starts = [sum(self.sizes[:i]) for i in range(len(self.sizes))]
        first = next(iter(self.parameters.values()))
        wide = torch.promote_types(first.dtype, torch.float32)
        self.flat = self.join(self.parameters, torch.zeros(sum(self.sizes), device=first.device, dtype=wide))
        self.tensors, self.low = [self.flat], self.flat.to(dtype)
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

    def named(self, tensors):
        return self.views(*tensors)

    def listed(self, named):
        return [self.join(named, torch.zeros_like(self.flat))]

    def take_gradients(self):
        self.flat.grad = self.low_gradients().to(self.flat.dtype)

    def low_gradients(self):
        """The gradients there are in one tensor, in the dtype of the weights; parameters lose theirs. By one
        concatenation: lists of tensors are copied with one block of threads for each."""
        parameters, empty = self.parameters.values(), self.low[:0]
        gradients = [empty if p.grad is None else p.grad.flatten() for p in parameters]
        gaps = [size - len(own) for size, own in zip(self.sizes, gradients, strict=True)]
        zeros = self.low.new_zeros(max(gaps))
        for p in parameters:
            p.grad = None
        pieces = (piece for own, gap in zip(gradients, gaps, strict=True) for piece in (own, zeros[:gap]))
        return torch.cat([piece for piece in pieces if len(piece)])

    def publish(self):
        self.low.copy_(self.flat)  # one kernel for all


class KernelMasters(MasterWeights):
    """Masters that one kernel updates. It reads the gradient in the model's 16 bits, clips it, and writes the
    model's own weights as well. So gradients are not clipped between clip() and the optimizer's step.

    wide: gradients are summed over ranks or unscaled before the step, for which they stand in flat.grad.
    """

    def __init__(self, model, dtype, wide):
        from evoformer_kernels.adamw import Joined
        super().__init__(model, dtype)
        self.wide, self.gradient, self.norm, self.limit = wide, None, None, None
        sizes = [p.numel() for p in self.parameters.values()]
        self.joined = None if wide else Joined(sizes, self.starts, len(self.low), self.low.device)

    def optimizer(self, **options):
        from evoformer_kernels.adamw import AdamW
        return AdamW(self, **options)

    def take_gradients(self):
        self.norm = None
        if self.wide:
            super().take_gradients()
            self.gradient = self.flat.grad
        elif self.captured() and not self.joined.used:  # it keeps addresses for one graph alone
            gradients = [None if p.grad is None else p.grad.contiguous() for p in self.parameters.values()]
            self.gradient, self.norm = self.joined(gradients, self.low.dtype)
            for p in self.parameters.values():
                p.grad = None
        else:
            self.gradient = self.low_gradients()

    def captured(self):
        """Whether a CUDA graph is captured."""
        return self.low.is_cuda and torch.cuda.is_current_stream_capturing()

    def clip(self, limit):
        if self.norm is None:
            self.norm = torch.linalg.vector_norm(self.gradient, dtype=torch.float32)
        self.limit = limit
        return self.norm

    def after_step(self):
        """Nothing to do, because the optimizer's kernel has written the model's weights as well."""


def optimized_weights(model, dtype, world, kernel):
    """What fits a run: the parameters as they are, or masters of weights in this dtype, if any; updated by a
    kernel if asked for and there is one for them."""
    weight = next(model.parameters())
    if dtype and kernel and HAS_TRITON and weight.is_cuda and weight.dtype == torch.float32:
        return KernelMasters(model, dtype, wide=world.size > 1 or dtype == torch.float16)
    return MasterWeights(model, dtype) if dtype else ModelWeights(model)
