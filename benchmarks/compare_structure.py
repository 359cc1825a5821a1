#!/usr/bin/env python3
"""AlphaFold 2's structure module beside the optimiser of --fold, on families that neither was trained on.

    python benchmarks/compare_structure.py --data DIR [DIR ...] --real-folds FILE --out FILE --seconds 460 \\
        --freeze-trunk -- --use-amp --amp-dtype bfloat16 --enable-ultra --disable-torch-compile

Puts a structure module (proteins/structure_module.py) on a trained trunk and trains both: first on pieces of
real chains with made-up alignments, then on the families, half and half with such pieces. Each batch goes
through the trunk once. The module also learns from what the trunk made of earlier batches (--replays). On a
GPU such an update is one CUDA graph. With --freeze-trunk all updates are such, and there are many more.

Held out are the families that the model's card does not name, or --holdout. The figures of --fold on them
come from a file of measure_folds.py, the same rows of the same alignments. Weights that are evaluated are
averages. Every --eval-every steps the results are written anew, so that a run that is cut off leaves its
curve. Training ends in time for a last evaluation within --seconds, start included. What comes after -- are
flags of the trainer for device, dtype and fusion.
"""
import collections
import contextlib
import math
import pathlib
import statistics
import sys
import tempfile
import time
from dataclasses import replace

BEGUN = time.monotonic()
ROOT = pathlib.Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]
from fusion_lab.training import interrupts

interrupts.quiet(__name__)

import numpy as np
import torch
from real_families import link_families

from fusion_lab.kernels.precision import amp_dtype
from fusion_lab.training import recipe
from fusion_lab.training.cuda_graphs import GraphedStep
from fusion_lab.training.distributed import ALONE
from fusion_lab.training.evaluations import evaluating
from fusion_lab.training.feeding import batches, to_device
from fusion_lab.training.files import FAILED, UserError, exit_code, finite, require_writable, write_json
from fusion_lab.training.flags import Parser, make_parser, parse, whole_number
from fusion_lab.training.flags import seconds as positive
from fusion_lab.training.machine import choose_device, process_settings, system_info
from fusion_lab.training.models import read_model
from fusion_lab.training.reading import read_json
from fusion_lab.training.saved import write_saved
from proteins import files, geometry, prediction
from proteins.batches import NaturalProteins, RealProteins
from proteins.seam import data_errors
from proteins.structure_metrics import compared, lddt, tm_score
from proteins.structure_module import (
    UNIT,
    InFloat32,
    StructureModule,
    expected_lddt,
    fape,
    structure_loss,
)
from tiny_openfold_v2 import PROGRAM

OPTIMISED = ROOT / "benchmarks" / "results" / "folds_cpu_2026-11-25_orientations.json"
MIX = 0.5           # share of batches of real chains with made-up alignments beside those of the families
WARM_UP = 100       # updates of the module
TRUNK_RISE = 0.2    # share of the training in which the trunk's learning rate rises
CLIP = 20.0         # of the gradient's norm: median 2 to 5, most 17 (8 pieces of 64 residues)
KEPT = 1024         # samples of which the trunk's output is kept for replays
GUESS = 8.0         # seconds of an evaluation, before there was one
LAST = 3.0          # times as long as an evaluation: the last one, which has more scores
SAMPLE = ("single", "pair", "present", "backbone", "known")
BROKEN = 2.0        # Å: a longer peptide bond is a break of the chain
SCORES = dict(tm_score="TM-score", lddt_ca="lDDT-CA", gdt_ts="GDT-TS", rmsd="RMSD")


# --- Data: batches as the trainer has them, with N, CA and C --------------------------------------------


class Chains(NaturalProteins):
    """The world `natural` of pieces of real chains alone. Its batches have backbone (B, S, 3, 3) too, NaN
    where there is none. One thread makes them, so that what was drawn last belongs to what is made."""
    REAL = 1.0

    def draw(self, indices):
        msa, self.drawn = super().draw(indices)
        return msa, self.drawn

    def make(self, *given, **how):
        return super().make(*given, **how) | dict(backbone=torch.from_numpy(self.drawn.backbone))


class Families(RealProteins):
    """The families, mixed with Chains."""

    def __init__(self, settings, chains):
        super().__init__(settings)
        self.world = chains

    def assemble(self, rng, samples, clean=False):
        backbone = np.stack([sample[-1] for sample in samples])
        return super().assemble(rng, samples, clean) | dict(backbone=torch.from_numpy(backbone))


def unseen(saved, families, asked):
    """Names of the families that are held out. Raises UserError if the trunk knows one of them."""
    trained = set(saved.card.get("trained_on") or ())
    known = {family.name for family in families}
    names = sorted(known - trained) if asked is None else sorted(asked)
    if missing := [name for name in names if name not in known]:
        raise UserError(f"--holdout {missing[0]}: no such family in --data")
    if seen := [name for name in names if name in trained]:
        raise UserError(f"--holdout {seen[0]}: the model was trained on it")
    if not names or len(names) == len(known):
        raise UserError(f"--data: {len(names)} of {len(known)} families would be held out; name some by "
                        "--holdout")
    return names


# --- Training -------------------------------------------------------------------------------------------


class Run:
    """Trunk, module, optimizer and averaged weights."""

    def __init__(self, a, saved, settings, device):
        torch.manual_seed(a.seed)
        self.a, self.device, self.amp = a, device, amp_dtype(settings.training, device)
        self.trunk = PROGRAM.model(settings.model, settings.fusion)
        self.trunk.load_state_dict(saved.weights)
        self.trunk = self.trunk.to(device).train(not a.freeze_trunk).requires_grad_(not a.freeze_trunk)
        self.module = InFloat32(StructureModule(settings.model.msa_dim, settings.model.pair_dim)).to(device)
        groups = [dict(params=list(self.module.parameters()))]
        groups += [] if a.freeze_trunk else [dict(params=list(self.trunk.parameters()))]
        self.optimizer = torch.optim.AdamW(groups, lr=a.learning_rate, weight_decay=0.0, fused=True)
        self.updated = [weight for group in groups for weight in group["params"]]
        self.average = recipe.average(self.updated, a.ema_decay)
        self.kept, self.rng = collections.deque(maxlen=KEPT), np.random.default_rng(a.seed)
        self.updates, self.progress, self.ends = 0, 0.0, collections.deque()
        self.graphed = self.gradients

    def capture(self, batch):
        """On a GPU the module's gradients by kept samples come from a CUDA graph, made here, before another
        thread uses the GPU. Says which it is."""
        if self.device.type != "cuda":
            return print("No CUDA GPU: every update of the module runs kernel by kernel", flush=True)
        begun = time.monotonic()
        sample = self.kept_form(self.through_trunk(batch)[0])
        try:
            self.graphed = GraphedStep(self.gradients, dict(zip(SAMPLE, sample, strict=True)), self.device)
        except UserError as error:
            if not self.a.freeze_trunk:  # whose dropout needs the random numbers that a lost capture breaks
                raise
            return print(f"No CUDA graph, every update runs kernel by kernel: {error}", flush=True)
        print(f"An update of the module is one CUDA graph, captured in {time.monotonic() - begun:.1f} s",
              flush=True)

    def step(self, batch):
        """One batch through the trunk, then updates of the module by it and by earlier ones; returns
        (structure loss, distogram loss), still on the device."""
        learns = not self.a.freeze_trunk
        with torch.set_grad_enabled(learns):
            sample, out = self.through_trunk(batch)
        kept = self.kept_form(sample)
        if learns:
            self.no_gradients()
            loss = self.loss(*sample)
            (loss + out["loss"]).backward()
            self.update()
            loss = loss.detach()
        else:
            loss = self.replay(kept)
        self.kept.extend(zip(*kept, strict=True))
        for _ in range(self.a.replays):
            chosen = self.rng.choice(len(self.kept), len(kept[0]), replace=False)
            self.replay(map(torch.stack, zip(*(self.kept[i] for i in chosen), strict=True)))
        self.not_far_ahead()
        return torch.stack([loss, out["distogram_loss"].detach().to(loss.dtype)])

    def through_trunk(self, batch):
        """(what the module learns from, in the order of SAMPLE; what the trunk returns)"""
        batch = dict(batch)
        backbone = batch.pop("backbone")
        with torch.autocast(self.device.type, self.amp, self.amp is not None):
            out = self.trunk(**batch)
        known = backbone.isfinite().flatten(2).all(-1).float()  # (B, S)
        present = batch.get("seq_mask", torch.ones_like(known))
        return (out["msa_repr"][:, 0], out["pair_repr"], present, backbone.nan_to_num(), known), out

    def kept_form(self, sample):
        single, pair, *rest = (x.detach() for x in sample)
        kept = self.amp or single.dtype
        return single.to(kept), pair.to(kept), *rest

    def loss(self, single, pair, present, backbone, known):
        return structure_loss(*self.module(single, pair, present), backbone, known).mean()

    def no_gradients(self):
        """Those of the module stay where they are, for the graph writes there; the trunk has none, so the
        optimizer passes it over."""
        held = [weight.grad for weight in self.module.parameters() if weight.grad is not None]
        if held:
            torch._foreach_zero_(held)
        self.trunk.zero_grad(set_to_none=True)

    def gradients(self, inputs):
        """The module's gradients and the loss; a graph can hold it, since nothing of it waits for the GPU."""
        self.no_gradients()
        loss = self.loss(**inputs)
        loss.backward()
        return loss.detach()

    def replay(self, sample):
        """An update of the module alone; returns the loss."""
        self.trunk.zero_grad(set_to_none=True)
        loss = self.graphed(dict(zip(SAMPLE, sample, strict=True)))
        self.update()
        return loss

    def update(self):
        torch.nn.utils.clip_grad_norm_(self.updated, CLIP)
        fade = 0.5 * (1 + math.cos(math.pi * min(self.progress, 1.0)))
        rates = (self.a.learning_rate * min((self.updates + 1) / WARM_UP, 1.0),
                 self.a.trunk_rate * min(self.progress / TRUNK_RISE, 1.0))
        for group, rate in zip(self.optimizer.param_groups, rates, strict=False):  # a frozen trunk has none
            group["lr"] = fade * rate
        self.optimizer.step()
        self.updates += 1
        if self.average:
            self.average.update()

    def not_far_ahead(self):
        """Wait until the GPU is at most two steps behind, or the clock would not know where it is."""
        if self.device.type == "cuda":
            self.ends.append(torch.cuda.Event())
            self.ends[-1].record()
            if len(self.ends) > 2:
                self.ends.popleft().synchronize()

    @contextlib.contextmanager
    def evaluating(self):
        """Within, averaged weights, no dropout, no gradients."""
        averaged = self.average.swapped_in(lambda: None, ALONE) if self.average else contextlib.nullcontext()
        with averaged, evaluating(self.trunk):
            yield


class Clock:
    """How far the training is, by steps or by seconds, and when it must end for a last evaluation."""

    def __init__(self, steps, seconds):
        self.steps, self.seconds, self.begun, self.evaluation = steps, seconds, time.monotonic(), GUESS

    def progress(self, step):
        """From 0 to 1."""
        done = step / self.steps if self.steps else 0.0
        if self.seconds is None:
            return done
        end = BEGUN + self.seconds - LAST * self.evaluation
        return max(done, (time.monotonic() - self.begun) / max(end - self.begun, 1e-3))


def train(run, sources, clock, evaluate):
    """Steps on one source after the other, each until its share of the training is over; evaluate(step,
    losses) now and then, and at the end."""
    step, losses = 0, []
    for source, until in sources:
        with contextlib.closing(batches(source, range(step, sys.maxsize), run.device)) as supply:
            while (progress := clock.progress(step)) < until:
                run.progress = progress
                losses.append(run.step(next(supply)))
                step += 1
                if step % run.a.eval_every == 0 and clock.progress(step) < 1:
                    losses = evaluate(step, losses)
    evaluate(step, losses, last=True)


# --- Evaluation -----------------------------------------------------------------------------------------


def judged(family, frame, logits, model_seconds, last):
    """How near one backbone, the frames of one sample on the CPU, is to the structure; scores that take long
    are for the last evaluation."""
    atoms = geometry.backbone(*(x[0] for x in frame))  # (L, 5, 3)
    true = family.backbone[:, :3].astype(float)
    known = np.isfinite(true).all((1, 2))
    model, goal = atoms[:, geometry.CA].double().numpy(), true[:, geometry.CA]
    bonds = (atoms[:-1, geometry.C] - atoms[1:, geometry.N]).norm(dim=-1)
    targets = torch.from_numpy(np.nan_to_num(true)).float()[None]  # (1, L, 3, 3)
    error = fape(frame, geometry.frames_of(*targets.unbind(2)), atoms[None, :, :3], targets,
                 torch.from_numpy(known).float()[None])
    seen = np.isfinite(goal).all(1)
    found = dict(residues=family.length, rows=len(family.msa), fape=UNIT * error.item(),
                 expected_lddt=expected_lddt(logits).mean().item(),
                 broken_bonds=(bonds > BROKEN).float().mean().item(), seconds=model_seconds)
    if not last:
        return found | dict(tm_score=tm_score(model[seen], goal[seen]),
                            lddt_ca=float(np.nanmean(lddt(model[seen], goal[seen]))))
    scores, mirrored = compared(model, goal), tm_score(model[seen] * [1, 1, -1], goal[seen])
    return found | scores | dict(mirrored_tm_score=mirrored, right_hand=scores["tm_score"] >= mirrored)


def evaluation(run, families, last):
    """{family: figures} of {family: (files.Protein, batch of one)}."""
    found = {}
    with run.evaluating():
        for name, (family, batch) in families.items():
            begun = time.monotonic()
            out = run.trunk(**to_device(batch, run.device))
            single = out["msa_repr"][:, 0]
            frames, logits = run.module(single, out["pair_repr"], torch.ones_like(single[..., 0]))
            frame, logits = [x[-1].cpu() for x in frames], logits[0].cpu()
            found[name] = judged(family, frame, logits, time.monotonic() - begun, last)
    return found


def summary(rows):
    """Medians and shares of [figures] of families."""
    medians = {f"median_{key}": statistics.median(row[key] for row in rows) for key in SCORES
               if key in rows[0]}
    hands = [row["right_hand"] for row in rows if "right_hand" in row]
    return dict(families=len(rows), **medians, above_half=statistics.fmean(
        row["tm_score"] > 0.5 for row in rows), right_hand=statistics.fmean(hands) if hands else None)


def print_table(found, optimised):
    """Families, (a) the structure module, (b) the optimiser of --fold."""
    print(f"{'':12}{'residues':>9}{'rows':>7}" + "".join(f"{title:>16}" for title in SCORES.values())
          + f"{'right hand':>16}\n{'':28}" + f"{'(a)':>10}{'(b)':>6}" * (len(SCORES) + 1))
    for name in sorted(found, key=lambda name: -found[name]["tm_score"]):
        pair = found[name], optimised.get(name)
        cells = "".join(f"{pair[0][key]:10.2f}" + (f"{pair[1][key]:6.2f}" if pair[1] else f"{'-':>6}")
                        for key in SCORES)
        hands = [("yes" if row["right_hand"] else "no") if row else "-" for row in pair]
        print(f"{name:12}{pair[0]['residues']:9d}{pair[0]['rows']:7d}{cells}{hands[0]:>10}{hands[1]:>6}")
    both = [(found[name], optimised[name]) for name in found if name in optimised]
    for title, rows in zip("ab", zip(*both, strict=True), strict=False):
        total = summary(rows)
        print(f"({title}) " + ", ".join(f"{key.replace('_', ' ')} {value:.3f}" if key != "families" else
                                        f"{value} families" for key, value in total.items()))


# --- The command line -----------------------------------------------------------------------------------


def arguments(argv):
    def rate(text):
        value = float(text)
        if not 0 <= value < 1:
            raise ValueError
        return value
    parser = Parser(prog="compare_structure.py", description=__doc__)
    parser.add_argument("--data", type=pathlib.Path, nargs="+", required=True, help="directories of families")
    parser.add_argument("--real-folds", required=True, metavar="FILE",
                        help="NPZ of real chains (docs/learning.md)")
    parser.add_argument("--out", required=True, metavar="FILE", help="JSON file of results")
    parser.add_argument("--model", default=prediction.MODELS["--fold"], metavar="FILE",
                        help="the trunk: a model file or a checkpoint (default: the model of --fold)")
    parser.add_argument("--holdout", nargs="+", metavar="NAME",
                        help="families (default: all that the model was not trained on)")
    parser.add_argument("--folds", default=OPTIMISED, metavar="FILE", help="what measure_folds.py wrote of "
                        f"the optimiser (default: {OPTIMISED.name})")
    parser.add_argument("--seconds", type=positive, help="end by then, start included")
    parser.add_argument("--steps", type=whole_number(), help="end after so many batches")
    parser.add_argument("--eval-every", type=whole_number(), default=250, help="steps (default: 250)")
    parser.add_argument("--families-from", type=rate, default=0.6, metavar="SHARE",
                        help="of the training; before, real chains with made-up alignments (default: 0.6)")
    parser.add_argument("--replays", type=whole_number(0), default=12, help="updates of the module by "
                        "earlier batches for each new one (default: 12)")
    parser.add_argument("--freeze-trunk", action="store_true", help="train the module alone")
    parser.add_argument("--learning-rate", type=rate, default=2e-3, help="of the module (default: 2e-3)")
    parser.add_argument("--trunk-rate", type=rate, default=1e-4, help="of the trunk (default: 1e-4)")
    parser.add_argument("--ema-decay", type=rate, default=0.999, help="of averaged weights (default: 0.999)")
    parser.add_argument("--dropout", type=rate, default=0.1, help="of a trunk that learns (default: 0.1)")
    parser.add_argument("--batch-size", type=whole_number(), default=8, help="(default: 8)")
    parser.add_argument("--crop", type=whole_number(8), default=128, help="residues (default: 128)")
    parser.add_argument("--rows", type=whole_number(), default=128, help="of an alignment (default: 128)")
    parser.add_argument("--eval-rows", type=whole_number(), default=prediction.ROWS,
                        help=f"in evaluations (default: {prediction.ROWS}, as --fold)")
    parser.add_argument("--seen", type=whole_number(0), default=5,
                        help="families of the training that are evaluated, too (default: 5)")
    parser.add_argument("--seed", type=int, default=1, help="(default: 1)")
    parser.add_argument("--save", metavar="FILE", help="write the averaged weights at the end (default: no)")
    parser.add_argument("trainer", nargs="*", help="flags of the trainer, after --")
    a = parser.parse_args(argv)
    if a.seconds is None and a.steps is None:
        parser.error("one of the arguments --seconds and --steps is required")
    return a


def settings_of(a, saved):
    """Settings of a run on real chains, by the trainer's flags. Raises UserError."""
    _, given, _ = parse(make_parser(PROGRAM), PROGRAM, a.trainer)
    if not saved.config.orientations:
        raise UserError(f"--model {a.model}: made without --orientations; its data have no backbones")
    if given.training.use_amp and given.training.amp_dtype != "bfloat16":
        raise UserError("--use-amp: needs --amp-dtype bfloat16 here, which no gradient scaler has to watch")
    config = replace(saved.config, num_seqs=a.rows, seq_len=a.crop, dropout=a.dropout)
    return replace(given, model=config).having(synthetic_world="natural", real_folds=a.real_folds,
                                               batch_size=a.batch_size, seed=a.seed)


def main(argv=None):
    a = arguments(argv)
    require_writable(a.out)
    require_writable(a.save)
    saved, optimised = read_model(a.model, PROGRAM), read_json(a.folds)["families"]
    settings = settings_of(a, saved)
    device = choose_device(settings.training.device)
    process_settings(settings, device)
    with tempfile.TemporaryDirectory() as directory, data_errors():
        directory = pathlib.Path(directory)
        link_families(a.data, directory)
        every = {family.name: family for family in files.load_families(directory)}
        held_out = unseen(saved, every.values(), a.holdout)
        chains = Chains(settings)
        families = Families(settings.having(data=str(directory), holdout=",".join(held_out),
                                            mix_synthetic=MIX), chains)
    order = np.random.default_rng(0).permutation(len(families.families))[:a.seen]
    groups = dict(held_out=[every[name] for name in held_out],
                  seen=[families.families[i] for i in order])
    inputs = {group: {family.name: (family, prediction.model_input(family, saved.config, a.eval_rows, 42))
                      for family in members} for group, members in groups.items()}
    run, clock = Run(a, saved, settings, device), Clock(a.steps, a.seconds)
    weights = dict(module=sum(w.numel() for w in run.module.parameters()),
                   trunk=sum(w.numel() for w in run.trunk.parameters()))
    print(f"Structure module of {weights['module']:,} weights on a trunk of {weights['trunk']:,}\n"
          f"{chains.describe()}\n{families.describe()}", flush=True)
    run.capture(to_device(families.masked(chains.batch(0)), device))
    result = dict(command=sys.argv, options=finite({k: str(v) for k, v in vars(a).items()}),
                  model_card={k: v for k, v in saved.card.items() if k not in ("sequences", "trained_on")},
                  system_info=system_info(device), date=time.strftime("%Y-%m-%d"), weights=weights,
                  held_out=held_out, start_seconds=time.monotonic() - BEGUN, evaluations=[])

    def evaluate(step, losses, last=False):
        begun = time.monotonic()
        structure, distogram = torch.stack(losses).mean(0).tolist() if losses else (math.nan, math.nan)
        if losses and not math.isfinite(structure + distogram):
            raise UserError(f"step {step}: the loss is {structure}, {distogram}", code=FAILED)
        found = {group: evaluation(run, members, last) for group, members in inputs.items() if members}
        clock.evaluation = time.monotonic() - begun
        memory = torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None
        totals = {group: summary(list(rows.values())) for group, rows in found.items()}
        result["evaluations"].append(finite(dict(
            step=step, updates=run.updates, seconds=begun - clock.begun, seconds_of_it=clock.evaluation,
            structure_loss=structure, distogram_loss=distogram, peak_bytes=memory, summary=totals, **found)))
        write_json(a.out, result)
        print(f"step {step}, {begun - clock.begun:.0f} s, structure loss {structure:.3f}, distogram "
              f"{distogram:.3f}; " + "; ".join(
                  f"{group.replace('_', ' ')} TM {total['median_tm_score']:.3f} lDDT "
                  f"{total['median_lddt_ca']:.3f}" for group, total in totals.items())
              + f" ({clock.evaluation:.1f} s)", flush=True)
        return []

    train(run, ((chains, a.families_from), (families, 1.0)), clock, evaluate)
    last = result["evaluations"][-1]
    print_table(last["held_out"], optimised)
    if a.save:
        with run.evaluating():
            write_saved(a.save, {name: {key: weight.cpu() for key, weight in part.state_dict().items()}
                                 for name, part in (("module", run.module), ("trunk", run.trunk))})
    return 0


if __name__ == "__main__":
    sys.exit(exit_code(main, None, "compare_structure.py"))
