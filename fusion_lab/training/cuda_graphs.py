"""A whole training step in one CUDA graph: one launch from the host where eager code makes some thousand."""
import ctypes
import os

import torch

from fusion_lab.training.errors import FAILED, OUT_OF_MEMORY, UserError


class GraphedStep:
    """Capture run(batch), a step that leaves nothing on the host, and replay it on new data.

    run must not synchronise; batches must keep their shapes. Warm-up and capture use one side stream: their
    memory then comes from one pool, and library handles made in warm-up are found again. Plain
    torch.cuda.CUDAGraph, so that it is the same on ROCm. Random numbers of the default generator advance with
    every replay. `peak` is the largest amount of memory (bytes) allocated while the step was captured,
    `kernels` how many kernels a replay runs, None where the runtime does not tell. A step that cannot be
    captured is a UserError: it leaves CUDA's random generator unusable, so there is nothing to fall back to.
    """
    WARMUP_STEPS = 3

    def __init__(self, run, batch, device):
        self.inputs = {key: value.clone() for key, value in batch.items()}
        stream = torch.cuda.Stream(device)
        stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(stream):
            for _ in range(self.WARMUP_STEPS):
                run(self.inputs)
        torch.cuda.current_stream(device).wait_stream(stream)
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
        self.graph = torch.cuda.CUDAGraph(keep_graph=True)
        try:
            with torch.cuda.graph(self.graph, stream=stream):
                self.result = run(self.inputs)
            self.kernels = kernels_in(self.graph)
            self.graph.instantiate()
        except RuntimeError as error:
            if OUT_OF_MEMORY.search(str(error)):
                raise
            raise UserError(f"CUDA graphs: this step cannot be captured ({str(error).splitlines()[0]}); use "
                            "--disable-cuda-graphs", code=FAILED) from None
        self.peak = torch.cuda.max_memory_allocated(device)

    def __call__(self, batch):
        """Replay on a batch of the captured shapes; returns a copy of run's result, which must be a tensor,
        unless the caller replays `graph` itself."""
        for key, value in batch.items():
            self.inputs[key].copy_(value)
        self.graph.replay()
        return self.result.clone()


def kernels_in(graph):
    """The number of kernels in a captured graph, by the runtime; AMD's profilers may record fewer."""
    kind, folder = "hip" if torch.version.hip else "cuda", os.path.dirname(torch.__file__)
    try:  # by torch's own library, which knows the runtime that it was linked to
        library = ctypes.CDLL(os.path.join(folder, "lib", f"libtorch_{kind}.so"))
        list_nodes = getattr(library, f"{kind}GraphGetNodes")
        type_of = getattr(library, f"{kind}GraphNodeGetType")
    except (OSError, AttributeError):
        return None
    handle, count, kernels = ctypes.c_void_p(graph.raw_cuda_graph()), ctypes.c_size_t(), 0
    if list_nodes(handle, None, ctypes.byref(count)):
        return None
    nodes, node_type = (ctypes.c_void_p * count.value)(), ctypes.c_int()
    if list_nodes(handle, nodes, ctypes.byref(count)):
        return None
    for node in nodes:
        type_of(ctypes.c_void_p(node), ctypes.byref(node_type))
        kernels += node_type.value == 0  # cudaGraphNodeTypeKernel, hipGraphNodeTypeKernel
    return kernels
