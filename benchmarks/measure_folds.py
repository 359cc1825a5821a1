#!/usr/bin/env python3
"""How good the folds of --fold are, on families with known structures, and what a pLDDT is worth.

    python benchmarks/measure_folds.py --data DIR [DIR ...] --out folds.json [--only-unseen] [--names NAME
    ...]

For every NAME.a3m beside NAME.pdb: the model's distogram from all rows, the fold, TM-score, lDDT-CA
and RMSD against the structure, the hand, bonds and overlaps. "seen" says whether the model was trained on
the family: those figures say nothing of others. The line from expected to measured lDDT-CA
(proteins/confidence.py) is fitted by least squares to residues of unseen families, and judged with each of
them left out in turn. Families that are in the file already are not folded again: a second call goes on.
"""
import json
import os
import pathlib
import statistics
import sys
import time

ROOT = pathlib.Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
from fusion_lab.training import interrupts

interrupts.quiet(__name__)

import numpy as np
import torch

from fusion_lab.training.files import UserError, exit_code, finite, require_writable, write_json
from fusion_lab.training.flags import Parser
from fusion_lab.training.machine import choose_device
from fusion_lab.training.models import read_model, save_model
from fusion_lab.training.reading import read_json
from proteins import confidence, files, fold_energy, folding, prediction
from proteins.fold_prediction import quality
from proteins.structure_metrics import FEWEST, compared, lddt
from tiny_openfold_v2 import DISTANCE_CENTRES, PROGRAM

SCORES = ("tm_score", "lddt_ca", "rmsd")


def predicted(saved, family, seed, device):
    """(logits of distances, those of orientations or None) of all rows, and the seconds that took."""
    batch = prediction.model_input(family, saved.config, prediction.ROWS, seed)
    given = PROGRAM, saved.weights, saved.config, batch, device, None
    begun = time.monotonic()
    _, _, logits, *more = prediction.run_model(*given, "--fold")
    return logits, more[0] if more else None, time.monotonic() - begun


def judged(family, logits, orientations, model_seconds, seed):
    """What --fold makes of one family, and how near it is."""
    centres, begun = torch.tensor(DISTANCE_CENTRES, dtype=torch.float32), time.monotonic()
    made = folding.folded(logits, centres, family.sequence, seed, orientations)
    seconds = dict(model=model_seconds, folding=time.monotonic() - begun)
    anchors = fold_energy.anchor(made.atoms[None], family.sequence)[0]
    expected = confidence.expected_lddt(logits.softmax(-1), centres, anchors).numpy()
    model, true = made.atoms[:, 1].double().numpy(), family.backbone[:, 1].astype(float)
    known = np.isfinite(true).all(1)
    by_residue = np.full(len(true), np.nan)
    by_residue[known] = lddt(model[known], true[known])
    image = compared(model * [1, 1, -1], true)
    scores = compared(model, true)
    return dict(residues=family.length, rows=len(family.msa), **scores, mirrored_tm_score=image["tm_score"],
                right_hand=scores["tm_score"] >= image["tm_score"], **quality(made, family.sequence),
                seconds=seconds, expected=expected.round(4).tolist(), measured=by_residue.round(4).tolist())


def known_enough(family):
    """Whether there are CA atoms to compare with."""
    return np.isfinite(family.backbone[:, 1, 0]).sum() >= FEWEST


def pairs(families):
    """(expected, measured) lDDT of the residues of families, (R,) each."""
    both = np.array([[x if x is not None else np.nan for x in sum((f[key] for f in families), [])]
                     for key in ("expected", "measured")], float)
    return both[:, np.isfinite(both).all(0)]


def line(families):
    slope, intercept = np.polyfit(*pairs(families), 1)
    return float(intercept), float(slope)


def calibration(unseen):
    """The line through all residues of unseen families, and how far pLDDT is off with each family left
    out."""
    errors, means = [], []
    for left_out in unseen:
        intercept, slope = line([family for family in unseen if family is not left_out])
        expected, true = pairs([left_out])
        found = (intercept + slope * expected).clip(0, 1)
        errors.append(np.abs(found - true).mean())
        means.append(abs(found.mean() - true.mean()))
    intercept, slope = line(unseen)
    expected, true = pairs(unseen)
    return dict(intercept=intercept, slope=slope, families=len(unseen), residues=len(true),
                correlation=float(np.corrcoef(expected, true)[0, 1]),
                mean_error_by_residue=float(np.mean(errors)), mean_error_by_family=float(np.mean(means)))


def write_line(path, found, which):
    """Write the line of a calibration() into a model's file; which: families, in words."""
    saved = read_model(path, PROGRAM)
    line = dict(intercept=found["intercept"], slope=found["slope"],
                measured_on=f"{found['families']} families {which}")
    save_model(path, PROGRAM, saved.weights, saved.config, saved.card | dict(plddt=line))


def summary(families):
    return dict(families=len(families), **{f"median_{key}": statistics.median(f[key] for f in families)
                                           for key in SCORES},
                above_half=float(np.mean([f["tm_score"] > 0.5 for f in families])),
                right_hand=float(np.mean([f["right_hand"] for f in families])))


def main(argv=None):
    parser = Parser(prog="measure_folds.py", description=__doc__)
    parser.add_argument("--data", nargs="+", required=True, metavar="DIR", help="directories of families")
    parser.add_argument("--out", required=True, metavar="FILE", help="JSON file of results")
    parser.add_argument("--model", default=prediction.MODEL, help="(default: the shipped one)")
    parser.add_argument("--only-unseen", action="store_true", help="families that it was not trained on")
    parser.add_argument("--names", nargs="+", metavar="NAME", help="these families alone (default: all)")
    parser.add_argument("--seed", type=int, default=42, help="of rows and starts (default: 42)")
    parser.add_argument("--card", action="store_true", help="write the line of pLDDT into the model's file")
    parser.add_argument("--device", default="auto", help="of the model; folds are made on the CPU (auto)")
    a = parser.parse_args(argv)
    require_writable(a.out)
    saved, device = read_model(a.model, PROGRAM), choose_device(a.device)
    trained = set(saved.card.get("trained_on") or ())
    before = read_json(a.out) if os.path.exists(a.out) else dict(families={})
    for name, value in (("model", os.path.basename(a.model)), ("seed", a.seed)):
        if os.path.basename(str(before.get(name, value))) != str(value):
            raise UserError(f"{a.out}: made with {name} {before[name]}; take another --out")
    known = before["families"]
    result = dict(model=a.model, device=device.type, torch=torch.__version__, date=time.strftime("%Y-%m-%d"),
                  seed=a.seed, families=known)
    for directory in a.data:
        for family in files.load_families(directory):
            name, seen = family.name, family.name in trained
            wanted = not (a.only_unseen and seen) and (not a.names or name in a.names)
            if name in known or not wanted or not known_enough(family):
                continue
            known[name] = dict(set=pathlib.Path(directory).name, seen=seen,
                               **judged(family, *predicted(saved, family, a.seed, device), a.seed))
            print(f"{name:12} {family.length:4d} residues, " + ", ".join(
                f"{key} {known[name][key]:.3f}" for key in SCORES) + (", seen" if seen else ""), flush=True)
            write_json(a.out, finite(result))
    groups = {group: [family for family in known.values() if family["seen"] is (group == "seen")]
              for group in ("unseen", "seen")}
    result["summary"] = {group: summary(found) for group, found in groups.items() if found}
    if len(groups["unseen"]) > 1:
        result["calibration"] = calibration(groups["unseen"])
    write_json(a.out, finite(result))
    if a.card and "calibration" not in result:
        raise UserError("--card: a line needs two families that the model was not trained on")
    if a.card:
        write_line(a.model, result["calibration"], "that the model was not trained on")
    for name in ("summary", "calibration"):
        print(name, json.dumps(finite(result.get(name)), indent=2))
    return 0


if __name__ == "__main__":
    sys.exit(exit_code(main, None, "measure_folds.py"))
