"""Stand-in for torch, for the preflight only: as much of a ROCm build as the test's environment says."""
import os

__version__ = "2.13.0+rocm7.0"


class version:  # noqa: N801  the real name
    hip = os.environ.get("FAKE_HIP", "7.0.51831") or None


class cuda:  # noqa: N801
    @staticmethod
    def device_count():
        return int(os.environ.get("FAKE_GPUS", "1"))
