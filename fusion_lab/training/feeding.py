"""Batches made ahead and brought to the device."""
from concurrent.futures import ThreadPoolExecutor

from fusion_lab.training.distributed import ALONE


def to_device(batch, device):
    if device.type == "cuda":
        return {key: value.pin_memory().to(device, non_blocking=True) for key, value in batch.items()}
    return batch


def batch_of(source, step, world):
    """This rank's samples of a step."""
    return source.batch(step) if world.size == 1 else source.part(step, world.rank, world.size)


def batches(source, steps, device, world=ALONE):
    """This rank's batches of the given steps, each made by a second thread while the step before it runs."""
    with ThreadPoolExecutor(max_workers=1) as pool:
        pending = None
        for step in steps:
            batch = pending.result() if pending else batch_of(source, step, world)
            pending = pool.submit(batch_of, source, step + 1, world) if step + 1 in steps else None
            yield to_device(batch, device)
