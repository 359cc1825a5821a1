#!/usr/bin/env python3
"""Are the model's probabilities true? Of pairs that it gives 0.7, do 70% touch, and with how few rows?

    python benchmarks/calibration.py --data DIR [DIR ...] --out calibration.json
    python benchmarks/calibration.py --data DIR [DIR ...] --out calibration.json --card

Looks at the families of the directories that the model was not trained on, by its card. For every number of
rows (drawn from the alignment, the query always among them) it prints the precision, and how often pairs of a
probability touch: a pair has 6 or more residues between its ends and coordinates on both. --trained looks at
the families that the model knows instead, which says how much it learned by heart.
"""
import os
import pathlib
import statistics
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
from fusion_lab.training import interrupts

interrupts.quiet(__name__)

import numpy as np
import torch

from fusion_lab.training.files import UserError, exit_code, finite, require_writable, write_json
from fusion_lab.training.flags import Parser, whole_number
from fusion_lab.training.machine import choose_device
from fusion_lab.training.models import read_model, save_model
from fusion_lab.training.reading import read_json
from proteins import files, prediction
from proteins.contacts import CONTACT_DISTANCE, contact_precision, ranked_pairs, true_distances
from proteins.evidence import learned_from
from proteins.yardsticks import sequence_weights, some_rows
from tiny_openfold_v2 import PROGRAM

EDGES = np.array([0, 0.02, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1])
DEPTHS = (1, 10, 30, 100, 300, 10 ** 6)


def looked_at(saved, family, rows, device):
    """What the model says of a family by so many rows of its alignment, and what is true."""
    msa = some_rows(family.msa, rows, (0, 5))
    shallow = files.Protein(family.name, msa, family.coords)
    batch = prediction.model_input(shallow, saved.config, prediction.ROWS, 42)
    probability, _ = prediction.run_model(PROGRAM, saved.weights, saved.config, batch, device, None)
    seen = torch.from_numpy(np.isfinite(family.coords[:, 0]))
    coords = torch.from_numpy(np.nan_to_num(family.coords))
    i, j = ranked_pairs(probability, seen)
    touch = true_distances(coords, seen)[i, j] < CONTACT_DISTANCE
    effective = sequence_weights(some_rows(msa, prediction.MOST_EXTRA)).sum()
    return dict(name=family.name, rows=len(msa), effective_rows=round(float(effective), 1),
                **contact_precision(probability, coords, seen)), probability[i, j].numpy(), touch.numpy()


def reliability(probability, touch):
    """A row for each range of probabilities, and the mean distance between probability and truth (ECE)."""
    place = np.clip(np.digitize(probability, EDGES) - 1, 0, len(EDGES) - 2)
    bins = []
    for number, (low, high) in enumerate(zip(EDGES[:-1], EDGES[1:], strict=True)):
        chosen = place == number
        if chosen.any():
            bins.append(dict(low=low, high=high, pairs=int(chosen.sum()), touch=float(touch[chosen].mean()),
                             said=float(probability[chosen].mean())))
    error = sum(b["pairs"] * abs(b["said"] - b["touch"]) for b in bins) / len(probability)
    return dict(bins=bins, error=error, pairs=len(probability))


def measure(saved, families, arguments):
    """Look at the families with every number of rows, print and write what is found."""
    device, found = choose_device(arguments.device), {}
    for rows in arguments.rows:
        seen, said, touch = zip(*(looked_at(saved, family, rows, device) for family in families), strict=True)
        found[rows] = dict(families=seen, **reliability(np.concatenate(said), np.concatenate(touch)))
        middle = {key: statistics.median(f[key] for f in seen) for key in ("rows", "effective_rows", "p_l2")}
        print(f"{middle['rows']:.0f} rows ({middle['effective_rows']:.0f} effective): P(L/2) "
              f"{middle['p_l2']:.3f}, medians of {len(seen)}; calibration error {found[rows]['error']:.4f}")
        for b in found[rows]["bins"]:
            print(f"  {b['low']:.2f} to {b['high']:.2f} {b['pairs']:7d} pairs, said {b['said']:.3f}, touch "
                  f"{b['touch']:.3f}", flush=True)
        write_json(arguments.out, finite(dict(model=os.path.basename(arguments.model), by_rows=found)))


def complete_card(saved, known, arguments):
    """Write into the model file what was measured with all rows, and the sequences that it learned from."""
    if lacking := set(saved.card["trained_on"]) - {family.name for family in known}:
        raise UserError(f"--data: lacks {min(lacking)}, which the model was trained on")
    measured = list(read_json(arguments.out)["by_rows"].values())
    calibration = {key: measured[-1][key] for key in ("bins", "error", "pairs")}
    by_rows = [{key: statistics.median(f[key] for f in found["families"])
                for key in ("rows", "effective_rows", "p_l2")} for found in measured]
    card = saved.card | dict(sequences=learned_from(known), calibration=dict(
        calibration, families=[f["name"] for f in measured[-1]["families"]], by_rows=by_rows))
    save_model(arguments.model, PROGRAM, saved.weights, saved.config, card)


def main(argv=None):
    parser = Parser(prog="calibration.py", description=__doc__)
    parser.add_argument("--data", type=pathlib.Path, nargs="+", required=True, help="directories of families")
    parser.add_argument("--model", default=prediction.MODEL, help="(default: the shipped one)")
    parser.add_argument("--rows", type=whole_number(), nargs="+", default=DEPTHS,
                        help="(default: 1, 10, 30, 100, 300, all)")
    parser.add_argument("--trained", action="store_true", help="families that the model was trained on")
    parser.add_argument("--card", action="store_true", help="measure nothing: write --out, and the sequences "
                        "that the model was trained on, into its file")
    parser.add_argument("--device", default="auto", help="(default: auto)")
    parser.add_argument("--out", required=True, help="file for results")
    arguments = parser.parse_args(argv)
    saved = read_model(arguments.model, PROGRAM)
    families = {True: [], False: []}  # by whether it was trained on them
    for directory in arguments.data:
        for family in files.load_families(directory):
            families[family.name in (saved.card.get("trained_on") or ())].append(family)
    if arguments.card:
        complete_card(saved, families[True], arguments)
        return 0
    require_writable(arguments.out)
    if not families[arguments.trained]:
        raise UserError("--data: no such family there")
    measure(saved, families[arguments.trained], arguments)
    return 0


if __name__ == "__main__":
    sys.exit(exit_code(main, None, "calibration.py"))
