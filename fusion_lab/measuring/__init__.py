"""How steps are measured: comparisons, clocks, counters, traces, and the accuracy check."""
