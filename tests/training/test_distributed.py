"""What one rank of several reckons, in this process: the others are numbers that collectives add."""
import contextlib
import pickle
import signal
from collections import deque
from datetime import timedelta
from types import SimpleNamespace

import pytest
import torch

from fusion_lab.training import distributed, master_weights, torchrun
from fusion_lab.training.files import FAILED, MISSING, NO_GPU, USAGE, UserError
from fusion_lab.training.torchrun import Place

CPU = torch.device("cpu")
SIGINT, SIGTERM = signal.SIGINT, signal.SIGTERM


class Mesh:
    """Of so many (data, sequence) ranks, this one at these coordinates."""

    def __init__(self, shape, at):
        self.shape, self.at = shape, at

    def get_coordinate(self):
        return self.at

    def __getitem__(self, name):
        return SimpleNamespace(get_group=lambda: f"those along {name}")


def new_store():
    """What ranks share; who waits for what nobody has set, fails."""
    store = torch.distributed.HashStore()
    store.set_timeout(timedelta(seconds=1))
    return store


class Watching:
    """A Watch that keeps what it is told; failed is the code of a rank that has failed, before is what
    code_within() finds."""
    limit = 7

    def __init__(self, log=(), failed=None, within=None, claimed=True):
        self.log, self.failed, self.within, self.claimed = log, failed, within, claimed
        self.store, self.inside = new_store(), False

    @contextlib.contextmanager
    def waiting(self):
        self.inside = True
        yield
        self.inside = False

    def code(self):
        return self.failed

    def code_within(self, seconds):
        self.log.append(("within", seconds))
        return self.within

    def claim(self, code):
        self.log.append(("claim", code))
        return self.claimed

    def leave(self, code):
        self.log.append(("leave", code))
        raise SystemExit(code)

    def close(self):
        self.log.append("close")


@pytest.fixture
def others(monkeypatch):
    """What the other ranks add in the all-reduces to come; `sent` is what this one gave, with the group."""
    found = SimpleNamespace(adds=[], sent=[])
    monkeypatch.setattr(distributed, "time", SimpleNamespace(sleep=lambda _: pytest.fail("an endless wait")))

    def all_reduce(tensor, group=None):
        found.sent.append((tensor.tolist(), group))
        tensor += torch.tensor(found.adds.pop(0), dtype=tensor.dtype, device=tensor.device)
    monkeypatch.setattr(torch.distributed, "all_reduce", all_reduce)
    monkeypatch.setattr(torch.distributed, "get_backend", lambda: "gloo")
    return found


def rank_at(at, shape, watch=None, device=CPU):
    place = Place(at[0] * shape[1] + at[1], shape[0] * shape[1], 0, 1)
    return distributed.Ranks(place, device, Mesh(shape, at), watch or Watching())


# --- Who is who -------------------------------------------------------------------------------------------

def test_a_rank_knows_its_place(others):
    one = rank_at((2, 1), (3, 2))
    assert (one.rank, one.size, one.first) == (5, 6, False)
    assert (one.data_rank, one.data_size, one.sequence_rank, one.sequence_size) == (2, 3, 1, 2)
    assert one.data_group == "those along data" and one.limit == 7 and not one.on_its_way
    assert one.describe() == "Ranks: 6 (3 with samples of their own, 2 for each sample), gloo"
    having = SimpleNamespace(training=SimpleNamespace(batch_size=4), having=lambda **values: values)
    assert one.whole(having) == dict(batch_size=12)
    first = rank_at((0, 0), (2, 1))
    assert first.first and first.data_group is None  # all ranks
    assert first.describe() == "Ranks: 2 (2 with samples of their own), gloo"


def test_one_alone_asks_nobody():
    alone = distributed.ALONE
    assert (alone.rank, alone.data_rank, alone.sequence_rank, alone.first) == (0, 0, 0, True)
    assert (alone.size, alone.data_size, alone.sequence_size) == (1, 1, 1)
    assert alone.share(dict(loss=3, loss_terms=4), None) == 3 and alone.gather(5) == [5]
    weight = torch.nn.Parameter(torch.zeros(2))
    weight.grad = torch.tensor([3.0, 4.0])
    assert alone.clip([weight], 1.0) == 5
    assert weight.grad.tolist() == pytest.approx([0.6, 0.8])


@pytest.mark.parametrize("environment, place, first", [
    ({}, Place(0, 1, 0, 1), True), (dict(RANK="0 1 0 1"), Place(0, 1, 0, 1), True),
    (dict(RANK="3 4 1 2", MASTER_ADDR="a", MASTER_PORT="1"), Place(3, 4, 1, 2), False),
    (dict(RANK="0 2 0 2", MASTER_ADDR="a", MASTER_PORT="1"), Place(0, 2, 0, 2), True),
    (dict(RANK=""), "RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE: not set, though  is: start it with "
     "torchrun", True),
    (dict(RANK=" 2"), "RANK, LOCAL_RANK, LOCAL_WORLD_SIZE: not set, though WORLD_SIZE is: start it with "
     "torchrun", True),
    (dict(WORLD_SIZE="2"), "RANK, LOCAL_RANK, LOCAL_WORLD_SIZE: not set, though WORLD_SIZE is: start it with "
     "torchrun", True),
    (dict(RANK="1 ² 0 1"), "WORLD_SIZE='²': must be a whole number; torchrun sets it", False),
    (dict(RANK="1 2 2 2"), "RANK=1 WORLD_SIZE=2 LOCAL_RANK=2 LOCAL_WORLD_SIZE=2: this cannot be; each rank "
     "must be less than its size; torchrun sets them", False),
    (dict(RANK="2 2 0 1"), "RANK=2 WORLD_SIZE=2 LOCAL_RANK=0 LOCAL_WORLD_SIZE=1: this cannot be; each rank "
     "must be less than its size; torchrun sets them", False),
    (dict(RANK="1 2 0 1", MASTER_ADDR="a"), "MASTER_PORT: not set, but 2 ranks need it; torchrun sets it",
     False),
    (dict(RANK="1 2 0 1"), "MASTER_ADDR, MASTER_PORT: not set, but 2 ranks need it; torchrun sets it",
     False)])
def test_what_torchrun_says(environment, place, first, monkeypatch):
    for name in (*torchrun.COUNTS, *torchrun.MEETING_POINT):
        monkeypatch.delenv(name, raising=False)
    counts = environment.pop("RANK", None)
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
    if counts is not None:
        environment |= dict(zip(names, counts.split(" "), strict=False))
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert torchrun.first() is first
    if isinstance(place, Place):
        assert torchrun.place() == place
    else:
        with pytest.raises(UserError) as caught:
            torchrun.place()
        assert str(caught.value) == place and caught.value.code == USAGE


def test_who_says_why_before_the_ranks_have_met(monkeypatch):
    found = {}
    for rank, local in (("0", "0"), ("1", "1"), ("2", "0")):
        monkeypatch.setenv("RANK", rank)
        monkeypatch.setenv("LOCAL_RANK", local)
        found[rank] = [code for code in (FAILED, USAGE, MISSING, NO_GPU) if torchrun.speaks(code)]
    assert found == {"0": [FAILED, USAGE, MISSING, NO_GPU], "1": [], "2": [MISSING, NO_GPU]}


# --- Losses and gradients ---------------------------------------------------------------------------------

def test_what_a_rank_weighs(others):
    batches = []

    def loss_counts(**batch):
        batches.append(batch)
        return torch.tensor([6.0, 4.0, 0.0, 1.0])
    model = SimpleNamespace(loss_counts=loss_counts)
    assert rank_at((0, 1), (1, 2)).weight(model, {}) == 1 and batches == others.sent == []
    assert rank_at((0, 0), (3, 1)).weight(SimpleNamespace(), {}) == pytest.approx(1 / 3)
    assert others.sent == []
    others.adds = [[10, 0, 0, 3]]
    weight = rank_at((0, 1), (2, 2)).weight(model, dict(a=1))
    assert weight.tolist() == [0.375, 1, 0, 0.25] and batches == [dict(a=1)]
    assert others.sent == [([6, 4, 0, 1], "those along data")]
    others.adds = [[0, 0, 0, 0]]
    assert rank_at((0, 0), (2, 1)).weight(model, {}).tolist() == [1, 1, 0, 1]


def test_a_rank_s_share_of_the_loss(others):
    rank = rank_at((0, 0), (2, 1))
    terms = dict(loss=torch.tensor(100.0), loss_terms=torch.tensor([2.0, 3.0]))
    assert rank.share(terms, torch.tensor([0.5, 2.0])) == 7
    assert rank.share(dict(loss=torch.tensor(4.0)), 0.25) == 1


def with_gradients(*gradients):
    updated = [torch.nn.Parameter(torch.zeros_like(g)) for g in gradients]
    for weight, gradient in zip(updated, gradients, strict=True):
        weight.grad = gradient
    return updated


def test_gradients_loss_and_signals_are_one_sum(others):
    updated = with_gradients(torch.tensor([[1.0, 2.0], [3.0, 4.0]]), torch.zeros(2), torch.tensor([5.0]))
    updated[1].grad = None
    rank = rank_at((1, 0), (2, 2))
    rank.asks[1] = 1
    others.adds = [[10, 20, 30, 40, 50, 0.5, 0, 2]]
    loss = rank.reduce(updated, torch.tensor(2.5, requires_grad=True))
    assert others.sent == [([1, 2, 3, 4, 5, 2.5, 0, 1], None)]
    assert loss == 1.5 and not loss.requires_grad  # two ranks have the same loss
    assert updated[0].grad.tolist() == [[11, 22], [33, 44]] and updated[1].grad is None
    assert updated[2].grad.tolist() == [55] and rank.told.tolist() == [0, 3]


def test_a_sum_is_in_the_weights_precision(others):
    updated = with_gradients(torch.tensor([0.1], dtype=torch.float64))
    others.adds = [[0, 1, 0, 0]]
    loss = rank_at((0, 0), (2, 1)).reduce(updated, torch.tensor(2.0))
    assert updated[0].grad.item() == 0.1 and loss == 3 and loss.dtype == torch.float64


def test_gradients_of_masters_have_room_for_what_else_is_summed(others):
    model = torch.nn.Linear(2, 1)
    masters = master_weights.MasterWeights(model, torch.bfloat16)
    model(torch.tensor([[1.0, 2.0]]).bfloat16()).sum().backward()
    masters.take_gradients()
    masters.flat.grad[64] = 3
    others.adds = [[0.5] * 189 + [1.0, 0, 1]]
    rank = rank_at((0, 1), (1, 2))
    rank.asks[0] = 1
    assert rank.reduce([masters.flat], torch.tensor(5.0), masters) == 3
    assert others.sent == [([1, 2, *62 * [0], 3, *124 * [0], 5, 1, 0], None)]
    assert masters.flat.grad[:3].tolist() == [1.5, 2.5, 0.5] and len(masters.flat.grad) == 128
    assert rank.told.tolist() == [1, 1]


@pytest.mark.parametrize("own, added, seen", [
    ([1.0, 2.0], 0, [1, 2]), ([1.0, 2.0], float("nan"), ["nan", "nan"]),
    ([1.0, float("inf")], 0, ["nan", "nan"])])
def test_a_gradient_that_one_rank_cannot_use_is_seen_by_all(own, added, seen, others):
    flat = torch.nn.Parameter(torch.zeros(2))
    masters = SimpleNamespace(sharded=True, flat=flat)
    masters.sum_gradients = lambda: setattr(flat, "grad", torch.tensor(own))
    rank = rank_at((0, 0), (2, 1))
    rank.asks[1] = 1
    others.adds = [[3, 1, 0, added]]
    assert rank.reduce([flat], torch.tensor(2.0), masters) == 5 and rank.told.tolist() == [1, 1]
    assert others.sent[0][0][:3] == [2, 0, 1]
    assert [value if value == value else "nan" for value in flat.grad.tolist()] == seen


def test_the_norm_is_that_of_all_parts(others):
    rank, updated = rank_at((0, 0), (2, 1)), with_gradients(torch.tensor([3.0, 4.0]))
    assert rank.clip(updated, 1.0) == 5 and others.sent == []
    assert updated[0].grad.tolist() == pytest.approx([0.6, 0.8])
    assert rank.clip(updated, 1.0, SimpleNamespace(sharded=False, clip=lambda limit: ("masters", limit))) == (
        "masters", 1.0)  # which are whole
    updated[0].grad, others.adds = torch.tensor([3.0, 4.0]), [144]
    assert rank.clip(updated, 1.0, SimpleNamespace(sharded=True)) == 13
    assert updated[0].grad.tolist() == pytest.approx([3 / 13, 4 / 13])


def test_parts_are_summed_and_gathered_by_either_name(monkeypatch):
    def scatter(part, whole):
        part.copy_(2 * whole[2:4])

    def gather(whole, part):
        whole.copy_(torch.cat([part, part + 1, part + 2]))

    def old(*_):
        pytest.fail("its newer name should be used")
    monkeypatch.setattr(torch.distributed, "reduce_scatter_single", scatter, raising=False)
    monkeypatch.setattr(torch.distributed, "all_gather_single", gather, raising=False)
    monkeypatch.setattr(torch.distributed, "reduce_scatter_tensor", old)
    monkeypatch.setattr(torch.distributed, "all_gather_into_tensor", old)
    for _ in range(2):
        assert distributed.sum_parts(torch.arange(6.0), 3).tolist() == [4, 6]
        assert distributed.gather_parts(torch.tensor([10, 20]), 3).tolist() == [10, 20, 11, 21, 12, 22]
        monkeypatch.delattr(torch.distributed, "reduce_scatter_single", raising=False)
        monkeypatch.delattr(torch.distributed, "all_gather_single", raising=False)
        monkeypatch.setattr(torch.distributed, "reduce_scatter_tensor", scatter)
        monkeypatch.setattr(torch.distributed, "all_gather_into_tensor", gather)


def test_a_group_of_one_has_parts_that_are_whole():
    torch.distributed.init_process_group("gloo", store=new_store(), rank=0, world_size=1)
    try:
        assert distributed.sum_parts(torch.arange(3.0), 1).tolist() == [0, 1, 2]
        assert distributed.gather_parts(torch.tensor([7, 8]), 1).tolist() == [7, 8]
        mesh = torch.distributed.init_device_mesh("cpu", (1, 1), mesh_dim_names=("data", "sequence"))
        rank = distributed.Ranks(Place(0, 1, 0, 1), CPU, mesh, Watching())
        assert rank.settled(SIGTERM) == SIGTERM and rank.gather("x") == ["x"] and rank.first
    finally:
        torch.distributed.destroy_process_group()


# --- Signals and agreements -------------------------------------------------------------------------------

def test_a_signal_is_heard_from_any_rank(others):
    rank = rank_at((0, 0), (2, 1))
    assert rank.heard(None) is None and rank.asks.tolist() == [0, 0]
    assert rank.heard(SIGTERM) is None and rank.asks.tolist() == [0, 1]  # not before all know
    rank.told.copy_(torch.tensor([0, 2]))
    assert rank.heard(None) == SIGTERM
    rank.told.copy_(torch.tensor([1, 1]))
    assert rank.heard(None) == SIGINT


@pytest.fixture
def elsewhere():
    """Tensors made without a device have no numbers."""
    torch.set_default_device("meta")
    yield
    torch.set_default_device(None)


def test_after_the_last_step_all_ask_at_once(others, monkeypatch, elsewhere):
    rank, within = rank_at((0, 0), (2, 1)), []
    monkeypatch.setattr(rank, "signal_in", lambda told: within.append(rank.watch.inside) or
                        distributed.Ranks.signal_in(told))
    others.adds = [[0, 0], [0, 0], [1, 1]]
    assert [rank.settled(number) for number in (None, SIGTERM, None)] == [None, SIGTERM, SIGINT]
    assert [sent for sent, _ in others.sent] == [[0, 0], [0, 1], [0, 0]] and within == 3 * [True]
    assert rank.asks.device == CPU and not rank.watch.inside


class Late:
    """A copy on the host of what a GPU has yet to reckon: there when its event has come."""

    def __init__(self):
        self.value = self.coming = torch.zeros(2)
        self.event = SimpleNamespace(record=self.record, synchronize=self.synchronize)
        self.recorded = False

    def copy_(self, told, non_blocking=False):
        assert non_blocking, "the host would wait"
        self.coming, self.recorded = told.clone(), False

    def record(self):
        self.recorded = True

    def synchronize(self):
        self.value = self.coming if self.recorded else self.value

    def tolist(self):
        return self.value.tolist()


def test_a_gpu_is_asked_two_steps_later(others):
    rank, copies = rank_at((0, 0), (2, 1)), [Late(), Late()]
    rank.device = torch.device("cuda")
    rank.on_its_way = deque((copy, copy.event) for copy in copies)
    heard = []
    for told in ([0, 0], [0, 1], [1, 0], [0, 0], [0, 0]):
        rank.told.copy_(torch.tensor(told))
        heard.append(rank.heard(None))
    assert heard == [None, None, None, SIGTERM, SIGINT]


def test_copies_from_a_gpu_come_to_pinned_memory(others, monkeypatch):
    real = torch.zeros
    monkeypatch.setattr(torch, "zeros", lambda *size, device=None: real(*size))
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor: ("pinned", tensor.tolist()))
    monkeypatch.setattr(torch.cuda, "Event", lambda: "event")
    rank = rank_at((0, 0), (2, 1), device=torch.device("cuda"))
    assert [*rank.on_its_way] == 2 * [(("pinned", [0, 0]), "event")]


def test_what_the_first_rank_makes_comes_to_the_others(others, monkeypatch):
    watch, naps = Watching(), []
    first, other = rank_at((0, 0), (2, 1), watch), rank_at((1, 0), (2, 1), watch)

    def nap(seconds):
        naps.append(seconds)
        assert len(naps) < 9, "it should have come"
        if len(naps) == 3:
            assert first.from_first(lambda: "third") == "third"
    monkeypatch.setattr(distributed, "time", SimpleNamespace(sleep=nap))
    assert first.from_first(lambda: dict(a=[1])) == dict(a=[1]) and first.from_first(lambda: 2) == 2
    assert [other.from_first(None) for _ in range(2)] == [dict(a=[1]), 2] and naps == []
    assert other.from_first(None) == "third" and len(naps) == 3 and sum(naps) < 0.1


def test_what_ranks_make_together_they_all_begin(others):
    for at, made in (((0, 0), 1), ((0, 1), 1), ((1, 0), 0), ((1, 1), 0)):
        rank, calls = rank_at(at, (2, 2)), []
        rank.watch.store.set("from the first 1", pickle.dumps("what the first one made"))
        found = rank.together(lambda calls=calls: calls.append(1))
        assert len(calls) == made and found == (None if rank.first else "what the first one made")


def test_ranks_of_one_sample_do_what_any_of_them_wishes(others, elsewhere):
    assert rank_at((1, 0), (2, 1)).agreed(True) is True and others.sent == []
    rank = rank_at((1, 0), (2, 2))
    others.adds = [0, 1, 0]
    assert [rank.agreed(wish) for wish in (False, False, True)] == [False, True, True]
    assert others.sent == [(x, "those along sequence") for x in (0, 0, 1)]


def test_values_of_all_ranks(others, monkeypatch):
    rank = rank_at((0, 0), (3, 1))

    def gather(found, value):
        assert rank.watch.inside and found == 3 * [None]
        found[:] = [value, value + 1, value + 2]
    monkeypatch.setattr(torch.distributed, "all_gather_object", gather)
    assert rank.gather(5) == [5, 6, 7] and not rank.watch.inside


def test_random_numbers_of_a_rank_s_own(others):
    found = set()
    for at, step in (((1, 0), 3), ((1, 1), 3), ((2, 0), 3), ((1, 0), 4)):
        torch.manual_seed(5)
        rank_at(at, (3, 2)).reseed(42, step)
        found.add(torch.initial_seed())
    assert len(found) == 3 and all(seed > 2 ** 32 for seed in found)  # one for each sample and step
    torch.manual_seed(5)
    rank_at((0, 1), (3, 2)).reseed(42, 3)
    assert torch.initial_seed() == 5
