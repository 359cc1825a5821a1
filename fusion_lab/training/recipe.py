"""How a run learns beside its steps: the optimizer, its learning rate over time, and averaged weights."""
import contextlib
import math

import torch


def learning_rate(training, step):
    """AdamW's rate for step number `step`, from 0: up linearly over --lr-warmup-steps, then as --lr-schedule
    says, constant or down to 0 at --num-steps."""
    warm = training.lr_warmup_steps
    if step < warm:
        return training.learning_rate * (step + 1) / warm
    progress = min((step - warm) / max(training.num_steps - warm, 1), 1.0)
    factor = dict(constant=1.0, linear=1 - progress, cosine=0.5 * (1 + math.cos(math.pi * progress)))
    return training.learning_rate * factor[training.lr_schedule]


def optimizer(weights, training, graphs):
    """AdamW of the weights, which has all of its state from the start, so that it can be kept and restored in
    place; a CUDA graph reads its rate from a tensor."""
    rate = training.learning_rate
    rate = torch.tensor(rate, device=weights.tensors[0].device) if graphs else rate
    adamw = weights.optimizer(lr=rate, fused=True, capturable=graphs, weight_decay=training.weight_decay)
    for p in weights.tensors:
        adamw.state[p].update(step=torch.zeros((), device=p.device), exp_avg=torch.zeros_like(p),
                              exp_avg_sq=torch.zeros_like(p))
    return adamw


def set_learning_rate(optimizer, rate):
    """A captured graph reads the rate from a tensor, so that one is filled in place."""
    for group in optimizer.param_groups:
        if isinstance(group["lr"], torch.Tensor):
            group["lr"].fill_(rate)
        else:
            group["lr"] = rate


class Average:
    """Exponential moving average of the weights that an optimizer updates (Polyak and Juditsky 1992), which
    evaluation uses and checkpoints hold. Its memory grows with the run up to --ema-decay: after t steps it is
    at most (1 + t) / (10 + t), so that the first weights do not linger."""

    def __init__(self, weights, decay):
        self.weights, self.decay, self.steps = weights, decay, 0
        self.tensors = self.copies()

    def copies(self):
        return [p.detach().clone() for p in self.weights.tensors]

    @torch.no_grad()
    def update(self):
        self.steps += 1
        decay = min(self.decay, (1 + self.steps) / (10 + self.steps))
        torch._foreach_lerp_(self.tensors, [p.detach() for p in self.weights.tensors], 1 - decay)

    @contextlib.contextmanager
    def swapped_in(self):
        """Within, the model has the averaged weights."""
        own = self.copies()
        self.weights.put(self.tensors)
        try:
            yield
        finally:
            self.weights.put(own)
