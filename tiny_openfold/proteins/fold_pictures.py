"""What one looks at: a fold beside its map as a picture, and as a page in which one turns it.

The page, made from fold_page.html, holds all that it needs and works without a network. pLDDT has the
colours of AlphaFold's database. Letters in shapes: L residues.
"""
import base64
import html
import json
import os
import re
import shlex
from pathlib import Path

import numpy as np

from fusion_lab.measuring.plotting import require_matplotlib
from fusion_lab.training.files import counted, write_text
from tiny_openfold.proteins import maps
from tiny_openfold.proteins.geometry import CA
from tiny_openfold.proteins.relatives import cautions, kinship
from tiny_openfold.proteins.secondary import OTHER, secondary_structure

PAGE = Path(__file__).with_name("fold_page.html")
BANDS = (  # least pLDDT, colour, words for a residue, what a mean says of a fold
    (90, "#0053D6", "very high", "Right, in most details too"),
    (70, "#65CBF3", "high", "Right overall; details may be off"),
    (50, "#FFDB13", "low", "Roughly right overall; do not trust details"),
    (0, "#FF7D45", "very low", "Large parts are probably wrong"))
PIECES = 5  # of the curve between two residues


def band(plddt):
    """The row of BANDS that a pLDDT belongs to."""
    return next(one for one in BANDS if plddt >= one[0] or not one[0])


def nameless(text):
    """A command without the folders of the machine that ran it: pages are passed on."""
    return shlex.join(os.path.basename(word) if os.path.isabs(word) else word for word in shlex.split(text))


def turned(points):
    """(L, 3) with the longest extent along x and the shortest towards the eye, centred; never mirrored."""
    centred = points - points.mean(axis=0)
    _, _, axes = np.linalg.svd(centred, full_matrices=True)
    axes[2] *= np.sign(np.linalg.det(axes))
    return centred @ axes.T


def smooth(points):
    """((L - 1) * PIECES + 1, 3): a curve through points (L, 3) (Catmull and Rom 1974)."""
    ends = np.concatenate([points[:1], points, points[-1:]])
    a, b, c, d = (ends[k:len(points) - 1 + k, None] for k in range(4))
    t = (np.arange(PIECES) / PIECES)[:, None]
    curve = b + 0.5 * ((c - a) * t + (2 * a - 5 * b + 4 * c - d) * t ** 2 + (3 * (b - c) + d - a) * t ** 3)
    return np.concatenate([curve.reshape(-1, 3), points[-1:]])


# --- Page -----------------------------------------------------------------------------------------------


def notes(result):
    """[(class of the paragraph, words)] above the panels."""
    extra = result["extra_rows_used"]
    found = [("", f"{band(result['plddt'])[3]}: mean pLDDT {result['plddt']:.0f} of 100. "
                  f"{counted(result['residues'], 'residue')}, {result['rows_used']} of "
                  f"{counted(result['rows'], 'row')}" + (f", {extra} for couplings" if extra else "")
              + f" ({result['effective_rows']:.1f} effective)")]
    found += [("warning", words) for words in cautions(result)]
    found += [("warning", remark) for remark in result["remarks"]]
    if words := kinship(result["relative"]):
        found.append(("" if result["trained_on"] is False else "warning", words))
    if scores := result.get("scores"):
        found.append(("", f"Against the structure: TM-score {scores['tm_score']:.2f}, lDDT-CA "
                      f"{scores['lddt_ca']:.2f}, RMSD {scores['rmsd']:.1f} Å"))
    return found


def write_page(path, m, atoms, plddt, result):
    """m: a contacts.Prediction; atoms (L, 5, 3) Å, plddt (L,); result: what the mode's JSON holds."""
    tenths = np.clip(np.round(10 * m.distances), 0, 255).astype(np.uint8)
    atoms = atoms.astype(float)
    letters = m.protein.sequence
    data = dict(sequence=letters, places=turned(atoms[:, CA]).round(2).tolist(),
                plddt=plddt.round(1).tolist(), bands=BANDS, numbers=m.protein.numbers,
                near_to_far=maps.NEAR_TO_FAR, low=result["low_confidence"],
                secondary=secondary_structure(letters, atoms[:, :4]),
                distances=base64.b64encode(tenths.tobytes()).decode())
    title = html.escape(f"{maps.printable(m.protein.name)}: predicted fold")
    paragraphs = "\n".join(f'<p class="{kind}">{html.escape(words)}</p>' for kind, words in notes(result))
    model = maps.printable(os.path.basename(result["model"]), 300)
    details = (f"<p>Model: {html.escape(model)}. Made by:</p>\n"
               f"<p><code>{html.escape(nameless(result['command']))}</code></p>")
    parts = dict(TITLE=title, NOTES=paragraphs, DETAILS=details,
                 DATA=json.dumps(data).replace("<", "\\u003c"))
    page = PAGE.read_text(encoding="utf-8")  # a name may be such a word: what is put in is not searched
    write_text(path, re.sub("|".join(parts), lambda found: parts[found[0]], page))


# --- Picture --------------------------------------------------------------------------------------------


def write_picture(path, m, atoms, plddt, cautions=()):
    """Map and fold side by side, as PNG; cautions stand below its title."""
    require_matplotlib()
    from matplotlib.figure import Figure
    figure = Figure(figsize=(2 * maps.PANEL + 1.0, maps.PANEL + 2.1), layout="constrained")
    contacts, fold = figure.subplots(1, 2)
    handles = maps.draw_contacts(contacts, m)
    maps.dress(contacts, m, "contacts: marks predicted, squares true" if m.precision
               else "contacts: the more probable, the darker")
    shades = draw_fold(fold, m.protein.sequence, atoms, plddt)
    title = f"{maps.printable(m.protein.name)}: predicted fold, mean pLDDT {plddt.mean():.0f}"
    maps.entitle(figure, title, cautions)
    figure.legend(handles=handles + shades, loc="outside lower left", frameon=False, ncols=4, fontsize=9,
                  columnspacing=1.4, handletextpad=0.5)
    maps.save(figure, path)


def draw_fold(axis, sequence, atoms, plddt):
    """The chain from the side where it is widest, what is near over what is far; returns what the legend
    shows."""
    from matplotlib.collections import LineCollection
    from matplotlib.patches import Patch
    atoms = atoms.astype(float)
    places, letters = turned(atoms[:, CA]), secondary_structure(sequence, atoms[:, :4])
    curve = smooth(places) if len(places) > 1 else np.repeat(places, 2, axis=0)
    strokes = np.stack([curve[:-1], curve[1:]], axis=1)  # (pieces, 2, 3)
    residue = np.minimum((np.arange(len(strokes)) / PIECES + 0.5).astype(int), len(sequence) - 1)
    order = strokes[:, :, 2].mean(axis=1).argsort()
    width = np.array([1.8 if letters[k] == OTHER else 4.5 for k in residue])
    shade = [band(plddt[k])[1] for k in residue]
    for k in order:
        for tint, more, cap in (("#333333", 1.4, "butt"), (shade[k], 0, "round")):
            axis.add_collection(LineCollection([strokes[k, :, :2]], colors=[tint], capstyle=cap,
                                               linewidths=[width[k] + more]))
    for k, end in ((0, "N"), (-1, "C")):
        axis.annotate(end, places[k, :2], textcoords="offset points", xytext=(4, 4), fontsize=10, zorder=5)
    reach = np.abs(places).max() + 4
    axis.set(xlim=(-reach, reach), ylim=(-reach, reach), aspect="equal", xticks=[], yticks=[])
    axis.set_title("fold, coloured by pLDDT", fontsize=11)
    return [Patch(facecolor=tint, label=f"pLDDT {words}") for _, tint, words, _ in BANDS]
