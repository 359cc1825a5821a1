"""A structure of an alignment by a trained model's distogram: the mode --fold (docs/folding.md)."""
import time
from functools import partial

import torch
from tqdm import tqdm

from fusion_lab.training.errors import FAILED, UserError
from fusion_lab.training.words import counted
from tiny_openfold.proteins import confidence, fold_energy, fold_pictures, folding, structure_files
from tiny_openfold.proteins.geometry import CA
from tiny_openfold.proteins.orientations import BINS
from tiny_openfold.proteins.prediction import predict
from tiny_openfold.proteins.relatives import cautions
from tiny_openfold.proteins.structure_metrics import compared

SAME_FOLD = 0.5  # TM-score (Xu and Zhang 2010, doi:10.1093/bioinformatics/btq066)
SHOWN = dict(tm_score="TM-score", lddt_ca="lDDT-CA", rmsd="RMSD")


def fold(program, settings):
    """The mode --fold; returns the exit code. Raises UserError."""
    centres = program.model.DISTANCE_CENTRES
    return predict(program, settings, "fold", partial(fold_one, centres, settings.training.seed))


def fold_one(centres, seed, prediction, result):
    """Fold a Prediction and say how it is; how predict() writes it down. Raises UserError where the fold
    is not finite."""
    started, protein, output = time.monotonic(), prediction.protein, prediction.output
    print(f"Folding {counted(protein.length, 'residue')} on the CPU", flush=True)
    centres, logits = torch.as_tensor(centres, dtype=torch.float32), output["distogram_logits"]
    orientations = {name: output[name] for name in BINS if name in output}
    with tqdm(total=folding.STEPS, unit="step", disable=None, leave=False) as bar:
        made = folding.folded(logits, centres, protein.sequence, seed, orientations or None, bar.update)
    if not made.atoms.isfinite().all():
        raise UserError("the fold is not finite: nothing is written", code=FAILED)
    anchors = fold_energy.anchor(made.atoms[None], protein.sequence)[0]
    expected = confidence.expected_lddt(logits.softmax(-1), centres, anchors)
    *line, calibrated_on = confidence.line_of(result["card"])  # intercept, slope, share where uncertain
    plddt = confidence.plddt(expected, *line, [n - 1 for n in result["low_confidence"]]).numpy()
    atoms = made.atoms.numpy()
    result |= dict(plddt=float(plddt.mean()), plddt_by_residue=plddt.round(2).tolist(),
                   plddt_calibrated_on=calibrated_on, **quality(made, protein.sequence),
                   seconds=dict(result["seconds"], folding=time.monotonic() - started))
    print_fold(result)
    if prediction.known:
        result["scores"] = compared(atoms[:, CA], protein.backbone[:, CA])
        print_scores(result["scores"], protein.chain)
    return writers(prediction, atoms, plddt, result), partial(
        fold_pictures.write_picture, m=prediction, atoms=atoms, plddt=plddt, cautions=cautions(result))


def quality(made, sequence):
    """What of the chain can be checked without knowing the truth."""
    bond = (made.atoms[:-1, 2] - made.atoms[1:, 0]).norm(dim=-1)
    overlap = fold_energy.overlaps(made.atoms[None], fold_energy.near_pairs(made.atoms[None]), sequence)
    return dict(energy=made.energy, energy_terms=made.terms, other_hand=made.gap,
                longest_peptide_bond=float(bond.max()) if len(bond) else None,
                worst_overlap=float(overlap.max()) if len(overlap) else 0.0)


def writers(prediction, atoms, plddt, result):
    """{suffix: write(path)} of the PDB file and the page."""
    rows = counted(result["rows_used"], "row").upper()
    remarks = [f"PREDICTED BY TINYOPENFOLD FROM {rows} OF AN ALIGNMENT",
               "B-FACTORS ARE PLDDT, 0 TO 100",
               *["OUTSIDE OF WHAT THE MODEL WAS TESTED ON"] * bool(result["untested"])]
    protein = prediction.protein
    return {".pdb": partial(structure_files.write_pdb, name=protein.name, sequence=protein.sequence,
                            atoms=atoms, plddt=plddt, remarks=remarks),
            ".html": partial(fold_pictures.write_page, m=prediction, atoms=atoms, plddt=plddt, result=result)}


# --- What is printed ------------------------------------------------------------------------------------


def print_fold(result):
    on = result["plddt_calibrated_on"]
    how = f"which was measured on {on}" if on else "if the model's distances are right: not measured"
    print(f"{fold_pictures.band(result['plddt'])[3]}: pLDDT {result['plddt']:.0f} of 100, the lDDT-CA to be "
          f"expected, {how}")
    if result["untested"]:
        print("  For alignments such as this it was not measured: it may be far too high")
    print(f"Energy {result['energy']:.2f} kT a residue; the best mirror-image fold has "
          f"{result['other_hand']:.2f} more")


def print_scores(scores, chain):
    if scores is None:
        print("Too few residues with CA atoms to compare")
        return
    print(f"Against chain {chain or '(no name)'}, {scores['residues_compared']} residues: "
          + ", ".join(f"{title} {scores[key]:.2f}" for key, title in SHOWN.items()) + " Å")
    alike = scores["tm_score"] > SAME_FOLD
    shape = "probably have the same fold" if alike else "differ in their overall shape"
    print(f"In words: the predicted and the experimental backbone {shape} (TM-score 1 is perfect, above "
          f"{SAME_FOLD} two structures usually have the same fold)")
