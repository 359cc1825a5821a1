"""The directory of a run: who may write there, and what."""
import os

from fusion_lab.training import files
from fusion_lab.training.options import ProfilerConfig


class RunDirectory:
    """--profile-dir. Nothing is in it, or is moved, before claim()."""

    def __init__(self, program, settings):
        self.program, self.path, self.force = program, settings.profiler.profile_dir, settings.profiler.force
        self.named = self.path != ProfilerConfig().profile_dir

    def claim(self, resumed=False):
        """Hold it for this process. Earlier results in it are set aside, refused, or kept by a resumed run:
        files.claim(). UserError where another one holds it."""
        files.claim(self.path, self.named, self.force, resumed)
        return self

    def claim_for_check(self):
        """The same for what checks: it writes only where the user says, and beside what is there."""
        if self.named:
            files.claim(self.path, resumed=True)
        return self

    def file(self, name):
        return os.path.join(self.path, name)

    def write(self, kind, result):
        """Write a result of this kind as JSON; returns its path."""
        path = self.file(self.program.result(kind))
        files.write_json(path, files.finite(result))
        return path
