"""What a step on several GPUs will take, on paper: a step on one, and all-reduces as they were measured.

The model: an all-reduce of n GPUs takes latency * log2(n), as in a tree, and each GPU sends and receives
2 (n - 1) / n times the bytes, as in a ring. A step has two that nothing hides: one of all gradients, and one
of the counts that the losses are means over. Both pieces come from two GPUs of one host; what leaves the host
goes at the network's speed, which is assumed, not measured.
"""
import math
from dataclasses import dataclass

from fusion_lab.training.files import UserError
from fusion_lab.training.reading import read_json

GPUS_OF_A_HOST = 8
NETWORK = 50.0  # GB/s for each GPU: 400 Gbit/s, as hosts with eight such GPUs have them


@dataclass(frozen=True)
class Link:
    """Pieces of an all-reduce between two GPUs."""
    latency_s: float
    bytes_per_s: float

    @classmethod
    def fitted(cls, times):
        """From {bytes: seconds} of all-reduces of two GPUs: the smallest is all latency."""
        small, large = min(times), max(times)
        latency = times[small]
        return cls(latency, (large - small) / max(times[large] - latency, 1e-9))

    def all_reduce(self, size, gpus, network=NETWORK):
        """Seconds for so many bytes."""
        if gpus == 1:
            return 0.0
        speed = self.bytes_per_s if gpus <= GPUS_OF_A_HOST else min(self.bytes_per_s, 1e9 * network)
        return self.latency_s * math.log2(gpus) + 2 * (gpus - 1) / gpus * size / speed


def step_on(gpus, step_s, gradient_bytes, link, network=NETWORK):
    """(seconds of a step, share of perfect scaling) when every GPU has what the one had that took step_s."""
    seconds = step_s + link.all_reduce(gradient_bytes, gpus, network) + link.all_reduce(8, gpus, network)
    return seconds, step_s / seconds


def read_link(path):
    """The Link in a result of benchmarks/measure_scaling.py. Raises UserError."""
    try:
        found = read_json(path)["link"]
        link = Link(float(found["latency_s"]), float(found["bytes_per_s"]))
    except OSError as error:
        raise UserError(f"--link {path}: {error.strerror}") from None
    except (KeyError, TypeError, ValueError):
        raise UserError(f"--link {path}: no result of benchmarks/measure_scaling.py with a link") from None
    if not (0 < link.latency_s < math.inf and 0 < link.bytes_per_s < math.inf):
        raise UserError(f"--link {path}: latency and speed must be positive")
    return link


def gpu_rows(step_s, samples, gradient_bytes, link, gpus):
    """Cells of a table, the header first, for each of these numbers of GPUs."""
    rows = [["GPUs", "ms", "all-reduce ms", "samples/s", "of perfect"]]
    for count in gpus:
        seconds, share = step_on(count, step_s, gradient_bytes, link)
        rows.append([str(count), f"{1e3 * seconds:.3f}", f"{1e3 * (seconds - step_s):.3f}",
                     f"{count * samples / seconds:.1f}", f"{100 * share:.1f}%"])
    return rows
