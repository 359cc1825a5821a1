"""Small gradients and partial sums of other kernels, gathered in few launches."""
