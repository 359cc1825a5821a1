"""Sequences for backbones: batches to learn from, recovery of native residues, designs as FASTA.

A batch holds the keyword arguments of a model's forward: X (B, L, 4, 3) in Å, S (B, L), mask (B, L),
residue_idx, chain, decoding_order (B, L), E_idx (B, L, k), targets (B, L), -1 where nothing is asked.
"""
import copy
import math
import sys

import numpy as np
import torch

from fusion_lab.training.evaluations import evaluating
from fusion_lab.training.feeding import to_device
from fusion_lab.training.files import counted
from fusion_lab.training.machine import choose_device
from fusion_lab.training.models import put_weights, read_weights, refuse_other_sizes
from proteins import backbones, files
from proteins.backbones import BEST_RECOVERY, Backbone, built_in
from proteins.batches import HoldsOut
from proteins.files import LETTERS, UNKNOWN
from proteins.seam import data_errors

SHOWN = 8  # training proteins in an evaluation


def nearest(X, mask, k):
    """E_idx (B, L, k): the residues with the nearest CA, itself the first; missing ones come last."""
    distance = ((X[:, None, :, 1] - X[:, :, None, 1]).square().sum(-1) + 1e-6).sqrt()
    distance = distance + (1 - mask[:, None]) * 1e6
    return distance.topk(min(k, X.shape[1]), largest=False).indices


def sample_of(backbone, tokens, length, start=0):
    """Arrays of one sample, padded to length: X, S, mask, residue_idx, chain."""
    part = slice(start, start + length)
    arrays = (backbone.atoms[part], tokens[part], np.ones(len(tokens[part]), np.float32),
              backbone.positions[part], backbone.chains[part])
    return [np.pad(a, [(0, length - len(a))] + [(0, 0)] * (a.ndim - 1)) for a in arrays]


def assemble(samples, rng, neighbors, noise=0.0):
    """A batch of such samples: graph by noisy coordinates, a random decoding order, padding last in it."""
    X, S, mask, positions, chains = (np.stack(part) for part in zip(*samples, strict=True))
    order = (rng.random(S.shape) + (1 - mask)).argsort(axis=1)
    X = X + noise * rng.standard_normal(X.shape)
    targets = np.where((S < UNKNOWN) & (mask > 0), S, -1)
    batch = dict(X=X.astype(np.float32), S=S, mask=mask, residue_idx=positions, chain=chains,
                 decoding_order=order, targets=targets)
    batch = {key: torch.from_numpy(array) for key, array in batch.items()}
    return batch | dict(E_idx=nearest(batch["X"], batch["mask"], neighbors))


class Designs(HoldsOut):
    """Backbones with sequences: from files, or built in, an endless supply."""
    HELD_OUT = range(16)

    def __init__(self, settings, buckets=()):
        self.config, self.training = settings.model, settings.training
        self.buckets = [b for b in buckets if b < self.config.seq_len] + [self.config.seq_len]
        self.real = bool(self.training.data)
        if self.real:
            with data_errors():
                found = backbones.load_backbones(self.training.data)
            self.held_out = self.choose_held_out([backbone.name for backbone in found])
        else:
            found = [self.made(i) for i in range(2 * len(self.HELD_OUT))]
            self.held_out = {backbone.name for backbone in found[:len(self.HELD_OUT)]}
        self.unseen = [backbone for backbone in found if backbone.name in self.held_out]
        self.trained = [backbone for backbone in found if backbone.name not in self.held_out]
        self.names = [backbone.name for backbone in self.trained] if self.real else []

    def under(self, settings):
        """The same backbones in other settings: neighbours, noise, batch size."""
        other = copy.copy(self)
        other.config, other.training = settings.model, settings.training
        return other

    def made(self, index):
        return built_in(self.training.seed, index, self.config.seq_len)

    def describe(self):
        if not self.real:
            return (f"built-in backbones, of whose residues {BEST_RECOVERY:.3f} can be known, "
                    f"{len(self.held_out)} held out")
        rows = sum(len(backbone.rows) for backbone in self.trained)
        return (f"{len(self.trained)} real backbones with {rows} sequences, {len(self.held_out)} held out")

    def batch(self, step):
        rng, count = np.random.default_rng((self.training.seed, step, 1)), self.training.batch_size
        if self.real:
            chosen = rng.choice(len(self.trained), count, replace=count > len(self.trained))
            found = [self.trained[i] for i in chosen]
        else:
            first = 2 * len(self.HELD_OUT) + step * count
            found = [self.made(i) for i in range(first, first + count)]
        longest = min(max(map(len, found)), self.config.seq_len)
        length = next(bucket for bucket in self.buckets if bucket >= longest)
        samples = [sample_of(b, b.rows[rng.integers(len(b.rows))], length,
                             int(rng.integers(max(len(b) - length, 0) + 1))) for b in found]
        noise = self.training.backbone_noise if self.real else 0.0
        return assemble(samples, rng, self.config.neighbors, noise)

    def evaluation(self):
        """{"training": ..., "held_out": ...}, each an iterator over (name, batch of one whole protein with
        its own sequence)."""
        def batches(found):
            for b in found:
                rng = np.random.default_rng((self.training.seed, 3))
                yield b.name, assemble([sample_of(b, b.tokens, len(b))], rng, self.config.neighbors)
        return dict(training=batches(self.trained[:SHOWN]), held_out=batches(self.unseen))

    def yardsticks(self):
        """What needs no backbone, on the proteins held out: recovery of the one residue that is commonest in
        training, perplexity of training's frequencies."""
        seen, asked = (np.bincount(np.concatenate([b.tokens for b in found] or [[]]).astype(int),
                                   minlength=UNKNOWN + 1)[:UNKNOWN] for found in (self.trained, self.unseen))
        if not asked.sum():
            return None
        frequencies = (seen + 1) / (seen + 1).sum()
        return dict(constant=LETTERS[seen.argmax()], recovery=float(asked[seen.argmax()] / asked.sum()),
                    perplexity=float(np.exp(-(asked * np.log(frequencies)).sum() / asked.sum())))


def masked_batch(settings, device):
    """Built-in backbones in two chains, the last one with padding, an unknown residue and unasked ones."""
    length = settings.model.seq_len
    source = Designs(settings.having(data=None, holdout=None, holdout_fraction=None))
    samples, rng = [], np.random.default_rng(0)
    for i in range(settings.training.batch_size):
        b = source.made(i)
        b.chains[length // 2:], b.tokens[1] = 1, UNKNOWN
        short = length - (length // 4) * (i + 1 == settings.training.batch_size)
        whole = Backbone(b.name, b.tokens[:short], b.atoms[:short], b.positions[:short], b.chains[:short],
                         None)
        samples.append(sample_of(whole, whole.tokens, length))
    return to_device(assemble(samples, rng, settings.model.neighbors), device)


def defined(output, batch):
    """What padding leaves defined of a model's output; the rest is 0."""
    length = batch["mask"].shape[1]
    return dict(log_probs=output["log_probs"][:, :length] * batch["mask"][:, :, None], loss=output["loss"])


# --- Evaluation -----------------------------------------------------------------------------------------


def evaluate(trainer, source, stop=None, final=False):
    """{"training": {name: dict(recovery, nll, residues)}, "held_out": ..., "yardsticks": ...}: each residue
    predicted from the backbone and the native residues before it in a random order."""
    results = {}
    with evaluating(trainer.model):
        for group, proteins in source.evaluation().items():
            results[group] = {}
            for name, batch in proteins:
                if stop and stop.signal is not None:
                    break
                log_probs = trainer.model(**to_device(batch, trainer.device))["log_probs"].float().cpu()
                results[group][name] = recovery(log_probs, batch["targets"])
    return results | dict(yardsticks=source.yardsticks())


def recovery(log_probs, targets):
    """Of log_probs (B, L, 21) and targets (B, L): the share of residues whose letter is the most probable,
    the mean negative logarithm of its probability, and how many residues were asked for."""
    asked = targets >= 0
    right = (log_probs.argmax(-1) == targets)[asked].float().mean()
    nll = -log_probs[asked].gather(1, targets[asked][:, None]).mean()
    return dict(recovery=right.item(), nll=nll.item(), residues=int(asked.sum()))


def pooled(proteins):
    """(recovery, perplexity, residues) over all residues of evaluated proteins."""
    count = sum(p["residues"] for p in proteins.values())
    share, nll = (sum(p[key] * p["residues"] for p in proteins.values()) / count
                  for key in ("recovery", "nll"))
    return share, math.exp(min(nll, 100.0)), count


def scores(evaluation):
    """{"held-out recovery": ..., ...} of what evaluate() returned."""
    found = {}
    for group in ("training", "held_out"):
        if evaluation[group]:
            words = group.replace("_", "-")
            found[f"{words} recovery"], found[f"{words} perplexity"], _ = pooled(evaluation[group])
    return found


def evaluation_line(evaluation):
    parts = []
    for group in ("training", "held_out"):
        if evaluation[group]:
            share, perplexity, count = pooled(evaluation[group])
            parts.append(f"{group.replace('_', '-')} recovery {share:.3f} perplexity {perplexity:.2f} "
                         f"({counted(len(evaluation[group]), 'protein')}, {count} residues)")
    if yardsticks := evaluation["yardsticks"]:
        parts.append(f"always {yardsticks['constant']}: {yardsticks['recovery']:.3f}, background perplexity "
                     f"{yardsticks['perplexity']:.2f}")
    return "Sequences: " + " | ".join(parts)


def closing(trainer, source, evaluations):
    """What the final evaluation says, in a sentence."""
    final = evaluations.get("final")
    if final and final["held_out"]:
        share, _, count = pooled(final["held_out"])
        yardsticks = final["yardsticks"]
        best = "" if source.real else f", {100 * BEST_RECOVERY:.0f}% could be"
        print(f"In words: after step {trainer.step_number} it names {100 * share:.0f}% of {count} residues "
              f"of {counted(len(final['held_out']), 'protein')} it never saw, by backbone and residues "
              f"before; always {yardsticks['constant']} would be {100 * yardsticks['recovery']:.0f}%{best}.")


# --- Design ---------------------------------------------------------------------------------------------


def load_weights(model, path):
    """Weights from a checkpoint of this program, averaged if it has such, the authors' file or a bare state
    dict. Raises UserError."""
    saved = read_weights(path)
    if isinstance(saved.get("config"), dict):
        refuse_other_sizes(saved["config"], model.config, f"--weights {path}")
    for key in ("model_state_dict", "average", "model"):  # the authors' name; an average wins over its model
        if key in saved:
            saved = saved[key]
            break
    put_weights(model, saved, path)


def design(program, settings):
    """--design: native and sampled sequences as FASTA on stdout; returns the exit code, None without it."""
    training = settings.training
    if training.design is None:
        return None
    device = choose_device(training.device)
    path, chain = files.split_structure_argument(training.design)
    with data_errors():
        b = backbones.read_backbone(path, chain)
        fixed = backbones.fixed_residues(b, training.fixed or "")
    torch.manual_seed(training.seed)
    model = program.model(settings.model, settings.fusion).to(device).eval()
    load_weights(model, training.weights)
    rng = np.random.default_rng((training.seed, 4))
    batch = assemble([sample_of(b, b.tokens, len(b))] * training.samples, rng, settings.model.neighbors)
    order = torch.from_numpy((rng.random(batch["S"].shape) - fixed).argsort(axis=1))  # fixed ones first
    del batch["targets"], batch["E_idx"]
    batch = to_device(batch | dict(decoding_order=order), device)
    with torch.compiler.set_stance("force_eager"):
        generator = torch.Generator(device).manual_seed(training.seed)
        drawn = model.sample(**batch, fixed=torch.from_numpy(fixed).to(device),
                             temperature=training.temperature, generator=generator).cpu()
        log_probs = model(**{**batch, "S": drawn.to(device)})["log_probs"].cpu()
    print(backbones.fasta(f"{b.name} native, {len(b)} residues, {int(fixed.sum())} fixed", b, b.tokens))
    free = torch.from_numpy(~fixed & (b.tokens < UNKNOWN))
    for number, (tokens, found) in enumerate(zip(drawn, log_probs, strict=True), 1):
        same = (tokens == torch.from_numpy(b.tokens))[free].float().mean().item() if free.any() else math.nan
        score = -found.gather(1, tokens[:, None])[~torch.from_numpy(fixed)].mean().item()
        print(backbones.fasta(f"{b.name} sample {number}, T {training.temperature:g}, score {score:.4f}, "
                              f"recovery {same:.3f}", b, tokens.tolist()))
    sys.stdout.flush()
    return 0
