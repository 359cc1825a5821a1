"""Models of bytes: a corpus that is on every machine, bits per byte on files never seen, and yardsticks.

The corpus is the standard library of the running Python, or the user's text. A file is held out if a hash of
its path says so, so that the choice depends on nothing else. Letters: B samples, S bytes.
"""
import hashlib
import lzma
import math
import platform
import sysconfig
from functools import cached_property
from pathlib import Path

import numpy as np
import torch
from tqdm import tqdm

from fusion_lab.training.feeding import to_device
from fusion_lab.training.files import UserError, counted
from fusion_lab.training.reading import read_regular

LEFT_OUT = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}
ONE_IN = 10  # files are held out
PROMPT, CONTINUED = 64, 200  # bytes


def standard_library():
    """(directory, its modules, tests left out)."""
    root = Path(sysconfig.get_paths()["stdlib"])
    return root, [path for path in root.rglob("*.py") if not LEFT_OUT & {*path.relative_to(root).parts}]


def is_held_out(name):
    return int.from_bytes(hashlib.sha256(name.encode()).digest(), "big") % ONE_IN == 0


def read_corpus(place):
    """{name: bytes} of a directory's files, or of one file's first nine tenths and its last; None: of the
    standard library. Raises UserError."""
    if place is None:
        root, paths = standard_library()
    else:
        root, paths = Path(place), [path for path in Path(place).rglob("*") if path.is_file()]
    try:
        if not root.is_dir():
            whole = read_regular(root)
            cut = len(whole) * (ONE_IN - 1) // ONE_IN
            return {"first part": whole[:cut], "last part": whole[cut:]}
        return {path.relative_to(root).as_posix(): read_regular(path) for path in sorted(paths)}
    except OSError as error:
        raise UserError(f"--data {place}: {error.strerror or error}") from None


class Bytes:
    """A corpus as samples of S + 1 bytes from random places."""

    def __init__(self, settings, length):
        self.training, self.length = settings.training, length  # bytes of a sample
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

    def evaluation(self, text):
        """Batches of windows at even distances over a text."""
        count = min(self.training.eval_windows, (len(text) - 1) // self.length)
        starts = np.linspace(0, len(text) - self.length - 1, count).astype(np.int64)
        for first in range(0, count, 32):
            yield self.windows(text, starts[first:first + 32])

    @cached_property
    def yardsticks(self):
        """Bits per byte of the held-out text: of a 5-gram model of the training text, of a compressor that
        reads the held-out text alone, and so sees its repeats."""
        packed = len(lzma.compress(self.unseen.tobytes(), preset=9))
        return dict(five_gram=n_gram_bits(self.seen, self.unseen, 5), lzma=8 * packed / len(self.unseen))


def n_gram_bits(seen, unseen, order):
    """Mean bits of a byte of `unseen`, by a Witten-Bell n-gram model of `seen`: what followed a context, its
    count against the number of different followers, shared with the shorter context's answer."""
    probability = np.full(len(unseen), 1 / 256)
    for length in range(order):  # of the context
        grams, asked = (codes(text, length + 1) for text in (seen, unseen))
        known, counts = np.unique(grams, return_counts=True)
        contexts, first, kinds = np.unique(known >> np.uint64(8), return_index=True, return_counts=True)
        totals = np.add.reduceat(counts, first)
        context, place = look_up(contexts, asked >> np.uint64(8))
        gram, at = look_up(known, asked)
        found = np.where(gram, counts[at], 0) + kinds[place] * probability[length:]
        mixed = np.where(context, found / (totals[place] + kinds[place]), probability[length:])
        probability[length:] = mixed
    return float(-np.log2(probability).mean())


def codes(text, length):
    """Every run of so many bytes as a number."""
    result = np.zeros(len(text) - length + 1, np.uint64)
    for i in range(length):
        result = result << np.uint64(8) | text[i:len(text) - length + 1 + i]
    return result


def look_up(ordered, wanted):
    """(whether each is there, where)."""
    place = np.searchsorted(ordered, wanted).clip(max=len(ordered) - 1)
    return ordered[place] == wanted, place


@torch.no_grad()
def bits_per_byte(trainer, batches, stop=None, name="evaluation"):
    """Mean over all bytes asked for; None if a signal came first."""
    total = count = 0
    for batch in tqdm([*batches], desc=f"bits per byte, {name}", leave=False, disable=None):  # for terminals
        if stop and stop.signal is not None:
            break
        batch = to_device(batch, trainer.device)
        total += trainer.forward(batch)["loss"].item() * batch["targets"].numel()
        count += batch["targets"].numel()
    return total / count / math.log(2) if count else None


def evaluate(trainer, source, stop=None, final=False):
    """{"training", "held_out": bits per byte}; the final one has the yardsticks and what text it was."""
    with torch.compiler.set_stance("force_eager"):
        found = {name: bits_per_byte(trainer, source.evaluation(text), stop, name)
                 for name, text in (("training", source.seen), ("held_out", source.unseen))}
    beside = dict(source.yardsticks, corpus_sha256=source.sha256) if final else {}
    return found | beside


def scores(evaluation):
    return {f"{name.replace('_', '-')} bits per byte": evaluation[name] for name in ("training", "held_out")
            if evaluation[name] is not None}


def evaluation_line(evaluation):
    parts = [f"{name.replace('_', '-')} {value:.3f}" for name, value in evaluation.items()
             if isinstance(value, float)]
    return "Bits per byte: " + " | ".join(parts)


@torch.no_grad()
def continued(trainer, prompt, count, length, temperature=0.7):
    """The prompt and `count` bytes that the model draws after it, from the last `length`."""
    generator = torch.Generator().manual_seed(trainer.training.seed)
    ids = torch.tensor(list(prompt))[None]
    with torch.compiler.set_stance("force_eager"):
        for _ in range(count):
            window = ids[:, -length:].to(trainer.device)
            logits = trainer.forward(dict(ids=window))["logits"][0, -1, :256].float().cpu()
            drawn = torch.multinomial((logits / temperature).softmax(0), 1, generator=generator)
            ids = torch.cat([ids, drawn[None]], dim=1)
    return bytes(ids[0].tolist())


def closing(trainer, source, evaluations):
    """What the final evaluation says, in words, and a sample."""
    final = evaluations.get("final")
    if not final or final["held_out"] is None:
        return
    better = "below" if final["held_out"] < final["five_gram"] else "above"
    print(f"In words: after step {trainer.step_number} a byte of files it never saw takes "
          f"{final['held_out']:.3f} bits, {better} a 5-gram's {final['five_gram']:.3f}; a guess among "
          f"{trainer.settings.model.vocab_size} equally likely ones takes "
          f"{math.log2(trainer.settings.model.vocab_size):.0f}.")
    middle = len(source.unseen) // 2
    prompt = source.unseen[middle:middle + min(PROMPT, source.length)].tobytes()
    text = continued(trainer, prompt, CONTINUED, source.length)
    shown = [part.decode("utf-8", "replace") for part in (text[:len(prompt)], text[len(prompt):])]
    print(f"It continues {shown[0]!r} so: {shown[1]!r}")


def check_batch(training, length, device):
    """A batch whose last sample asks for no more than its first half."""
    generator = torch.Generator().manual_seed(training.seed)
    size = (training.batch_size, length + 1)
    ids = torch.randint(256, size, generator=generator)
    targets = ids[:, 1:].clone()
    targets[-1, targets.shape[1] // 2:] = -100
    return dict(ids=ids[:, :-1].to(device), targets=targets.to(device))
