"""What one rank of several reckons, in this process: the others are numbers that an all-reduce adds."""
from types import SimpleNamespace

import pytest
import torch

from fusion_lab.training import torchrun
from fusion_lab.training.distributed import ALONE, World
from fusion_lab.training.files import UserError
from fusion_lab.training.program import Model
from fusion_lab.training.torchrun import Place


@pytest.fixture
def others(monkeypatch):
    """What the other ranks add in the all-reduces to come."""
    adds = []

    def all_reduce(tensor, op=torch.distributed.ReduceOp.SUM):
        added = torch.tensor(adds.pop(0), dtype=tensor.dtype)
        tensor.copy_(torch.maximum(tensor, added) if op == torch.distributed.ReduceOp.MAX else tensor + added)
    monkeypatch.setattr(torch.distributed, "all_reduce", all_reduce)
    return adds


@pytest.mark.parametrize("environment, place, first", [
    ({}, Place(0, 1, 0, 1), True), (dict(RANK="0 1 0 1"), Place(0, 1, 0, 1), True),
    (dict(RANK="3 4 1 2"), Place(3, 4, 1, 2), False), (dict(RANK="2"), None, True),
    (dict(WORLD_SIZE="2"), None, True), (dict(RANK="1 x 0 1"), None, False)])
def test_what_torchrun_says(environment, place, first, monkeypatch):
    counts = environment.pop("RANK", "").split()
    environment |= dict(zip(torchrun.COUNTS, counts, strict=False))
    for name in torchrun.COUNTS:
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert torchrun.first() is first
    if place:
        assert torchrun.place() == place
    else:
        with pytest.raises(UserError, match="torchrun"):
            torchrun.place()


def test_one_alone_asks_nobody(others):
    loss, gradient = torch.tensor(3.0), torch.tensor([1.0, 2.0])
    ALONE.add_up([loss, gradient])
    assert ALONE.weighted(dict(loss=loss, loss_terms=None), ALONE.weight(None, {})) is loss and loss == 3
    assert gradient.tolist() == [1, 2] and ALONE.agreed_signal(SimpleNamespace(signal=15)) == 15
    assert ALONE.from_first(lambda: "made") == "made" and ALONE.first


def test_a_rank_weighs_its_loss_by_what_it_is_the_mean_of(others):
    class Counting(Model):
        def loss_counts(self, counts):
            return counts
    rank, batch = World(1, 2), dict(counts=torch.tensor([6.0, 4.0, 0.0]))
    assert rank.weight(Model(), batch) == 0.5 and rank.weighted(dict(loss=torch.tensor(4.0)), 0.5) == 2
    others.append([10, 0, 0])
    weight = rank.weight(Counting(), batch)
    assert weight.tolist() == [0.375, 1, 0]
    assert rank.weighted(dict(loss=None, loss_terms=torch.tensor([8.0, 3.0, 5.0])), weight) == 6


def test_gradients_and_loss_are_one_sum_in_place(others):
    loss, gradients = torch.tensor(2.5), [torch.tensor([[1.0, 2.0], [3.0, 4.0]]).T, torch.tensor([5.0])]
    others.append([0.5, 10, 20, 30, 40, 50])
    World(0, 2).add_up([loss, *gradients])
    assert loss == 3 and [g.tolist() for g in gradients] == [[[11, 23], [32, 44]], [55]] and not others


def test_a_signal_to_one_rank_is_one_to_all(others):
    others.extend([0, 15, 0])
    rank, stops = World(0, 2, torch.device("cpu")), [SimpleNamespace(signal=sent) for sent in (None, None, 2)]
    assert [rank.agreed_signal(stop) for stop in stops] == [None, 15, 2] == [stop.signal for stop in stops]


def test_random_numbers_of_a_rank_s_own():
    found = []
    for rank, step in ((0, 3), (1, 3), (2, 3), (1, 4)):
        torch.manual_seed(5)
        World(rank, 3).reseed(42, step)
        found.append(torch.initial_seed())
    assert found[0] == 5 and len(set(found)) == 4
