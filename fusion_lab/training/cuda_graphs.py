"""A whole training step in one CUDA graph: one launch from the host where eager code makes some thousand."""
import torch

from fusion_lab.training.files import FAILED, OUT_OF_MEMORY, UserError


class GraphedStep:
    """Capture run(batch), a step that leaves nothing on the host, and replay it on new data.

    run must not synchronise; batches must keep their shapes. Warm-up and capture use one side stream: their
    memory then comes from one pool, and library handles made in warm-up are found again. Plain
    torch.cuda.CUDAGraph, so that it is the same on ROCm. Random numbers of the default generator advance with
    every replay. `peak` is the largest amount of memory (bytes) allocated while the step was captured. A step
    that cannot be captured is a UserError: it leaves CUDA's random generator unusable, so there is nothing to
    fall back to.
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
        self.graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(self.graph, stream=stream):
                self.result = run(self.inputs)
        except RuntimeError as error:
            if OUT_OF_MEMORY.search(str(error)):
                raise
            raise UserError(f"CUDA graphs: this step cannot be captured ({str(error).splitlines()[0]}); use "
                            "--disable-cuda-graphs", code=FAILED) from None
        self.peak = torch.cuda.max_memory_allocated(device)

    def __call__(self, batch):
        """Replay on a batch of the captured shapes; returns a copy of run's result, a tensor. Who replays
        `graph` instead may have any result."""
        for key, value in batch.items():
            self.inputs[key].copy_(value)
        self.graph.replay()
        return self.result.clone()
