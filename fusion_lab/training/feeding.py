"""Batches made ahead and brought to the device."""
from concurrent.futures import ThreadPoolExecutor

from fusion_lab.training.distributed import ALONE


def to_device(batch, device):
    if device.type == "cuda":
        return {key: value.pin_memory().to(device, non_blocking=True) for key, value in batch.items()}
    return batch


def own(batch, rank, size):
    """The samples of one rank among the samples of all."""
    count = len(next(iter(batch.values()))) // size
    return {key: value[rank * count:(rank + 1) * count] for key, value in batch.items()}


def batch_of(source, step, world):
    """This rank's samples of a step. The source makes those of all ranks, so that a step does not depend on
    how many share it; one with part(step, rank, size) makes no more than it must."""
    if world.size == 1:
        return source.batch(step)
    if hasattr(source, "part"):
        return source.part(step, world.rank, world.size)
    return own(source.batch(step), world.rank, world.size)


def batches(source, steps, device, world=ALONE):
    """This rank's batches of the given steps, each made by a second thread while the step before it runs."""
    with ThreadPoolExecutor(max_workers=1) as pool:
        pending = None
        for step in steps:
            batch = pending.result() if pending else batch_of(source, step, world)
            pending = pool.submit(batch_of, source, step + 1, world) if step + 1 in steps else None
            yield to_device(batch, device)
