"""A run on several GPUs: one process for each, started by torchrun, by torch.distributed.

`begin` gives the World of a run, which everything else asks. A run alone asks the same questions of `ALONE`,
for which nothing is sent and torch.distributed is not there.
"""
import contextlib
import os
import pickle
import re
import signal
import sys
import time
import traceback
from collections import deque
from datetime import timedelta
from functools import partial

import numpy as np
import torch

from fusion_lab.training import files, torchrun
from fusion_lab.training.files import FAILED, UserError
from fusion_lab.training.watch import GRACE, Watch

SIGNALS = (signal.SIGINT, signal.SIGTERM)
SAID = 1 + len(SIGNALS)  # numbers that go with all gradients: the loss, and who was sent which signal
LATE = 2  # steps after which a GPU is asked what ranks said: the host never waits for the last step


class World:
    """One process alone: what there is of several, and that it need ask nobody."""
    rank = data_rank = sequence_rank = 0
    size = data_size = sequence_size = 1
    mesh, watch, backend = None, None, None
    first = True  # the rank that prints and writes

    def weight(self, model, batch):
        """What this rank's loss, or each summand of it, weighs in that of all samples."""

    def share(self, output, weight):
        """This rank's share of the loss of all samples, of which the ranks' shares are the sum."""
        return output["loss"]

    def reduce(self, updated, loss, masters=None):
        """Sum the gradients of what an optimizer updates over all ranks; returns the sum of the loss."""
        return loss.detach()

    def clip(self, updated, limit, masters=None):
        """Scale gradients down to this norm; returns the norm before."""
        return masters.clip(limit) if masters else torch.nn.utils.clip_grad_norm_(updated, limit)

    def heard(self, number):
        """After each step, with the signal that came to this rank or None: the one for which all ranks end
        now, or None."""
        return number

    def settled(self, number):
        """The same after the last step, of all ranks, at once."""
        return number

    def from_first(self, make):
        """What make() returns in the first rank, for which the others wait without a time limit."""
        return make()

    def together(self, make):
        """from_first() of what the ranks that share a sample can make only together."""
        return make()

    def agreed(self, wish):
        """Whether any of the ranks that share a sample has this wish."""
        return wish

    def waiting(self):
        """Within, this rank waits for others, which the time limit is for."""
        return contextlib.nullcontext()

    def gather(self, value):
        """The values of all ranks, in a list."""
        return [value]

    def reseed(self, *numbers):
        """Random numbers of this rank's own, where it has samples of its own."""

    def whole(self, settings):
        """Settings by which a source makes the batches of all ranks together."""
        return settings

    def describe(self):
        """For the start-up lines; None alone."""


ALONE = World()


class Ranks(World):
    """Several processes: a mesh of (data, sequence), of which those along "data" have different samples and
    those along "sequence" share one. See World."""

    def __init__(self, place, device, mesh, watch):
        self.device, self.mesh, self.watch, self.asked = device, mesh, watch, 0
        self.limit = watch.limit
        self.rank, self.size, self.first = place.rank, place.size, place.rank == 0
        self.data_rank, self.sequence_rank = mesh.get_coordinate()
        self.data_size, self.sequence_size = mesh.shape
        self.backend = torch.distributed.get_backend()
        self.data_group = mesh["data"].get_group() if self.sequence_size > 1 else None  # None: all ranks
        # by signal: whether this rank was sent it; how many ranks were, as of the last step
        self.asks, self.told = torch.zeros(2, len(SIGNALS), device=device)
        self.on_its_way = deque()  # from a GPU: what ranks said in the last steps, and when it is there
        if device.type == "cuda":
            self.on_its_way.extend((torch.zeros(len(SIGNALS)).pin_memory(), torch.cuda.Event())
                                   for _ in range(LATE))

    def weight(self, model, batch):
        if self.data_size == 1 or not hasattr(model, "loss_counts"):
            return 1 / self.data_size
        counts = model.loss_counts(**batch)  # before the forward pass, when ranks wait least for each other
        everywhere = counts.clone()
        torch.distributed.all_reduce(everywhere, group=self.data_group)
        return counts / everywhere.clamp(min=1)

    def share(self, output, weight):
        return (output.get("loss_terms", output["loss"]) * weight).sum()

    def reduce(self, updated, loss, masters=None):
        said = [loss.detach().view(1), self.asks]
        if masters is None:  # one tensor of everything, of which gradients become views
            with_gradient = [p for p in updated if p.grad is not None]
            parts = [p.grad.flatten() for p in with_gradient]
            parts += [part.to(updated[0].dtype) for part in said]
            joined = torch.cat(parts)
            torch.distributed.all_reduce(joined)
            *gradients, loss, told = joined.split([len(part) for part in parts])
            for p, gradient in zip(with_gradient, gradients, strict=True):
                p.grad = gradient.view_as(p)
        elif masters.sharded:
            masters.sum_gradients()
            gradient = masters.flat.grad  # if it is not finite on one rank, let all of them see that
            tail = torch.cat([*said, (gradient * 0).sum(dim=0, keepdim=True)])
            torch.distributed.all_reduce(tail)
            loss, told, spoilt = tail.split([1, len(SIGNALS), 1])
            gradient += spoilt
        else:  # they are one tensor already
            joined = masters.gradient_with_room()
            loss, told = joined[-SAID:].split([1, len(SIGNALS)])
            torch._foreach_copy_([loss, told], said)
            torch.distributed.all_reduce(joined)
        self.told.copy_(told)
        return loss[0] / self.sequence_size

    def clip(self, updated, limit, masters=None):
        if masters is None or not masters.sharded:
            return super().clip(updated, limit, masters)
        square = updated[0].grad.square().sum()
        torch.distributed.all_reduce(square)
        norm = square.sqrt()
        torch.nn.utils.clip_grads_with_norm_(updated, limit, norm)
        return norm

    def heard(self, number):
        if number is not None:
            self.asks[SIGNALS.index(number)] = 1
        if self.device.type == "cpu":
            return self.signal_in(self.told)
        copy, event = self.on_its_way[0]
        with self.waiting():
            event.synchronize()
        found = self.signal_in(copy)
        copy.copy_(self.told, non_blocking=True)
        event.record()
        self.on_its_way.rotate(-1)
        return found

    @staticmethod
    def signal_in(told):
        return next((number for number, ranks in zip(SIGNALS, told.tolist(), strict=True) if ranks), None)

    def settled(self, number):
        asks = torch.zeros(len(SIGNALS), device=self.device)
        if number is not None:
            asks[SIGNALS.index(number)] = 1
        with self.waiting():
            torch.distributed.all_reduce(asks)
            return self.signal_in(asks)

    def from_first(self, make):
        self.asked += 1
        key = f"from the first {self.asked}"
        if self.first:
            found = make()
            self.watch.store.set(key, pickle.dumps(found))
            return found
        while not self.watch.store.check([key]):  # the watch ends this where the first one fails
            time.sleep(0.01)
        return pickle.loads(self.watch.store.get(key))

    def together(self, make):
        if self.data_rank == 0 and not self.first:
            make()
        return self.from_first(make)

    def agreed(self, wish):
        if self.sequence_size == 1:
            return wish
        wishes = torch.tensor(float(wish), device=self.device)
        torch.distributed.all_reduce(wishes, group=self.mesh["sequence"].get_group())
        return wishes.item() > 0

    def waiting(self):
        return self.watch.waiting()

    def gather(self, value):
        found = [None] * self.size
        with self.waiting():
            torch.distributed.all_gather_object(found, value)
        return found

    def reseed(self, *numbers):
        if self.data_rank:
            sequence = np.random.SeedSequence((*numbers, self.data_rank))
            torch.manual_seed(int(sequence.generate_state(1, np.uint64)[0]))

    def whole(self, settings):
        return settings.having(batch_size=settings.training.batch_size * self.data_size)

    def describe(self):
        how = f"{self.data_size} with samples of their own"
        how += f", {self.sequence_size} for each sample" if self.sequence_size > 1 else ""
        return f"Ranks: {self.size} ({how}), {self.backend}"

    def close(self, code):
        """This rank has come to the end that all come to: leave together, after the first one. What torchrun
        sends the last ones when others have left comes too late."""
        for number in SIGNALS:
            signal.signal(number, signal.SIG_IGN)
        self.from_first(lambda: None)
        if self.backend == "nccl":  # its communicators would wait for every captured graph to be gone
            self.watch.leave(code)
        self.watch.close()
        torch.distributed.destroy_process_group()
        begun(ALONE)


@contextlib.contextmanager
def finally_alone(world, act):
    """act() after what runs within. After an error only in a run alone: it ends a run of several, and the
    other ranks would not come to what act() exchanges."""
    try:
        yield
    except BaseException:
        if world.size == 1:
            act()
        raise
    act()


def sum_parts(whole, size):
    """The sum over ranks of this rank's part of a flat tensor (reduce-scatter)."""
    part = whole.new_empty(len(whole) // size)
    newer = getattr(torch.distributed, "reduce_scatter_single", None)  # its name from torch 2.13 on
    (newer or torch.distributed.reduce_scatter_tensor)(part, whole)
    return part


def gather_parts(part, size):
    """The flat tensor of which every rank has a part (all-gather)."""
    whole = part.new_empty(len(part) * size)
    newer = getattr(torch.distributed, "all_gather_single", None)
    (newer or torch.distributed.all_gather_into_tensor)(whole, part)
    return whole


current = ALONE


def world():
    """The World of this process."""
    return current


def begun(world):
    """Make this the World of this process."""
    global current
    current = world


def begin(settings, device):
    """Meet the other ranks, if torchrun started any; returns the World. Raises UserError."""
    place, limit = torchrun.place(), settings.training.collective_timeout
    sharing = settings.training.sequence_parallel
    if place.size % sharing:
        raise UserError(f"--sequence-parallel {sharing}: must divide the number of processes, which is "
                        f"{place.size}{'' if place.size > 1 else ': start it with torchrun'}")
    if place.size == 1 or current is not ALONE:
        return current
    distributed, on_gpu = torch.distributed, device.type == "cuda"
    if not distributed.is_available():
        raise UserError("this torch has no torch.distributed", files.MISSING)
    if (asked := settings.profiler.profile_rank) != "all" and int(asked) >= place.size:
        raise UserError(f"--profile-rank {asked}: there are {place.size} ranks, the first is 0")
    try:
        distributed.init_process_group("nccl" if on_gpu else "gloo", timeout=timedelta(seconds=limit),
                                       device_id=device if on_gpu else None)
    except (RuntimeError, ValueError) as error:
        raise UserError(f"{place.size} ranks did not meet at {os.environ['MASTER_ADDR']}:"
                        f"{os.environ['MASTER_PORT']} within {limit} s: {str(error).splitlines()[0][:200]}",
                        FAILED) from None
    mesh = distributed.init_device_mesh(device.type, (place.size // sharing, sharing),
                                        mesh_dim_names=("data", "sequence"))
    store = distributed.PrefixStore("fusion_lab", distributed.distributed_c10d._get_default_store())
    say = partial(files.say_why, os.path.basename(sys.argv[0]))
    begun(Ranks(place, device, mesh, Watch(store, place, limit, lambda text: say([text]))))
    signal.signal(signal.SIGTERM, terminated)
    return current


def terminated(number, _frame):
    """SIGTERM where no step is under way, as while a model is made. torchrun sends it to all when one ends:
    then the watch knows why."""
    if (code := current.watch.code_within(2 * GRACE)) is None:
        current.watch.claim(128 + number)
    current.watch.leave(code or 128 + number)


class Followed(UserError):
    """This rank ends because another one did, which has said why."""

    def __init__(self, code):
        super().__init__("", code)
        self.lines = ()


def exit_code(run, argv, program):
    """files.exit_code(), in which one of several ranks says why they end; they end together."""
    try:
        code = files.exit_code(partial(guarded, run), argv, program, speaks)
    except Exception:
        if current is ALONE:
            raise
        traceback.print_exc()
        current.watch.leave(FAILED)
    if current is not ALONE:
        orderly = code == files.OK or code - 128 in SIGNALS
        if not orderly or current.watch.code() is not None:
            current.watch.claim(code)  # where nobody has, because there is nothing to say
            current.watch.leave(current.watch.code_within(GRACE) or code)
        current.close(code)
    return code


def speaks(code):
    """Whether this rank says why all end with this code."""
    return torchrun.speaks(code) if current is ALONE else current.watch.claim(code)


def lost(words):
    """What ends this rank when a collective ended with these words."""
    if re.search("timed out|timeout", words, re.IGNORECASE):
        return UserError(f"rank {current.rank} has waited {current.limit} s for the others "
                         "(--collective-timeout)", files.TIMEOUT)
    if (code := current.watch.code_within(4 * GRACE)) is not None:
        return Followed(code)
    return UserError(f"rank {current.rank} lost the others: {words[:200]}", FAILED)


def guarded(run, argv):
    """run(argv). What another rank's end does to this one is no failure of its own; of a mistake that all
    ranks make, one traceback is enough."""
    if not torchrun.first():
        files.drop_output()
    try:
        return run(argv)
    except (UserError, OSError, MemoryError):
        raise
    except Exception as error:
        if current is ALONE or files.explain(error)[0]:
            raise
        words = (str(error).splitlines() or [""])[0]
        if isinstance(error, torch.distributed.DistError) or re.search("gloo|nccl", words, re.IGNORECASE):
            raise lost(words) from None
        if not current.watch.claim(FAILED):
            raise Followed(FAILED) from None
        raise
