"""Contacts and distances of an alignment by a trained model: the mode --contacts (docs/contacts.md)."""
import math
import os
import sys
from dataclasses import asdict, dataclass, replace
from functools import partial
from importlib.util import find_spec

import numpy as np
import torch

from fusion_lab.kernels.precision import amp_dtype
from fusion_lab.measuring.plotting import spared
from fusion_lab.training import files as outputs
from fusion_lab.training.feeding import to_device
from fusion_lab.training.files import UserError, counted, printable
from fusion_lab.training.machine import choose_device, free_memory, process_settings
from fusion_lab.training.models import read_model
from fusion_lab.training.program import ROOT
from fusion_lab.training.reporting import print_result
from fusion_lab.training.stops import leaving
from proteins import files, maps
from proteins.batches import MOST_EXTRA, assemble
from proteins.coevolution import FEATURES, mean_field_dca
from proteins.contacts import (
    CONTACT_DISTANCE,
    LONG_RANGE,
    SEPARATION,
    contact_map,
    contact_precision,
    half_length,
    ranked_pairs,
)
from proteins.coordinates import require_coordinates
from proteins.orientations import BINS
from proteins.relatives import Depth, relative, require_protein
from proteins.seam import data_errors
from proteins.yardsticks import some_rows

MODEL = os.path.join(ROOT, "models", "families.pt")  # what is used without --resume
ROWS = 512                # of the alignment, without --eval-seqs
PREDICTED = {"--contacts": ("contact_probability", "distances"),  # of the model's output, by mode
             "--fold": ("contact_probability", "distances", "distogram_logits")}
YARDSTICK_ROWS = 4000     # of mean-field DCA, since statistics need more of them
LONGEST_FOR_DCA = 400     # residues: 2 GB and half a minute
SEPARATIONS = (SEPARATION, LONG_RANGE)  # residues apart at least, in tables of precision
SHOWN = 10                # pairs on the screen
CPU_HOLES = 1.7           # memory taken on a CPU for each byte of tensors: what is freed is kept, in pieces
GIGABYTE = 2 ** 30


@dataclass
class Prediction:
    """What is known of one protein after the model has run; L residues, tensors on the CPU."""
    protein: files.Protein      # its coordinates are NaN where there is no structure
    model: str                  # the file
    rows: int                   # of the alignment, in the model's MSA representation
    extra: int                  # and in its coevolution features; 0 without them
    relative: dict              # what the model's card knows of relatives, see relatives.py
    probability: torch.Tensor   # (L, L) of a contact
    distances: torch.Tensor     # (L, L) Å
    logits: torch.Tensor | None = None  # (L, L, bins) of the distogram, for --fold
    orientations: dict | None = None  # {name: logits (L, L, bins)} as in orientations.py

    @property
    def coords(self):
        """(coordinates (L, 3), 0 where there are none; coord_mask (L,))"""
        seen = np.isfinite(self.protein.coords).all(axis=1)
        return torch.from_numpy(np.nan_to_num(self.protein.coords)), torch.from_numpy(seen).float()

    def table(self):
        """The maps.ContactMap that pictures and tables are made of."""
        return contact_map(self.protein.name, self.protein, torch.from_numpy(self.protein.msa[0]),
                           (self.probability, self.distances, *self.coords))

    def best(self):
        """[(i, j, probability, distance)], positions from 1, of all pairs SEPARATION apart, best first."""
        i, j = ranked_pairs(self.probability, torch.ones(self.protein.length))
        return list(zip((i + 1).tolist(), (j + 1).tolist(), self.probability[i, j].tolist(),
                        self.distances[i, j].tolist(), strict=True))


def contacts(program, settings):
    """The mode --contacts: predict, write the files, say what is in them; returns the exit code. Raises
    UserError."""
    found, stem, about = predict(program, settings, "--contacts", settings.training.contacts)
    table = found.table()
    result = dict(mode="contacts", **about, files=write_files(stem, found, table))
    print_best(found)
    if found.coords[1].any():
        result["precision"] = leaving(partial(precisions, found))
        print_precisions(found, result["precision"])
    finish(stem, result, partial(draw, stem, table))
    headline = {key: result[key] for key in ("mode", "name", "effective_rows", "precision", "files")
                if key in result}
    print_result(outputs.finite(headline), f"{stem}.json", settings)
    return 0


def predict(program, settings, mode, alignment):
    """(Prediction, path of its files without a suffix, what a result says of it) for a mode and the alignment
    that it was given. Raises UserError."""
    training, subject = settings.training, mode[2:].capitalize()
    device = choose_device(training.device)
    process_settings(settings, device)
    if training.resume is None and not os.path.exists(MODEL):
        raise UserError(f"{mode}: there is no {MODEL}; name a model file or a checkpoint by --resume")
    protein, path = read_protein(training, alignment), training.resume or MODEL
    saved = read_model(path, program)
    directory = training.output or mode[2:]
    outputs.require_directory(directory)
    batch = model_input(protein, saved.config, training.eval_seqs or ROWS, training.seed)
    rows, dtype = batch["msa_tokens"].shape[1], amp_dtype(training, device)
    print(f"{subject} of {printable(protein.name)}: {protein.length} residues, {rows} of "
          f"{counted(len(protein.msa), 'row')}, by {printable(path)} "
          f"({sum(w.numel() for w in saved.weights.values()):,} parameters)")
    config = replace(saved.config, num_seqs=rows, seq_len=protein.length)
    forewarn(config, device, dtype)
    depth, kin = leaving(partial(judge, protein, batch, saved.card))
    extra = batch["extra_msa"].shape[1] if "extra_msa" in batch else 0
    found = Prediction(protein, path, rows, extra, kin, *leaving(partial(
        run_model, program, saved.weights, config, batch, device, dtype, mode)))
    stem = os.path.join(directory, protein.name)
    return found, stem, dict(
        name=protein.name, residues=protein.length, rows=len(protein.msa), rows_used=rows,
        extra_rows_used=extra, effective_rows=depth.effective, coverage=depth.coverage,
        untested=depth.untested, trained_on=kin["trained"], relative=kin, model=path,
        model_config=asdict(config), card={key: value for key, value in saved.card.items()
                                           if key != "sequences"})


def judge(protein, batch, card):
    """(Depth of the rows that the model reads, what its card knows of relatives); both are said. Raises
    UserError."""
    depth = Depth.of(batch["extra_msa" if "extra_msa" in batch else "msa_tokens"][0].numpy())
    print(f"Alignment: {depth}")
    if depth.untested:
        print(f"warning: {depth.untested}: the map may be wrong throughout, however high its probabilities",
              file=sys.stderr)
    with data_errors():
        kin = relative(protein.msa, protein.name, card)
    if kin["trained"]:
        print("The model was trained on " + (
            "a family of this name" if kin["e_value"] is None else
            f"a relative, {printable(kin['name'])} (E-value {kin['e_value']:.0e})"))
    return depth, kin


def read_protein(training, alignment):
    """The files.Protein of an alignment and what other flags name. Raises UserError."""
    with data_errors():
        if training.structure is None:
            protein = files.load_alignment(alignment, training.query)
            require_protein(protein.msa[0], alignment)
            return protein
        path, chain = files.split_structure_argument(training.structure)
        protein = files.load_protein(alignment, path, chain, training.query)
        require_coordinates([protein], training.min_coordinates)
        return protein


def model_input(protein, config, rows, seed):
    """What a model of this config sees of an alignment, a batch of one: the query and other rows, drawn by
    the seed as in the trainer's evaluation. The one place that makes it for --contacts."""
    msa, extra = (some_rows(protein.msa, most, (seed, 3)).astype(np.int64)[None]
                  for most in (rows, MOST_EXTRA))
    return assemble(None, msa, None, None, clean=True, extra=None if config.coevolution == "none" else extra)


# --- The model ------------------------------------------------------------------------------------------


def forewarn(config, device, dtype):
    """Say what memory the forward pass takes. Raises UserError if that is not there."""
    memory, free = needs(config, dtype) * (CPU_HOLES if device.type == "cpu" else 1), free_memory(device)
    if free is not None and memory > free:
        raise UserError(f"{config.seq_len} residues and {config.num_seqs} rows need {memory / GIGABYTE:.1f} "
                        f"GB, {free / GIGABYTE:.1f} GB are free on {device}: lower --eval-seqs")
    print(f"It takes about {memory / GIGABYTE:.1f} GB on {device}", flush=True)


def needs(config, dtype):
    """Bytes of the tensors of a forward pass, about: those of one block's outer product mean, however many
    blocks there are, or the couplings of all pairs while they are computed."""
    residues, pairs = config.seq_len, config.seq_len ** 2
    block = 6 * config.num_seqs * residues * config.msa_dim
    block += pairs * (11 * config.pair_dim + config.outer_product_dim ** 2)
    couplings = 4 * pairs * FEATURES if config.coevolution != "none" else 0
    return max(block * (4 if dtype is None else 2.4) + couplings,  # in low precision sums are float32
               6 * couplings)


@torch.no_grad()
def run_model(program, weights, config, batch, device, dtype, mode="--contacts"):
    """What PREDICTED names for a mode, (L, L) or (L, L, bins) each, float32 on the CPU; then for --fold, if
    the model has them, {name: logits (L, L, bins)} of orientations. Raises UserError where they are not
    finite."""
    model = program.model(config, program.fusion_config())
    model.load_state_dict(weights)
    model = model.to(device).eval()
    with torch.autocast(device.type, dtype, dtype is not None):
        output = model(**to_device(batch, device))
    names = [*PREDICTED[mode], *[name for name in BINS if mode == "--fold" and name in output]]
    found = {name: output[name][0].float().cpu() for name in names}
    if not all(values.isfinite().all() for values in found.values()):
        raise UserError(f"{mode}: the model's predictions are not finite: nothing is written"
                        + ("; leave out --use-amp" if dtype else ""), code=outputs.FAILED)
    turned = {name: found.pop(name) for name in BINS if name in found}
    return (*found.values(), turned) if turned else tuple(found.values())


# --- Files ----------------------------------------------------------------------------------------------


def finish(stem, result, draw):
    """Write the result, then add the picture: whatever is wrong with that, the results are there."""
    outputs.set_aside(f"{stem}.json")
    outputs.write_json(f"{stem}.json", outputs.finite(result))
    if picture := draw():
        result["files"].append(picture)
        outputs.write_json(f"{stem}.json", outputs.finite(result))
    print(f"Written: {', '.join(map(printable, [*result['files'], f'{stem}.json']))}")


def write_files(stem, found, table):
    """Write NPZ, table and list of contacts; returns their names. What is there is renamed."""
    writers = {".npz": partial(write_arrays, found=found), ".tsv": partial(maps.write_table, m=table),
               ".rr": partial(write_rr, found=found)}
    for suffix, write in writers.items():
        outputs.set_aside(stem + suffix)
        write(stem + suffix)
    return [stem + suffix for suffix in writers]


def draw(stem, table, write=maps.write_picture):
    """The picture's name, made by write(path, table); None where it cannot be drawn, which is said."""
    outputs.set_aside(f"{stem}.png")
    if find_spec("matplotlib") is None:
        print("No picture is drawn: that needs pip install matplotlib")
        return None
    with spared(f"picture {stem}.png"):
        write(f"{stem}.png", table)
        return f"{stem}.png"


def write_arrays(path, found):
    """For numpy.load: probability and distances (L, L), sequence, numbers (L,), name."""
    outputs.write_atomically(path, lambda file: np.savez_compressed(
        file, probability=found.probability.numpy(), distances=found.distances.numpy(),
        sequence=found.protein.sequence, numbers=np.array(found.protein.numbers, str),
        name=found.protein.name.encode("utf-8", "replace").decode()))


def write_rr(path, found):
    """CASP's format RR: positions i < j from 1, the bounds of the distance in Å, probability; best first."""
    name, sequence = found.protein.name.encode("ascii", "replace").decode(), found.protein.sequence
    lines = ["PFRMAT RR", f"TARGET {'_'.join(printable(name).split()) or 'unknown'}", "AUTHOR TinyOpenFold",
             f"METHOD Evoformer, {found.rows} rows of the alignment"
             + (f", couplings of {found.extra}" if found.extra else ""), "MODEL 1",
             *(sequence[start:start + 50] for start in range(0, len(sequence), 50)),
             *(f"{i} {j} 0 {CONTACT_DISTANCE:g} {probability:.5f}" for i, j, probability, _ in found.best()),
             "END", ""]
    outputs.write_text(path, "\n".join(lines))


# --- What is printed ------------------------------------------------------------------------------------


def print_best(found):
    sequence, numbers, pairs = found.protein.sequence, found.protein.numbers, found.best()
    if not pairs:
        print(f"No two residues are {SEPARATION} apart")
        return
    print(f"The most probable contacts (CB < {CONTACT_DISTANCE:g} Å, at least {SEPARATION} residues apart):")
    print("  position   residues        probability  distance")
    for i, j, probability, distance in pairs[:SHOWN]:
        residues = " ".join(f"{sequence[k - 1]}{numbers[k - 1] or '-'}" for k in (i, j))
        print(f"  {i:4d} {j:4d}  {residues:<15} {probability:11.3f} {distance:7.1f} Å")


def precisions(found):
    """{method: {separation: contact_precision()}} of the model and of mean-field DCA, which reads up to
    YARDSTICK_ROWS rows."""
    scores, protein = dict(model=found.probability), found.protein
    if protein.length <= LONGEST_FOR_DCA:
        scores["mean-field DCA"] = mean_field_dca(some_rows(protein.msa, YARDSTICK_ROWS))
    return {method: {str(separation): contact_precision(values, *found.coords, separation)
                     for separation in SEPARATIONS} for method, values in scores.items()}


def print_precisions(found, methods):
    def row(name, values):
        print(f"  {name:<16}" + "".join(f"{'n/a':>8}" if math.isnan(x) else f"{x:8.3f}" for x in values))

    mask, protein = found.coords[1], found.protein
    print(f"Precision against chain {protein.chain or '(no name)'}, {int(mask.sum())} residues with "
          f"coordinates, L/2 = {half_length(mask)}:")
    heads = [f"|i-j| >= {separation}" for separation in SEPARATIONS]
    print(f"  {'':<16}{heads[0]:>16}{heads[1]:>16}\n  {'':<16}" + "  P(L/2)    P(L)" * 2)
    for method, by_separation in methods.items():
        row(method, [precision[key] for precision in by_separation.values() for key in ("p_l2", "p_l")])
    row("chance", [precision["chance"] for precision in methods["model"].values() for _ in range(2)])
    beside = f" and the couplings of {found.extra}" if found.extra else ""
    if found.relative["trained"]:
        print("  The model was trained on this family: its precision here says nothing of others")
    dca = (f"DCA {min(len(protein.msa), YARDSTICK_ROWS)}" if "mean-field DCA" in methods
           else f"mean-field DCA is left out above {LONGEST_FOR_DCA} residues")
    print(f"  The model saw {counted(found.rows, 'row')}{beside}, {dca}")
