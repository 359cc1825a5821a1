"""How the property-based tests run: the same cases every time, nothing written into the tree."""
import os
import tempfile

from hypothesis import HealthCheck, Phase, configuration, settings

configuration.set_hypothesis_home_dir(os.path.join(tempfile.gettempdir(), f"hypothesis-{os.getuid()}"))


def cases(count):
    """A decorator: that many cases."""
    return settings(max_examples=count, derandomize=True, deadline=None, database=None,
                    suppress_health_check=list(HealthCheck),
                    phases=[Phase.explicit, Phase.generate, Phase.shrink])
