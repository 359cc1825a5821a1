"""What times, profiles and checks a model's fusions, and makes them fast: ARCHITECTURE.md has its rooms."""
__version__ = "2.0.0"
