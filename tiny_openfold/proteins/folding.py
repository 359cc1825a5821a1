"""From a distogram to atoms: many folds at once, by gradient descent (docs/folding.md).

    fold = folded(logits, centres, "MKTAYIAK...")      # fold.atoms (L, 5, 3), fold.energy

First come traces: a point for each residue, in five dimensions, in which a chain can pass through itself,
and of which two are pressed flat. The best traces and their mirror images become frames: rigid L-amino
acids that are pulled together until the chain is whole. Of all of these the one with the least energy is
the fold; since residues and the Ramachandran plot have a hand, it is the right image. Letters in shapes: B
structures, L residues.
"""
import threading
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial

import torch

from tiny_openfold.proteins import geometry
from tiny_openfold.proteins.fold_energy import (
    Distances,
    Orientations,
    anchor,
    clashes,
    crowding,
    near_pairs,
    peptide_bonds,
    ramachandran,
)
from tiny_openfold.proteins.geometry import CA, CB, C, N

TRACES, CHOSEN = 16, 4        # starts; of which so many are folded on, each with its mirror image
DIMENSIONS = 5
TRACE_STEPS, FOLD_STEPS = 300, 450
STEPS = 2 * (TRACE_STEPS + FOLD_STEPS)  # of both halves
PAIRS_AT_ONCE = 400_000       # residue pairs of all starts; long chains have fewer starts
DISTANCE_WEIGHT = 20.0        # kT for each residue, shared by all of its pairs
ORIENTATION_WEIGHT = 20.0  # the same, of omega, theta and phi
CLASHES_FROM = 0.6            # share of the steps before atoms may clash no more
REFRESH = 15                  # steps for which a list of near pairs serves
WINDOW = 5                    # residues of an ideal piece of chain
PIECES = ((-62., -43.), (-120., 130.), (-70., 140.), (-95., 0.), (60., 40.), (80., 5.))  # phi, psi in degrees
LEAST = 4                     # residues with which distances have something to say


@dataclass
class Fold:
    """One structure and what was asked of it."""
    atoms: torch.Tensor      # (L, 5, 3) in the order of geometry.ATOMS, Å
    energy: float            # kT for each residue
    terms: dict              # {term: kT for each residue}
    gap: float               # kT for each residue by which the best mirror image is worse


def folded(logits, centres, sequence, seed=0, orientations=None, told=lambda: None):
    """Fold of a distogram: logits (L, L, bins), centres (bins,) Å, sequence of L letters, and where a model
    gives them orientations, logits {name: (L, L, bins)} as in orientations.py. An operation has one thread,
    as tensors are small; two halves of the starts run side by side. They are apart on one core, too, so that
    a seed is one fold on any number of cores. told() is called after each of STEPS steps at most."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return _folded(logits, centres, sequence, torch.Generator().manual_seed(seed), orientations, told)
    finally:
        torch.set_num_threads(threads)


def by_halves(work, batch):
    """[work(half)] for both halves of a batch, the first in a thread beside this one. An error or Ctrl-C here
    does not wait for that thread, which ends with the process at the latest."""
    first, second = batch.chunk(2)
    beside = Future()

    def run():
        torch.set_num_threads(1)  # or MKL takes all cores here, whatever torch.get_num_threads() says
        try:
            beside.set_result(work(first))
        except BaseException as error:
            beside.set_exception(error)
    threading.Thread(target=run, daemon=True).start()
    own = work(second)
    return [beside.result(), own]


def _folded(logits, centres, sequence, generator, orientations, told):
    probability = logits.float().softmax(-1)
    potential = Distances(probability, centres)
    size = len(sequence)
    starts = max(min(TRACES, PAIRS_AT_ONCE // max(size * (size - 1) // 2, 1)), 2)
    if size < LEAST:
        traces = torch.randn(2, size, 3, generator=generator)
    else:
        halves = by_halves(partial(fold_traces, potential, told=told),
                           spread(probability, centres, starts, generator))
        traces, energy = (torch.cat(both) for both in zip(*halves, strict=True))
        traces = traces[energy.argsort()[:min(CHOSEN, max(starts // 2, 1))]]
    images = torch.cat([traces, traces * torch.tensor([1.0, 1.0, -1.0])])
    if orientations is not None:
        orientations = Orientations({name: one.float().softmax(-1) for name, one in orientations.items()})
    atoms = torch.cat(by_halves(
        partial(fold_frames, potential, sequence=sequence, orientations=orientations, told=told), images))
    return best_of(potential, atoms, sequence, orientations)


# --- Traces ---------------------------------------------------------------------------------------------


def spread(probability, centres, starts, generator):
    """Starts (B, L, DIMENSIONS): where the mean distances put the residues, with noise of 2 Å."""
    distances = probability @ torch.as_tensor(centres, dtype=torch.float32)
    scaled = geometry.scaled(distances.fill_diagonal_(0), DIMENSIONS)
    return scaled + 2.0 * torch.randn(starts, len(distances), DIMENSIONS, generator=generator)


def fold_traces(potential, points, told=lambda: None):
    """(traces (B, L, 3), kT for each residue (B,)): points (B, L, DIMENSIONS) moved down the potential; the
    dimensions behind the third are pressed flat in the middle third of the steps."""
    points = points.clone().requires_grad_()
    optimizer = torch.optim.Adam([points], lr=1.0)
    for step in range(TRACE_STEPS + 1):
        done = step / TRACE_STEPS
        flat = min(max(3 * done - 1, 0), 1)
        optimizer.param_groups[0]["lr"] = 1.0 * (1 - done) + 0.02
        shown = torch.cat([points[..., :3], points[..., 3:] * (1 - flat)], -1)
        energy = (potential(shown) + 3 * crowding(shown, 3.8)) / points.shape[1]
        if step < TRACE_STEPS:
            optimizer.zero_grad()
            energy.sum().backward()
            optimizer.step()
            told()
    return points.detach()[..., :3], energy.detach()


# --- Frames ---------------------------------------------------------------------------------------------


def frames_along(trace):
    """First (rotation (B, L, 3, 3), place (B, L, 3)) of residues whose CB lie on a trace (B, L, 3): those
    of the piece of an ideal chain that fits best on each residue and its neighbours."""
    reach = WINDOW // 2
    angles = torch.tensor(PIECES, dtype=trace.dtype).deg2rad().T[..., None]
    pieces = geometry.extended(*angles.expand(2, -1, WINDOW))  # (F, WINDOW, 5, 3)
    own, _ = geometry.frames_of(*(pieces[:, reach, atom] for atom in (N, CA, C)))
    points = pieces[:, :, CB]
    points = points - points.mean(1, keepdim=True)  # (F, WINDOW, 3)
    ends = torch.arange(1, reach + 1)[:, None].to(trace)
    step = (trace[:, 1:2] - trace[:, :1], trace[:, -1:] - trace[:, -2:-1]) if trace.shape[1] > 1 else (
        torch.ones_like(trace),) * 2  # the chain goes on as it begins and ends
    padded = torch.cat([trace[:, :1] - ends.flip(0) * step[0], trace, trace[:, -1:] + ends * step[1]], 1)
    windows = padded.unfold(1, WINDOW, 1).transpose(-1, -2)  # (B, L, WINDOW, 3)
    windows = windows - windows.mean(2, keepdim=True)
    # Superpose each piece on each window (Kabsch 1976, doi:10.1107/S0567739476001873), without mirroring it.
    u, value, v = torch.linalg.svd(torch.einsum("blwi,fwj->blfij", windows, points))
    hand = (u @ v).det().sign()
    fitted = value[..., 0] + value[..., 1] + hand * value[..., 2]
    error = points.square().sum((1, 2)) - 2 * fitted  # of the least squares, less what all pieces share
    u = torch.cat([u[..., :2], u[..., 2:] * hand[..., None, None]], -1)
    best = error.argmin(-1)[..., None, None, None].expand(-1, -1, 1, 3, 3)
    rotation = torch.take_along_dim(u @ v @ own, best, 2).squeeze(2)
    return rotation, trace - rotation @ geometry.ideal_residue(trace.dtype)[3]


def fold_frames(potential, traces, sequence, orientations=None, told=lambda: None):
    """Atoms (B, L, 5, 3) of chains that start along the traces (B, L, 3)."""
    rotation, place = frames_along(traces)
    axes = rotation[..., :2].transpose(-1, -2).contiguous().requires_grad_()  # two vectors, made a rotation
    place = place.contiguous().requires_grad_()
    optimizer = torch.optim.Adam([dict(params=[axes]), dict(params=[place])], betas=(0.9, 0.98))
    pairs = None
    for step in range(FOLD_STEPS):
        done = step / FOLD_STEPS
        rate = min(1, 2.2 * (1 - done)) + 0.002
        for group, most in zip(optimizer.param_groups, (0.06, 0.25), strict=True):
            group["lr"] = most * rate
        atoms = geometry.backbone(geometry.rotations(axes[..., 0, :], axes[..., 1, :]), place)
        clashing = done >= CLASHES_FROM
        if clashing and (pairs is None or step % REFRESH == 0):
            pairs = near_pairs(atoms)
        costs = terms(potential, atoms, sequence, pairs, orientations)
        if "peptide" in costs:  # each residue by itself first, the chain last
            costs["peptide"] = 10 ** (-3.0 + 3.0 * min(done / 0.75, 1)) * costs["peptide"]
        optimizer.zero_grad()
        sum(costs.values()).sum().backward()
        optimizer.step()
        told()
    with torch.no_grad():
        return geometry.backbone(geometry.rotations(axes[..., 0, :], axes[..., 1, :]), place)


def terms(potential, atoms, sequence, pairs=None, orientations=None):
    """{term: (B,) kT}; without pairs, from near_pairs(), CA atoms alone repel each other."""
    size = len(sequence)
    costs = dict(distances=DISTANCE_WEIGHT / size * potential(anchor(atoms, sequence)))
    if orientations is not None:
        costs["orientations"] = ORIENTATION_WEIGHT / size * orientations(atoms)
    if size > 1:
        costs["peptide"] = peptide_bonds(atoms)
    if size > 2:
        phi, psi, _ = geometry.backbone_angles(atoms)
        costs["plot"] = ramachandran(phi[:, :-1], psi[:, 1:], sequence[1:-1])
        costs["clashes"] = (3 * crowding(atoms[:, :, CA]) if pairs is None
                            else clashes(atoms, pairs, sequence))
    return costs


def best_of(potential, atoms, sequence, orientations=None):
    """Fold of the candidates (B, L, 5, 3), of which the second half grew from mirror images."""
    costs = terms(potential, atoms, sequence, near_pairs(atoms), orientations)
    size = len(sequence)
    energies = sum(costs.values()) / size
    best, half = int(energies.argmin()), len(energies) // 2
    other = energies[:half] if best >= half else energies[half:]
    by_term = {term: float(value[best]) / size for term, value in costs.items()}
    return Fold(atoms[best], float(energies[best]), by_term, float(other.min() - energies[best]))
