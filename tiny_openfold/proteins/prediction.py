"""Contacts and distances of an alignment by a trained model: the mode --contacts (docs/contacts.md)."""
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
from tiny_openfold.proteins import files, maps
from tiny_openfold.proteins.batches import MOST_EXTRA, assemble
from tiny_openfold.proteins.coevolution import FEATURES, mean_field_dca
from tiny_openfold.proteins.contacts import (
    CONTACT_DISTANCE,
    LONG_RANGE,
    SEPARATION,
    contact_map,
    contact_precision,
    half_length,
    ranked_pairs,
)
from tiny_openfold.proteins.coordinates import require_coordinates
from tiny_openfold.proteins.orientations import BINS
from tiny_openfold.proteins.relatives import Depth, relative, require_protein
from tiny_openfold.proteins.yardsticks import some_rows

MODEL = os.path.join(ROOT, "tiny_openfold", "models", "families.pt")  # what is used without --resume
ROWS = 512                # of the alignment, without --eval-seqs
YARDSTICK_ROWS = 4000     # of mean-field DCA, since statistics need more of them
LONGEST_FOR_DCA = 400     # residues: 2 GB and half a minute
SEPARATIONS = (SEPARATION, LONG_RANGE)  # residues apart at least, in tables of precision
SHOWN = 10                # pairs on the screen
CPU_HOLES = 1.7           # memory taken on a CPU for each byte of tensors: what is freed is kept, in pieces
GIGABYTE = 2 ** 30
OUTPUTS = ("contact_probability", "distances", "distogram_logits", *BINS)  # of the model, if it has them
SUFFIXES = (".rr", ".tsv", ".npz", ".pdb", ".html", ".png", ".json")  # of the files of all modes
HEADLINE = ("mode", "name", "effective_rows", "plddt", "precision", "scores", "files")


@dataclass
class Prediction:
    """What is known of one protein after the model has run; L residues, tensors on the CPU."""
    protein: files.Protein  # its coordinates are NaN where there is no structure
    stem: str               # path of its files without a suffix
    output: dict            # {name of OUTPUTS: tensor (L, L) or (L, L, bins)}

    @property
    def probability(self):
        return self.output["contact_probability"]

    @property
    def coords(self):
        """(coordinates (L, 3), 0 where there are none; coord_mask (L,))"""
        seen = np.isfinite(self.protein.coords).all(axis=1)
        return torch.from_numpy(np.nan_to_num(self.protein.coords)), torch.from_numpy(seen).float()

    def table(self):
        """The maps.ContactMap that pictures and tables are made of."""
        return contact_map(self.protein.name, self.protein, torch.from_numpy(self.protein.msa[0]),
                           (self.probability, self.output["distances"], *self.coords))

    def best(self):
        """[(i, j, probability, distance)], positions from 1, of all pairs SEPARATION apart, best first."""
        i, j = ranked_pairs(self.probability, torch.ones(self.protein.length))
        return list(zip((i + 1).tolist(), (j + 1).tolist(), self.probability[i, j].tolist(),
                        self.output["distances"][i, j].tolist(), strict=True))


def contacts(program, settings):
    """The mode --contacts: predict, say what is found, write the files; returns the exit code. Raises
    UserError."""
    found, result = predict(program, settings, "--contacts", settings.training.contacts)
    print_best(found)
    if found.coords[1].any():
        result["precision"] = precisions(found)
        print_precisions(found, result["precision"])
    table = found.table()
    writers = {".npz": partial(write_arrays, found=found), ".tsv": partial(maps.write_table, m=table),
               ".rr": partial(write_rr, found=found, result=result)}
    return finish(settings, found.stem, result, writers, partial(maps.write_picture, m=table))


def predict(program, settings, mode, alignment):
    """(Prediction, what its JSON says so far) for a mode and the alignment that it was given. Raises
    UserError."""
    training, mode = settings.training, mode[2:]
    device = choose_device(training.device)
    process_settings(settings, device)
    if training.resume is None and not os.path.exists(MODEL):
        raise UserError(f"--{mode}: there is no {MODEL}; name a model file or a checkpoint by --resume")
    protein, path = read_protein(training, alignment), training.resume or MODEL
    saved = read_model(path, program)
    directory = training.output or mode
    outputs.claim(directory, resumed=True)  # beside other predictions
    batch = model_input(protein, saved.config, training.eval_seqs or ROWS, training.seed)
    rows, dtype = batch["msa_tokens"].shape[1], amp_dtype(training, device)
    print(f"{mode.capitalize()} of {printable(protein.name)}: {protein.length} residues, {rows} of "
          f"{counted(len(protein.msa), 'row')}, by {printable(path)} "
          f"({sum(w.numel() for w in saved.weights.values()):,} parameters)")
    config = replace(saved.config, num_seqs=rows, seq_len=protein.length)
    forewarn(config, device, dtype)
    depth, kin = judge(protein, batch, saved.card)
    output = run_model(program, saved.weights, config, batch, device, dtype)
    result = dict(
        mode=mode, name=protein.name, residues=protein.length, rows=len(protein.msa), rows_used=rows,
        extra_rows_used=batch["extra_msa"].shape[1] if "extra_msa" in batch else 0,
        effective_rows=depth.effective, coverage=depth.coverage, untested=depth.untested,
        trained_on=kin["trained"], relative=kin, model=path, model_config=asdict(config),
        card={key: value for key, value in saved.card.items() if key != "sequences"})
    return Prediction(protein, os.path.join(directory, protein.name), output), result


def judge(protein, batch, card):
    """(Depth of the rows that the model reads, what its card knows of relatives); both are said. Raises
    UserError."""
    depth = Depth.of(batch["extra_msa" if "extra_msa" in batch else "msa_tokens"][0].numpy())
    print(f"Alignment: {depth}")
    if depth.untested:
        print(f"warning: {depth.untested}: the map may be wrong throughout, however high its probabilities",
              file=sys.stderr)
    kin = relative(protein.msa, protein.name, card)
    if kin["trained"]:
        which = ("a family of this name" if kin["e_value"] is None else
                 f"a relative, {printable(kin['name'])} (E-value {kin['e_value']:.0e})")
        print(f"The model was trained on {which}: how good it is here says nothing of other families")
    return depth, kin


def read_protein(training, alignment):
    """The files.Protein of an alignment and what other flags name. Raises UserError."""
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
    the seed as in the trainer's evaluation. The one place that makes it for --contacts and --fold."""
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
def run_model(program, weights, config, batch, device, dtype):
    """{name of OUTPUTS: (L, L) or (L, L, bins)}, float32 on the CPU. Raises UserError where they are not
    finite."""
    model = program.model(config, program.fusion_config())
    model.load_state_dict(weights)
    model = model.to(device).eval()
    with torch.autocast(device.type, dtype, dtype is not None):
        output = model(**to_device(batch, device))
    found = {name: output[name][0].float().cpu() for name in OUTPUTS if name in output}
    if not all(values.isfinite().all() for values in found.values()):
        raise UserError("the model's predictions are not finite: nothing is written"
                        + ("; leave out --use-amp" if dtype else ""), code=outputs.FAILED)
    return found


# --- Files ----------------------------------------------------------------------------------------------


def finish(settings, stem, result, writers, draw):
    """Write the files of a prediction: {suffix: write(path)}, the picture by draw(path), and last its result,
    which names them; returns the exit code. What an earlier one left under this name is set aside first."""
    for suffix in SUFFIXES:
        outputs.set_aside(stem + suffix)
    for suffix, write in writers.items():
        write(stem + suffix)
    result["files"] = [stem + suffix for suffix in writers]
    if find_spec("matplotlib") is None:
        print("No picture is drawn: that needs pip install matplotlib")
    else:
        with spared(f"picture {stem}.png"):
            draw(f"{stem}.png")
            result["files"].append(f"{stem}.png")
    result = outputs.finite(result)
    outputs.write_json(f"{stem}.json", result)
    print(f"Written: {', '.join(map(printable, [*result['files'], f'{stem}.json']))}")
    print_result({key: result[key] for key in HEADLINE if key in result}, f"{stem}.json", settings)
    return 0


def write_arrays(path, found):
    """For numpy.load: probability and distances (L, L), sequence, numbers (L,), name."""
    protein = found.protein
    outputs.write_atomically(path, lambda file: np.savez_compressed(
        file, probability=found.probability.numpy(), distances=found.output["distances"].numpy(),
        sequence=protein.sequence, numbers=np.array(protein.numbers, str), name=protein.name))


def write_rr(path, found, result):
    """CASP's format RR: positions i < j from 1, the bounds of the distance in Å, probability; best first."""
    name, sequence = found.protein.name.encode("ascii", "replace").decode(), found.protein.sequence
    extra = result["extra_rows_used"]
    lines = ["PFRMAT RR", f"TARGET {'_'.join(printable(name).split()) or 'unknown'}", "AUTHOR TinyOpenFold",
             f"METHOD Evoformer, {result['rows_used']} rows of the alignment"
             + (f", couplings of {extra}" if extra else ""), "MODEL 1",
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
    mask = found.coords[1]
    print(f"Precision against chain {found.protein.chain or '(no name)'}, {int(mask.sum())} residues with "
          f"coordinates, L/2 = {half_length(mask)}:")
    print(" " * 18 + "".join(f"{f'|i-j| >= {separation}':>16}" for separation in SEPARATIONS))
    print(" " * 18 + "  P(L/2)    P(L)" * len(SEPARATIONS))
    chance = {key: dict(p_l2=of["chance"], p_l=of["chance"]) for key, of in methods["model"].items()}
    for method, by_separation in (methods | dict(chance=chance)).items():
        values = [of[key] for of in by_separation.values() for key in ("p_l2", "p_l")]
        print(f"  {method:<16}" + "".join(f"{value:8.3f}" for value in values))
    if len(methods) == 1:
        print(f"  Mean-field DCA is left out above {LONGEST_FOR_DCA} residues")
