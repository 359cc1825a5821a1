"""Whether Triton's interpreter works here, for the puzzles and for tests of kernels."""


def interpreter_fault():
    """Why Triton's interpreter cannot run kernels here, one line; None where it can."""
    import numpy
    import triton
    if triton.__version__.startswith("3.6.") and numpy.lib.NumpyVersion(numpy.__version__) >= "2.4.0":
        return "Triton 3.6's interpreter fails with NumPy 2.4: pip install 'numpy<2.4', or a newer Triton"
    return None
