"""Master weights, place by place; batches on their way to a device."""
import threading
from types import SimpleNamespace

import torch
from torch import nn

from fusion_lab.training import feeding
from fusion_lab.training.master_weights import MasterWeights

# --- Master weights ---------------------------------------------------------------------------------------

class Weights(nn.Module):
    """Parameters of so many elements, each of which counts on from the one before."""

    def __init__(self, *sizes, dtype=torch.float32):
        super().__init__()
        values = torch.arange(1, 1 + sum(sizes), dtype=dtype).split(sizes)
        self.list = nn.ParameterList(map(nn.Parameter, values))


def give(model, *gradients):
    for weight, gradient in zip(model.list, gradients, strict=True):
        weight.grad = None if gradient is None else torch.tensor(gradient, dtype=weight.dtype)


def places(flat):
    return flat.nonzero().flatten().tolist()


def test_masters_are_as_wide_as_the_weights_and_float32_at_least():
    for dtype, wide in ((torch.float64, torch.float64), (torch.bfloat16, torch.float32)):
        model = Weights(2, dtype=dtype)
        masters = MasterWeights(model, torch.float16)
        assert (masters.flat.dtype, masters.low.dtype, model.list[0].dtype) == (wide, *2 * (torch.float16,))
        give(model, [5, 6])
        masters.take_gradients()
        assert masters.flat.grad.dtype == wide


def test_gradients_of_masters_place_by_place():
    model = Weights(2, 1, 1)
    masters = MasterWeights(model, torch.bfloat16)
    give(model, [5, 6], None, [7])
    masters.take_gradients()
    gradient = masters.flat.grad
    assert gradient.shape == (192,) and gradient[places(masters.flat)].tolist() == [5, 6, 0, 7]
    assert all(weight.grad is None for weight in model.list)
    masters.flat += 1
    assert [weight.tolist() for weight in model.list] == [[1, 2], [3], [4]]  # not before publish()
    masters.publish()
    assert [weight.tolist() for weight in model.list] == [[2, 3], [4], [5]]


def test_the_gradient_of_a_square_weight_is_not_its_transpose():
    """Wherever it lies in memory."""
    model = nn.Linear(2, 2, bias=False)
    masters = MasterWeights(model, torch.float16)
    for gradient in (torch.tensor([[1.0, 2], [3, 4]]), torch.tensor([[1.0, 3], [2, 4]]).t()):
        model.weight.grad = gradient.half()
        masters.take_gradients()
        assert masters.named([masters.flat.grad])["weight"].tolist() == [[1, 2], [3, 4]]


# --- Batches ----------------------------------------------------------------------------------------------

def test_a_step_s_batch_is_made_while_the_one_before_it_runs():
    made, begun = [], threading.Event()
    source = SimpleNamespace(part=lambda step, *_: made.append(step) or begun.set() or {})
    supply = feeding.batches(source, range(4, 9), torch.device("cpu"))
    next(supply)
    begun.clear()
    next(supply)
    assert begun.wait(60)  # nobody has asked for it yet
    supply.close()
    assert made == [4, 5, 6]
