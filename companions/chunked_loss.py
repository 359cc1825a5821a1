"""Cross-entropy of a linear head, made in chunks of rows: logits of all rows are never there at once."""
import torch

from fusion_lab.kernels.precision import at_least_float32, product_dtype

LOGITS = 2 ** 22  # numbers in the logits of one chunk


class ChunkedLoss(torch.autograd.Function):
    """Mean over targets (not -100) of -log softmax(x weight^T)[target]; x (N, c), weight (V, c). Forward
    makes the gradients too, chunk by chunk, while the logits are there; backward scales them."""

    @staticmethod
    def of(x, weight, targets):
        """For x (..., c) and targets (...), in autocast's dtype if that is on."""
        dtype = product_dtype(x)
        return ChunkedLoss.apply(x.flatten(0, -2).to(dtype), weight.to(dtype), targets.flatten())

    @staticmethod
    def forward(ctx, x, weight, targets):
        wide = at_least_float32(x.dtype)
        asked = targets >= 0
        count = asked.sum().clamp(min=1).to(wide)
        total, dx, dweight = x.new_zeros((), dtype=wide), torch.empty_like(x), weight.new_zeros(
            weight.shape, dtype=wide)
        rows = max(1, LOGITS // len(weight))
        for first in range(0, len(x), rows):
            part = slice(first, first + rows)
            logits = (x[part] @ weight.t()).to(wide)
            at, here = targets[part].clamp(min=0)[:, None], asked[part, None]
            log_probs = logits.log_softmax(1)
            total -= (log_probs.gather(1, at) * here).sum()
            gradient = log_probs.exp_().scatter_add_(1, at, -torch.ones_like(at, dtype=wide))
            gradient = (gradient * (here / count)).to(x.dtype)
            dx[part] = gradient @ weight
            dweight += gradient.t() @ x[part]
        ctx.save_for_backward(dx, dweight.to(weight.dtype))
        return total / count

    @staticmethod
    def backward(ctx, gradient):
        dx, dweight = ctx.saved_tensors
        return dx * gradient.to(dx.dtype), dweight * gradient.to(dweight.dtype), None
