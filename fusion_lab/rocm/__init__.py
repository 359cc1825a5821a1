"""Wrappers of AMD's profilers, and readers of what these write. Standard library only."""
