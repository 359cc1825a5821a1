"""A structure of an alignment by a trained model's distogram: the mode --fold (docs/folding.md)."""
import time
from functools import partial

import torch

from fusion_lab.training import files as outputs
from fusion_lab.training.reporting import print_result
from fusion_lab.training.stops import leaving
from proteins import confidence, fold_energy, fold_pictures, folding, structure_files
from proteins.geometry import CA
from proteins.prediction import draw, finish, predict
from proteins.structure_metrics import compared

SHOWN = dict(tm_score="TM-score", lddt_ca="lDDT-CA", rmsd="RMSD")


def fold(centres, program, settings):
    """The mode --fold: predict, fold, write the files, say what is in them; returns the exit code. centres:
    of the distogram's bins, Å. Raises UserError."""
    started = time.monotonic()
    found, stem, about = predict(program, settings, "--fold", settings.training.fold)
    predicted = time.monotonic()
    print(f"Folding {found.protein.length} residues on the CPU", flush=True)
    *line, calibrated_on = confidence.line_of(about["card"])
    made, plddt = leaving(partial(structure, found, centres, settings.training.seed, line))
    folded = time.monotonic()
    atoms = made.atoms.numpy()
    result = dict(mode="fold", **about, plddt=float(plddt.mean()), plddt_by_residue=plddt.round(2).tolist(),
                  plddt_calibrated_on=calibrated_on, entropy_bits=confidence.entropy(
                      found.logits.softmax(-1)), **quality(made, found.protein.sequence),
                  seconds=dict(model=predicted - started, folding=folded - predicted))
    print_fold(result)
    if found.coords[1].any():
        result["scores"] = leaving(partial(compared, atoms[:, CA], found.protein.backbone[:, CA]))
        print_scores(result["scores"], found)
    table = found.table()
    result["files"] = write_files(stem, found, table, atoms, plddt, result)
    picture = partial(fold_pictures.write_picture, atoms=atoms, plddt=plddt)
    finish(stem, result, partial(draw, stem, table, picture))
    headline = {key: result[key] for key in ("mode", "name", "effective_rows", "plddt", "scores", "files")
                if key in result}
    print_result(outputs.finite(headline), f"{stem}.json", settings)
    return 0


def structure(found, centres, seed, line=(0.0, 1.0)):
    """(folding.Fold, pLDDT (L,) numpy) of a prediction.Prediction."""
    centres = torch.as_tensor(centres, dtype=torch.float32)
    made = folding.folded(found.logits, centres, found.protein.sequence, seed, found.orientations)
    anchors = fold_energy.anchor(made.atoms[None], found.protein.sequence)[0]
    expected = confidence.expected_lddt(found.logits.softmax(-1), centres, anchors)
    return made, confidence.plddt(expected, *line).numpy()


def quality(made, sequence):
    """What of the chain can be checked without knowing the truth."""
    bond = (made.atoms[:-1, 2] - made.atoms[1:, 0]).norm(dim=-1)
    overlap = fold_energy.overlaps(made.atoms[None], fold_energy.near_pairs(made.atoms[None]), sequence)
    return dict(energy=made.energy, energy_terms=made.terms, other_hand=made.gap,
                from_mirror_image=made.mirrored,
                longest_peptide_bond=float(bond.max()) if len(bond) else None,
                worst_overlap=float(overlap.max()) if len(overlap) else 0.0)


# --- Files ----------------------------------------------------------------------------------------------


def write_files(stem, found, table, atoms, plddt, result):
    """Write PDB and page; returns their names. What is there is renamed."""
    remarks = [f"PREDICTED BY TINYOPENFOLD FROM {found.rows} ROWS OF AN ALIGNMENT",
               "B-FACTORS ARE PLDDT, 0 TO 100",
               *["OUTSIDE OF WHAT THE MODEL WAS TESTED ON"] * bool(result["untested"])]
    paths = [f"{stem}.pdb", f"{stem}.html"]
    for path in paths:
        outputs.set_aside(path)
    structure_files.write_pdb(paths[0], found.protein.name, found.protein.sequence, atoms, plddt, remarks)
    fold_pictures.write_page(paths[1], table, atoms, plddt, result)
    return paths


# --- What is printed ------------------------------------------------------------------------------------


def print_fold(result):
    on = result["plddt_calibrated_on"]
    how = f"which was measured on {on}" if on else "if the model's distances are right: not measured"
    print(f"pLDDT {result['plddt']:.0f} of 100: the lDDT-CA to be expected, {how}")
    if result["untested"]:
        print("  For alignments such as this it was not measured: it may be far too high")
    print(f"Energy {result['energy']:.2f} kT a residue; the best fold of the other hand has "
          f"{result['other_hand']:.2f} more")


def print_scores(scores, found):
    if scores is None:
        print("Too few residues with CA atoms to compare")
        return
    print(f"Against chain {found.protein.chain or '(no name)'}, {scores['residues_compared']} residues: "
          + ", ".join(f"{title} {scores[key]:.2f}" for key, title in SHOWN.items()) + " Å")
    if found.relative["trained"]:
        print("  The model was trained on this family: these scores say nothing of others")
