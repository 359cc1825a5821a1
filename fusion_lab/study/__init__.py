"""A performance study: comparisons over many sizes and runs, and their report."""
