"""What times, profiles and checks a model's fusions, and makes them fast: ARCHITECTURE.md has a map."""
__version__ = "2.0.0"
