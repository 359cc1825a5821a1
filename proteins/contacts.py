"""Contact precision, the metric of the project, and its pictures."""
import os
import statistics

import torch

from fusion_lab.measuring.plotting import require_matplotlib
from fusion_lab.training.feeding import to_device
from fusion_lab.training.files import UserError, require_directory

CONTACT_DISTANCE = 8.0  # Å, between CB atoms (CA for glycine)
SEPARATION = 6  # contacts between residues nearer along the chain say nothing about the fold


def contact_precision(probability, coords, coord_mask):
    """Share of true contacts among the L/2 and L most probable pairs at least SEPARATION apart (L residues
    with coordinates), and among all such pairs. probability (S, S), coords (S, 3), coord_mask (S,)."""
    seen = coord_mask.bool()
    i, j = torch.triu_indices(len(seen), len(seen), SEPARATION, device=seen.device)
    both = seen[i] & seen[j]
    i, j = i[both], j[both]
    contact = ((coords[i] - coords[j]).norm(dim=-1) < CONTACT_DISTANCE).float()
    ranked = contact[probability[i, j].argsort(descending=True)]
    length = int(seen.sum())
    return dict(p_l2=ranked[:max(length // 2, 1)].mean().item(), p_l=ranked[:length].mean().item(),
                chance=contact.mean().item())


@torch.no_grad()
def evaluate(trainer, source, stop=None, final=False):
    """contact_precision() by protein: {"training": {name: ...}, "held_out": {name: ...}}. The model runs
    uncompiled here, since whole chains differ in length. A signal in stop ends it early. The final one writes
    maps of the held-out proteins into --plot-contacts, if that is given."""
    model, plot_directory = trainer.model, trainer.training.plot_contacts if final else None
    was_training = model.training
    model.eval()
    results = {}
    with torch.compiler.set_stance("force_eager"):
        for group, proteins in source.evaluation().items():
            results[group] = {}
            for name, batch in proteins:
                if stop and stop.signal is not None:
                    break
                batch = to_device(batch, trainer.device)
                coords, coord_mask = batch.pop("coords")[0], batch.pop("coord_mask")[0]
                if coord_mask.sum() <= SEPARATION:
                    continue
                output = model(**batch)
                probability, distances = output["contact_probability"][0], output["distances"][0]
                results[group][name] = contact_precision(probability, coords, coord_mask)
                if plot_directory and group == "held_out":
                    plot_contacts(plot_directory, name, probability, distances, coords, coord_mask,
                                  results[group][name])
    model.train(was_training)
    return results


def scores(evaluation):
    """{"held-out P(L/2)": mean over proteins, ...} of what evaluate() returned."""
    return {f"{group.replace('_', '-')} P(L/2)": statistics.fmean(p["p_l2"] for p in proteins.values())
            for group, proteins in evaluation.items() if proteins}


def contact_line(evaluation):
    """One line for what evaluate() returned."""
    parts = []
    for group, proteins in evaluation.items():
        if proteins:
            mean = {key: statistics.fmean(p[key] for p in proteins.values())
                    for key in ("p_l2", "p_l", "chance")}
            parts.append(f"{group.replace('_', '-')} P(L/2) {mean['p_l2']:.3f} P(L) {mean['p_l']:.3f} "
                         f"chance {mean['chance']:.3f} ({len(proteins)} proteins)")
    return "Contacts: " + (" | ".join(parts) or "no protein has enough coordinates")


def closing(trainer, source, evaluations):
    """What the final evaluation says, in a sentence."""
    held_out = evaluations.get("final", {}).get("held_out")
    if not held_out:
        return
    found, chance = (100 * statistics.fmean(p[key] for p in held_out.values()) for key in ("p_l2", "chance"))
    print(f"In words: after {trainer.step_number} steps, {found:.0f}% of the residue pairs that the model is "
          f"surest of do touch, in {len(held_out)} proteins it never saw; by chance {chance:.0f}% would.")


def require_plots(settings, source):
    """Raise UserError now rather than after training if --plot-contacts could not be obeyed."""
    directory = settings.training.plot_contacts
    if directory:
        require_matplotlib()
        require_directory(directory)
        if not source.held_out:
            raise UserError(f"--plot-contacts {directory}: no protein is held out")


def plot_contacts(directory, name, probability, distances, coords, coord_mask, precision):
    """Write NAME.png: prediction above the diagonal and truth below it, as contacts and as distances (Å)."""
    pyplot = require_matplotlib()
    os.makedirs(directory, exist_ok=True)
    true = (coords[:, None] - coords[None]).norm(dim=-1)
    true[~(coord_mask[:, None] * coord_mask[None]).bool()] = float("nan")
    figure, axes = pyplot.subplots(1, 2, figsize=(9.5, 4.2), layout="constrained")
    true_contacts = (true < CONTACT_DISTANCE).where(~true.isnan(), float("nan"))
    panels = (("contact probability", probability, true_contacts, dict(cmap="Greys", vmin=0, vmax=1)),
              ("CB distance, Å", distances, true, dict(cmap="viridis_r", vmin=2, vmax=22)))
    for axis, (title, predicted, truth, style) in zip(axes, panels, strict=True):
        both = torch.triu(predicted.float(), 1).nan_to_num() + torch.tril(truth.float(), -1)
        image = axis.imshow(both.cpu(), origin="upper", **style)
        axis.axline((0, 0), slope=1, color="0.6", linewidth=0.7)
        axis.set(title=f"{title}: predicted above, true below", xlabel="residue", ylabel="residue")
        figure.colorbar(image, ax=axis, shrink=0.85)
    figure.suptitle(f"{name}: P(L/2) {precision['p_l2']:.2f}, P(L) {precision['p_l']:.2f}, "
                    f"chance {precision['chance']:.2f}")
    figure.savefig(os.path.join(directory, f"{name}.png"), dpi=110)
    pyplot.close(figure)
