"""What a model of bytes reads, and how well it guesses: bits per byte of files that it never saw.

The corpus is the standard library of the running Python, or the user's text. A file is held out if a hash of
its path says so, so that the choice depends on nothing else. Letters: B samples, S bytes.
"""
import hashlib
import math
import os
import platform
import sysconfig
from pathlib import Path

import numpy as np
import torch

from fusion_lab.training.errors import UserError
from fusion_lab.training.evaluations import Evaluation, evaluating
from fusion_lab.training.feeding import to_device
from fusion_lab.training.program import Data
from fusion_lab.training.words import counted

LEFT_OUT = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}
ONE_IN = 10  # files are held out
MOST_WINDOWS = 512  # of an evaluation


def is_held_out(name):
    return int.from_bytes(hashlib.sha256(os.fsencode(name)).digest(), "big") % ONE_IN == 0


def read_corpus(place):
    """{name: bytes} of a directory's files, or of one file's first nine tenths and its last; None: of the
    standard library, tests left out. Raises UserError."""
    root = Path(place or sysconfig.get_paths()["stdlib"])
    try:
        if not root.is_dir():
            whole = root.read_bytes()
            cut = len(whole) * (ONE_IN - 1) // ONE_IN
            return {"first part": whole[:cut], "last part": whole[cut:]}
        names = {path.relative_to(root): path for path in sorted(root.rglob("*" if place else "*.py"))}
        return {name.as_posix(): path.read_bytes() for name, path in names.items()
                if path.is_file() and (place or not LEFT_OUT & {*name.parts})}
    except OSError as error:
        raise UserError(f"--data {place}: {error.strerror or error}") from None


class Bytes(Data):
    """A corpus as samples of S + 1 bytes from random places."""

    def __init__(self, settings):
        self.training, self.length = settings.training, settings.model.seq_len  # bytes of a sample
        if settings.model.vocab_size < 256:
            raise UserError(f"--vocab-size {settings.model.vocab_size}: text has 256 kinds of bytes")
        files = read_corpus(self.training.data)
        self.held_out = ["last part"] if set(files) == {"first part", "last part"} else [
            name for name in files if is_held_out(name)]
        self.names = [name for name in files if name not in set(self.held_out)]
        self.seen, self.unseen = (np.frombuffer(b"".join(files[name] for name in names), np.uint8)
                                  for names in (self.names, self.held_out))
        for what, found in (("to train on", self.seen), ("held out", self.unseen)):
            if len(found) <= self.length:
                raise UserError(f"--data {self.training.data}: only {len(found)} bytes {what}, fewer than a "
                                "sample has; more or longer files are needed, or shorter samples")
        self.sha256 = hashlib.sha256(self.seen.tobytes() + self.unseen.tobytes()).hexdigest()

    def describe(self):
        what = self.training.data or f"standard library of Python {platform.python_version()}"
        return (f"{what}, {counted(len(self.names), 'file')} ({len(self.seen) / 1e6:.2f} MB), "
                f"{len(self.held_out)} held out ({len(self.unseen) / 1e6:.2f} MB), sha256 {self.sha256[:12]}")

    def windows(self, text, starts):
        ids = torch.from_numpy(text[np.add.outer(starts, np.arange(self.length + 1))].astype(np.int64))
        return dict(ids=ids[:, :-1].contiguous(), targets=ids[:, 1:].contiguous())

    def batch(self, step):
        rng = np.random.default_rng((self.training.seed, step, 1))
        starts = rng.integers(0, len(self.seen) - self.length, self.training.batch_size)
        return self.windows(self.seen, starts)

    def evaluation(self, text, most):
        """Batches of windows at even distances over a text."""
        count = min(most, (len(text) - 1) // self.length)
        starts = np.linspace(0, len(text) - self.length - 1, count).astype(np.int64)
        for first in range(0, count, 32):
            yield self.windows(text, starts[first:first + 32])

    def check_batch(self):
        """A batch whose last sample asks for no more than its first half."""
        generator = torch.Generator().manual_seed(self.training.seed)
        ids = torch.randint(256, (self.training.batch_size, self.length + 1), generator=generator)
        targets = ids[:, 1:].clone()
        targets[-1, targets.shape[1] // 2:] = -100
        return dict(ids=ids[:, :-1], targets=targets)

    def evaluate(self, trainer, stop):
        """Bits per byte of as many windows as the model was trained on, up to MOST_WINDOWS: a short run is
        not kept waiting."""
        most = min(MOST_WINDOWS, max(1, trainer.step_number) * trainer.settings.training.batch_size)
        with evaluating(trainer.model):
            seen, unseen = (bits_per_byte(trainer, self.evaluation(part, most), stop)
                            for part in (self.seen, self.unseen))
        return Evaluation(f"Bits per byte: training {seen:.3f}, held-out {unseen:.3f}, a guess 8",
                          {"training bits per byte": seen, "held-out bits per byte": unseen},
                          details=dict(training=seen, held_out=unseen))


def bits_per_byte(trainer, batches, stop):
    """The mean over the batches' bytes, or over those before a signal."""
    total = count = 0
    for batch in batches:
        if stop.signal:
            break
        batch = to_device(batch, trainer.device)
        total += trainer.forward(batch)["loss"].item() * batch["targets"].numel()
        count += batch["targets"].numel()
    return total / max(count, 1) / math.log(2)
