"""What the graphs of one patch share, and how one is captured."""
import contextlib
import gc
import threading
import warnings

import torch


def room_for(t):
    """Memory for numbers as t has them, without what t repeats."""
    dense = all(t.stride()) or not t.numel()
    return torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device=t.device) if dense else torch.empty(
        t.shape, dtype=t.dtype, device=t.device)


class Shared:
    """What the graphs of one patch share: of each GPU a pool and a stream, tensors that go in and out, what
    was said."""

    def __init__(self):
        self.of_gpu, self.rooms, self.said = {}, {}, set()
        self.lock, self.last = threading.Lock(), {}  # the stream of each GPU's last replay

    @contextlib.contextmanager
    def alone(self, device):
        """Within, nobody else writes into the rooms: no other thread, and what other streams replay has
        ended on the GPU."""
        with self.lock:
            stream = torch.cuda.current_stream(device)
            last = self.last.get(device, stream)
            if last != stream:
                stream.wait_stream(last)
            self.last[device] = stream
            yield

    def pool_and_stream(self, device):
        if device not in self.of_gpu:
            gc.collect()
            pool, stream = torch.cuda.graph_pool_handle(), torch.cuda.Stream(device)
            lasting = torch.cuda.CUDAGraph()  # a pool whose graphs have all gone takes no other
            with recording(lasting, pool, stream):
                torch.zeros(1, device=device)
            self.of_gpu[device] = pool, stream, lasting
        return self.of_gpu[device][:2]

    def room(self, kind, number, t):
        """The tensor of this kind and number for numbers as t has them."""
        key = kind, number, t.shape, t.stride(), t.dtype, t.device
        if key not in self.rooms:
            self.rooms[key] = room_for(t)
        return self.rooms[key]

    def say(self, message):
        if message not in self.said:
            self.said.add(message)
            warnings.warn(message, stacklevel=5)


@contextlib.contextmanager
def recording(graph, pool, stream):
    """Within, launches go into the graph. Not torch.cuda.graph, which collects garbage each time: a stack of
    48 blocks has 96 graphs."""
    torch.cuda.synchronize()
    collects = gc.isenabled()
    gc.disable()
    try:
        with torch.cuda.stream(stream):
            graph.capture_begin(pool=pool, capture_error_mode="thread_local")
            try:
                yield
            finally:
                try:
                    graph.capture_end()
                except RuntimeError:  # what ends with a capture is still to be ended
                    end_capture(stream, pool)
                    raise
    finally:
        if collects:
            gc.enable()


def end_capture(stream, pool):
    """After a capture that failed: memory and random numbers are as outside of captures again."""
    torch._C._cuda_endAllocateToPool(stream.device_index, pool)
    empty = torch.cuda.CUDAGraph()
    empty.capture_begin(capture_error_mode="thread_local")
    torch.zeros(1, device=stream.device)
    empty.capture_end()
