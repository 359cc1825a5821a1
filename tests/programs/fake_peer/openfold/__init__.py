"""Stands in for OpenFold in tests of benchmarks/measure_patches.py: its names, by the definitions."""
