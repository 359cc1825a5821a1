"""Contact precision, the metric of the project, and its pictures."""
import math
import os
import statistics
from importlib.util import find_spec

import torch
from tqdm import tqdm

from fusion_lab.measuring.plotting import require_matplotlib, spared
from fusion_lab.training.evaluations import Evaluation, evaluating
from fusion_lab.training.feeding import to_device
from fusion_lab.training.files import UserError, counted, printable, set_aside
from tiny_openfold.proteins import maps
from tiny_openfold.proteins.files import LETTERS
from tiny_openfold.proteins.relatives import relative
from tiny_openfold.proteins.structure_metrics import LDDT_CUTOFFS, LDDT_RADIUS

CONTACT_DISTANCE = 8.0  # Å, between CB atoms (CA for glycine)
SEPARATION = 6  # contacts between residues nearer along the chain say nothing about the fold
LONG_RANGE = 24  # residues apart; such contacts say most about the fold
SUFFIXES = (".tsv", ".png")  # of the files of one map


def true_distances(coords, coord_mask):
    """(S, S) Å, NaN where a residue has no coordinates. coords (S, 3), coord_mask (S,)."""
    seen = coord_mask.bool()
    distances = (coords[:, None] - coords[None]).norm(dim=-1)
    return distances.masked_fill(~(seen[:, None] & seen), float("nan"))


def ranked_pairs(probability, coord_mask, separation=SEPARATION):
    """(i, j), i < j, of the pairs that count, most probable first: so many residues apart, both residues with
    coordinates. probability (S, S), coord_mask (S,)."""
    seen = coord_mask.bool()
    i, j = torch.triu_indices(len(seen), len(seen), separation, device=seen.device)
    both = seen[i] & seen[j]
    i, j = i[both], j[both]
    order = probability[i, j].argsort(descending=True, stable=True)  # ties alike on every device
    return i[order], j[order]


def half_length(coord_mask):
    """L/2, of the L residues with coordinates."""
    return max(int(coord_mask.sum()) // 2, 1)


def contact_precision(probability, coords, coord_mask, separation=SEPARATION):
    """Share of true contacts among the L/2 and L most probable pairs so many residues apart (L residues with
    coordinates), and among all such pairs; NaN where there are none. probability (S, S), of any scores that
    are high for contacts; coords (S, 3), coord_mask (S,)."""
    i, j = ranked_pairs(probability, coord_mask, separation)
    contact = ((coords[i] - coords[j]).norm(dim=-1) < CONTACT_DISTANCE).float()
    return dict(p_l2=contact[:half_length(coord_mask)].mean().item(),
                p_l=contact[:int(coord_mask.sum())].mean().item(), chance=contact.mean().item())


def distance_lddt(distances, coords, coord_mask):
    """lDDT of predicted distances (S, S) Å, without a structure: of each residue's true distances within
    LDDT_RADIUS the share that is met within 0.5, 1, 2 and 4 Å, on average over residues. coords (S, 3),
    coord_mask (S,). 0 to 1; 0 where no two residues are that near."""
    wanted = true_distances(coords, coord_mask).fill_diagonal_(float("nan"))
    near, error = wanted < LDDT_RADIUS, (distances - wanted).abs()
    kept = sum((error < cutoff) & near for cutoff in LDDT_CUTOFFS) / len(LDDT_CUTOFFS)
    return (kept.sum(1) / near.sum(1)).nanmean().nan_to_num().item()


def predicted(model, batch, device):
    """(tokens (S,), (probability, distances (S, S), coords (S, 3), coord_mask (S,))) of a batch of one."""
    tokens, batch = batch["target_tokens"][0], to_device(batch, device)
    coords, coord_mask = batch.pop("coords")[0], batch.pop("coord_mask")[0]
    output = model(**batch)
    return tokens, (output["contact_probability"][0], output["distances"][0], coords, coord_mask)


def evaluate(trainer, source, stop):
    """An Evaluation: contact_precision() and distance_lddt() by protein, {"training": {name: ...},
    "held_out": {name: ...}}; its score is that of validation families. A signal in stop ends it early."""
    results = {}
    with evaluating(trainer.model):
        for group, proteins in source.evaluation().items():
            results[group] = {}
            for name, batch in tqdm(proteins, f"Evaluating {group}", disable=None, leave=False):
                if stop.signal:
                    break
                if batch["coord_mask"].sum() <= SEPARATION:
                    continue
                _, (probability, distances, *known) = predicted(trainer.model, batch, trainer.device)
                far = contact_precision(probability, *known, LONG_RANGE)["p_l2"]
                results[group][name] = dict(contact_precision(probability, *known),
                                            p_l2_long=None if math.isnan(far) else far,
                                            lddt=distance_lddt(distances, *known))
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
    """What an evaluation found, in a line."""
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
    if directory := trainer.training.plot_contacts:
        write_maps(trainer, source, {name: os.path.join(directory, name) for name in held_out})
    elif len(evaluations) > 1 and find_spec("matplotlib"):
        path = os.path.join(trainer.settings.profiler.profile_dir, "contacts")
        for suffix in SUFFIXES:
            set_aside(path + suffix)
        write_maps(trainer, source, {next(iter(held_out)): path})
        print(f"A contact map: {path}.png, the numbers {path}.tsv")
    mean = means(held_out)
    print(f"In words: after step {trainer.step_number}, {100 * mean['p_l2']:.0f}% of the residue pairs that "
          f"the model is surest of do touch, in {counted(len(held_out), 'protein')} it never saw; "
          f"by chance {100 * mean['chance']:.0f}% would.")
    if trainer.sequences and all(map(source.structure, held_out)):  # artificial proteins have no relatives
        kin = [name for name in held_out if relative(source.structure(name).msa, name, dict(
            sequences=trainer.sequences))["trained"]]
        print(f"Of these, {len(kin)} have a relative, by sequence, that it learned from"
              + f": {', '.join(map(printable, kin))}" * bool(kin))


def write_maps(trainer, source, paths):
    """Maps of held-out proteins, {name: path without a suffix}."""
    with evaluating(trainer.model):
        for name, batch in source.evaluation()["held_out"]:
            if name in paths:
                write_map(paths[name], name, source.structure(name),
                          *predicted(trainer.model, batch, trainer.device))


def require_plots(directory, names):
    """Raise UserError now rather than after training if maps of these proteins could not be written there."""
    require_matplotlib()
    os.makedirs(directory, exist_ok=True)
    if not names:
        raise UserError(f"--plot-contacts {directory}: no protein is held out")
    there = {name + suffix for name in names for suffix in SUFFIXES} & {*os.listdir(directory)}
    if there:
        raise UserError(f"--plot-contacts {directory}: it holds {min(there)} already; name another one")


def contact_map(name, protein, tokens, arrays):
    """maps.ContactMap of one protein. protein is what files.py read, None for a built-in one, which is
    numbered from 1; tokens (S,); arrays: probability, distances (S, S), coords (S, 3), coord_mask (S,), of
    zeros alone where there is no structure: then all pairs count."""
    probability, distances, coords, coord_mask = (array.detach().float().cpu() for array in arrays)
    known = coord_mask.any()
    counted = coord_mask if known else torch.ones_like(coord_mask)
    chosen = (index[:half_length(counted)].numpy() for index in ranked_pairs(probability, counted))
    return maps.ContactMap(
        name, protein.chain if protein else "",
        protein.numbers if protein else tuple(map(str, range(1, len(tokens) + 1))),
        "".join(LETTERS[token] for token in tokens.tolist()), probability.numpy(), distances.numpy(),
        true_distances(coords, coord_mask).numpy(), tuple(chosen),
        contact_precision(probability, coords, coord_mask) if known else {}, CONTACT_DISTANCE, SEPARATION)


def write_map(path, *protein):
    """The files of contact_map(*protein). A failure is a line on stderr: a picture must not cost a run its
    summary, and whatever is wrong with one may be right with the next."""
    with spared(f"contact map of {protein[0]!r}"):
        found = contact_map(*protein)
        for suffix, write in zip(SUFFIXES, (maps.write_table, maps.write_picture), strict=True):
            write(path + suffix, found)
