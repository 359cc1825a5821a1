"""Batches made ahead and brought to the device."""
from concurrent.futures import ThreadPoolExecutor


def to_device(batch, device):
    if device.type == "cuda":
        return {key: value.pin_memory().to(device, non_blocking=True) for key, value in batch.items()}
    return batch


def batches(source, steps, device):
    """Batches of the given steps, each made by a second thread while the step before it runs."""
    with ThreadPoolExecutor(max_workers=1) as pool:
        pending = None
        for step in steps:
            batch = pending.result() if pending else source.batch(step)
            pending = pool.submit(source.batch, step + 1) if step + 1 in steps else None
            yield to_device(batch, device)
