"""Batches made ahead and brought to the device."""
from concurrent.futures import ThreadPoolExecutor

from fusion_lab.training.distributed import ALONE


def to_device(batch, device):
    if device.type == "cuda":
        return {key: value.pin_memory().to(device, non_blocking=True) for key, value in batch.items()}
    return batch


def batches(source, steps, device, world=ALONE):
    """This rank's batches of the given steps, each made by a second thread while the step before it runs."""
    own = world.rank, world.size
    with ThreadPoolExecutor(max_workers=1) as pool:
        pending = None
        for step in steps:
            batch = pending.result() if pending else source.part(step, *own)
            pending = pool.submit(source.part, step + 1, *own) if step + 1 in steps else None
            yield to_device(batch, device)
