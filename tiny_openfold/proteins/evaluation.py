"""Evaluations of a training run: contact precision of whole chains, and maps of held-out proteins."""
import os
import statistics
from importlib.util import find_spec

from tqdm import tqdm

from fusion_lab.measuring.plotting import require_matplotlib, spared
from fusion_lab.training.errors import UserError
from fusion_lab.training.evaluations import Evaluation, evaluating
from fusion_lab.training.files import set_aside
from fusion_lab.training.words import counted, printable
from tiny_openfold.proteins import maps
from tiny_openfold.proteins.contacts import SEPARATION, Prediction, distance_lddt, run_model
from tiny_openfold.proteins.relatives import relative

WRITERS = {".tsv": maps.write_table, ".png": maps.write_picture}  # of the files of one map


def evaluate(trainer, source, stop):
    """An Evaluation: contact_precision() and distance_lddt() by protein, {"training": {name: ...},
    "held_out": {name: ...}}; its score is that of validation families. A signal in stop ends it early."""
    results = {}
    with evaluating(trainer.model):
        for group, proteins in source.evaluation().items():
            results[group] = {}
            for protein, batch in tqdm(proteins, f"Evaluating {group}", disable=None, leave=False):
                if stop.signal:
                    break
                if batch["coord_mask"].sum() <= SEPARATION:
                    continue
                prediction = Prediction(protein, run_model(trainer.model, batch, trainer.device))
                lddt = distance_lddt(prediction.output["distances"], *prediction.coords)
                results[group][protein.name] = dict(prediction.precision, lddt=lddt)
    validated = results.get("validation")
    return Evaluation(contact_line(results), scores(results), means(validated)["p_l2"] if validated else None,
                      results)


def means(proteins):
    """{key: mean over the proteins of one group}"""
    return {key: statistics.fmean(protein[key] for protein in proteins.values())
            for key in ("p_l2", "p_l", "chance", "lddt")}


def scores(evaluation):
    """{"held-out P(L/2)": mean over proteins, "held-out lDDT": ...}"""
    return {f"{group.replace('_', '-')} {title}": means(proteins)[key]
            for group, proteins in evaluation.items() if proteins
            for key, title in (("p_l2", "P(L/2)"), ("lddt", "lDDT"))}


def contact_line(evaluation):
    """An evaluation in a line."""
    parts = ["{} P(L/2) {p_l2:.3f} P(L) {p_l:.3f} chance {chance:.3f} lDDT {lddt:.3f} ({})".format(
        group.replace("_", "-"), counted(len(proteins), "protein"), **means(proteins))
        for group, proteins in evaluation.items() if proteins]
    return "Contacts: " + (" | ".join(parts) or "no protein has enough coordinates")


def closing(trainer, source, evaluations):
    """What the final evaluation says, in a sentence; before it the maps of held-out proteins as pictures: of
    all in --plot-contacts or else, after a run that was evaluated on its way, of one beside its results."""
    held_out = evaluations["final"].details.get("held_out") if "final" in evaluations else None
    if not held_out:
        return
    if directory := trainer.settings.training.plot_contacts:
        write_maps(trainer, source, {name: os.path.join(directory, name) for name in held_out})
    elif len(evaluations) > 1 and find_spec("matplotlib"):
        path = os.path.join(trainer.settings.profiler.profile_dir, "contacts")
        for suffix in WRITERS:
            set_aside(path + suffix)
        write_maps(trainer, source, {next(iter(held_out)): path})
        print(f"A contact map: {path}.png, the numbers {path}.tsv")
    mean = means(held_out)
    print(f"In words: after step {trainer.step_number}, {100 * mean['p_l2']:.0f}% of the model's top-ranked "
          f"residue pairs touch, in {counted(len(held_out), 'protein')} it never saw; "
          f"by chance {100 * mean['chance']:.0f}% would.")
    if source.sequences:  # artificial proteins have no relatives
        kin = [family.name for family in source.unseen if family.name in held_out and relative(
            family.msa, family.name, dict(sequences=trainer.sequences))["trained"]]
        print(f"Of these, {len(kin)} have a relative, by sequence, that it learned from"
              + f": {', '.join(map(printable, kin))}" * bool(kin))


def write_maps(trainer, source, paths):
    """Maps of held-out proteins, {name: path without a suffix}."""
    with evaluating(trainer.model):
        for protein, batch in source.evaluation()["held_out"]:
            if protein.name in paths:
                prediction = Prediction(protein, run_model(trainer.model, batch, trainer.device))
                write_map(paths[protein.name], prediction)


def require_plots(directory, names):
    """Raise UserError now rather than after training if maps of these proteins could not be written there."""
    require_matplotlib()
    os.makedirs(directory, exist_ok=True)
    if not names:
        raise UserError(f"--plot-contacts {directory}: no protein is held out")
    there = {name + suffix for name in names for suffix in WRITERS} & {*os.listdir(directory)}
    if there:
        raise UserError(f"--plot-contacts {directory}: it holds {min(there)} already; name another one")


def write_map(path, prediction):
    """The files of a Prediction. A failure is a line on stderr: a picture must not cost a run its summary,
    and whatever is wrong with one may be right with the next."""
    with spared(f"contact map of {prediction.protein.name!r}"):
        for suffix, write in WRITERS.items():
            write(path + suffix, prediction)
