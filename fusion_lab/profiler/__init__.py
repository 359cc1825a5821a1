"""A profiler session: a training run with PyTorch's profiler switched on, and a report of it."""
