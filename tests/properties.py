"""How the property-based tests run: the same cases every time, nothing written into the tree.

PROPERTY_CASES says how many times as many there are, by hand:
    PROPERTY_CASES=50 make test ARGS="tests -k properties"
"""
import os
import tempfile

from hypothesis import HealthCheck, Phase, configuration, settings

configuration.set_hypothesis_home_dir(os.path.join(tempfile.gettempdir(), f"hypothesis-{os.getuid()}"))


def cases(count):
    """A decorator: that many cases."""
    return settings(max_examples=count * int(os.environ.get("PROPERTY_CASES", "1")), derandomize=True,
                    deadline=None, database=None, suppress_health_check=list(HealthCheck),
                    phases=[Phase.explicit, Phase.generate, Phase.shrink])
