"""A run on several GPUs: one process for each, called a rank. torchrun starts them, and ends all when one
fails.

`begin` gives a run its World, which everything else asks for what ranks do together. That of a process alone
is ALONE: it has one rank, and nothing is sent.
"""
import os
import pickle
import sys
import time
import traceback
from datetime import timedelta

import numpy as np
import torch

from fusion_lab.training import torchrun
from fusion_lab.training.errors import FAILED, UserError, drop_output

TIME_LIMIT = 600  # s for which a rank waits for the others


class World:
    """The ranks of a run, and which of them this process is. Each has samples of its own; their losses and
    gradients are added up, so that all make the same step. A method is called by all ranks or by none."""

    def __init__(self, rank=0, size=1, device=None):
        self.rank, self.size, self.device, self.messages = rank, size, device, 0
        self.first = rank == 0  # the rank that prints and writes

    def share(self, output):
        """This rank's share of the loss of all samples, from what its model returned: each summand is a mean
        over all that the ranks have."""
        if self.size == 1:
            return output["loss"]
        if "losses" not in output:
            return output["loss"] * (1 / self.size)
        losses = output["losses"].values()
        counts = torch.stack([loss.count for loss in losses])
        of_all = counts.clone()
        torch.distributed.all_reduce(of_all)
        return (torch.stack([loss.weighted() for loss in losses]) * (counts / of_all.clamp(min=1))).sum()

    def add_up(self, tensors):
        """Make each of these the sum over all ranks, by one exchange; a CUDA graph may hold it."""
        if self.size > 1:
            joined = torch.cat([tensor.flatten() for tensor in tensors])
            torch.distributed.all_reduce(joined)
            sums = joined.split([tensor.numel() for tensor in tensors])
            torch._foreach_copy_(tensors, [s.view_as(t) for s, t in zip(sums, tensors, strict=True)])

    def agreed_signal(self, stop):
        """The signal that any rank was sent, or None. It is noted in the StopRequest of every rank, so that
        all end after the same step. The host waits for the GPU."""
        if self.size == 1:
            return stop.signal
        sent = torch.tensor(stop.signal or 0, device=self.device)
        torch.distributed.all_reduce(sent, op=torch.distributed.ReduceOp.MAX)
        if agreed := sent.item():
            stop.signal = agreed
        return agreed or None

    def from_first(self, make):
        """What make() returns in the first rank. The others wait without a time limit, because that may be a
        long evaluation."""
        if self.size == 1:
            return make()
        self.messages += 1
        store, key = torch.distributed.distributed_c10d._get_default_store(), f"from_first {self.messages}"
        if self.first:
            store.set(key, pickle.dumps(made := make()))
            return made
        while not store.check([key]):
            time.sleep(0.01)
        return pickle.loads(store.get(key))

    def reseed(self, *numbers):
        """Give ranks after the first random numbers of their own, because they have samples of their own."""
        if self.rank:
            sequence = np.random.SeedSequence((*numbers, self.rank))
            torch.manual_seed(int(sequence.generate_state(1, np.uint64)[0]))


ALONE = World()


def begin(device):
    """Meet the other ranks, if torchrun started any; returns the World. Only the first rank prints from here
    on, but all say why they end, because torchrun may end the first before it can. Raises UserError."""
    place = torchrun.place()
    if place.size == 1:
        return ALONE
    if place.rank:
        drop_output()
    backend, own = ("nccl", device) if device.type == "cuda" else ("gloo", None)
    try:
        torch.distributed.init_process_group(backend, timeout=timedelta(seconds=TIME_LIMIT), device_id=own)
    except (RuntimeError, ValueError) as error:
        raise UserError(f"{place.size} ranks did not meet: {str(error).splitlines()[0][:200]}",
                        FAILED) from None
    return World(place.rank, place.size, device)


def leave(run):
    """run() -> exit code. One of several ranks ends here, whatever happens: at Python's own end NCCL would
    wait for captured graphs."""
    if os.environ.get("WORLD_SIZE", "1") == "1":
        return run()
    try:
        code = run()
    except Exception:
        traceback.print_exc()
        code = FAILED
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
