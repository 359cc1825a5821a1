"""Master weights, place by place; batches on their way to a device."""
import threading
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from fusion_lab.training import feeding
from fusion_lab.training.master_weights import KernelMasters, MasterWeights
from fusion_lab.training.program import Data

CPU = torch.device("cpu")


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


@pytest.mark.parametrize("sizes, starts, length", [
    ((64,), [0], 64), ((65,), [0], 128), ((65, 3), [0, 128], 192), ((3,), [0], 64)])
def test_every_weight_begins_at_a_multiple_of_64_elements(sizes, starts, length):
    masters = MasterWeights(Weights(*sizes), torch.bfloat16)
    assert masters.starts == starts and masters.flat.shape == masters.low.shape == (length,)
    assert places(masters.flat) == [start + i for start, size in zip(starts, sizes, strict=True)
                                    for i in range(size)]


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


def test_masters_are_clipped_by_torch():
    masters = MasterWeights(Weights(2), torch.bfloat16)
    masters.flat.grad = torch.zeros(64).index_fill(0, torch.tensor([0, 63]), 3)
    assert masters.clip(1.0) == pytest.approx(18 ** 0.5)
    assert masters.flat.grad[[0, 1, 63]].tolist() == pytest.approx([0.5 ** 0.5, 0, 0.5 ** 0.5], rel=1e-5)
    masters.flat += 1
    masters.after_step()
    assert masters.low[:3].tolist() == [2, 3, 1]


def test_a_kernel_finds_gradients_as_they_are_and_their_norm():
    model = Weights(2, 1)
    masters = KernelMasters(model, torch.bfloat16, wide=False)
    give(model, [300, 0], [400])
    masters.take_gradients()
    assert masters.flat.grad is None and all(weight.grad is None for weight in model.list)
    assert masters.gradient.dtype == torch.bfloat16 and masters.gradient.shape == masters.flat.shape
    assert masters.gradient[[0, 1, 64]].tolist() == [300, 0, 400]
    assert masters.clip(7.0) is masters.norm and masters.limit == 7
    assert masters.norm == 500 and masters.norm.dtype == torch.float32 and masters.norm.shape == ()
    assert masters.gradient[0] == 300  # the kernel scales it
    masters.flat += 1
    masters.after_step()
    assert model.list[0].tolist() == [1, 2]  # the kernel writes them
    masters.publish()
    assert model.list[0].tolist() == [2, 3]


def test_a_kernel_finds_gradients_that_others_have_changed():
    model = Weights(2, 1)
    masters = KernelMasters(model, torch.float16, wide=True)
    give(model, [3, 0], None)
    masters.take_gradients()
    masters.flat.grad[64] = 4  # a sum over ranks
    assert masters.gradient.dtype == torch.float32 and masters.clip(7.0) == 5


# --- Batches ----------------------------------------------------------------------------------------------

class Source(Data):
    """Batches are (step, samples of rank, of size); each is noted when it is made, with its thread."""

    def __init__(self):
        self.made = []

    def batch(self, step):
        self.made.append((step, threading.current_thread() is threading.main_thread()))
        return dict(step=[step, -step])


class Parted(Source):
    def part(self, step, rank, size):
        return dict(step=step, of=(rank, size))


def test_a_rank_s_samples_of_a_step():
    def world(rank, size):
        return SimpleNamespace(rank=rank, size=size)
    assert feeding.batch_of(Parted(), 3, world(0, 1)) == dict(step=[3, -3])
    assert feeding.batch_of(Parted(), 3, world(1, 2)) == dict(step=3, of=(1, 2))
    assert feeding.batch_of(Source(), 3, world(0, 2)) == dict(step=[3])
    assert feeding.batch_of(Source(), 3, world(1, 2)) == dict(step=[-3])


def test_a_step_s_batch_is_made_while_the_one_before_it_runs():
    source, begun = Source(), threading.Event()
    make = source.batch
    source.batch = lambda step: begun.set() or make(step)
    supply = feeding.batches(source, range(4, 9), SimpleNamespace(type="cpu"))
    next(supply)
    begun.clear()
    next(supply)
    assert begun.wait(60)  # nobody has asked for it yet
    supply.close()
    assert [step for step, _ in source.made] == [4, 5, 6]
