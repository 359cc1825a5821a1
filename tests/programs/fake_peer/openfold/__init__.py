"""Stands in for OpenFold in tests of benchmarks/patch_openfold.py: its names, by the definitions."""
