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
from fusion_lab.training.files import write_text
from fusion_lab.training.words import counted
from tiny_openfold.proteins import maps
from tiny_openfold.proteins.geometry import CA
from tiny_openfold.proteins.relatives import cautions, kinship
from tiny_openfold.proteins.secondary import OTHER, secondary_structure
from tiny_openfold.proteins.structure_metrics import compared, moved

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

EXPERIMENT = "#B0B0B0"


def write_picture(path, m, atoms, plddt, cautions=()):
    """Map and fold side by side, as PNG, with the known structure as a third; cautions stand below its
    title."""
    require_matplotlib()
    from matplotlib.figure import Figure
    known = m.protein.backbone
    scores = known is not None and compared(atoms[:, CA], known[:, CA])
    panels = 3 if scores else 2
    figure = Figure(figsize=(panels * maps.PANEL + 1.0, maps.PANEL + 2.1), layout="constrained")
    contacts, *folds = figure.subplots(1, panels)
    handles = maps.draw_contacts(contacts, m)
    maps.dress(contacts, m, "contacts: marks predicted, squares true" if m.precision
               else "contacts: the more probable, the darker")
    places = turned(atoms[:, CA].astype(float))
    draw_fold(folds[0], "predicted fold", m.protein.sequence, atoms, places, colours(plddt))
    if scores:
        draw_fold(folds[1], f"experiment; TM-score {scores['tm_score']:.2f}", m.protein.sequence, known,
                  fitted(known[:, CA], places), [EXPERIMENT] * len(known))
    title = f"{maps.printable(m.protein.name)}: predicted fold, mean pLDDT {plddt.mean():.0f}"
    maps.entitle(figure, title, cautions)
    figure.legend(handles=handles + legend(plddt), loc="outside lower left", frameon=False, ncols=4,
                  fontsize=9, columnspacing=1.4, handletextpad=0.5)
    maps.save(figure, path)


def fitted(points, places):
    """points (L, 3) moved onto places (L, 3) with the least RMSD of what both have; NaN where missing."""
    known, both = np.isfinite(points).all(axis=1), np.isfinite(points + places).all(axis=1)
    away = moved(np.nan_to_num(points, nan=0.0), np.nan_to_num(places, nan=0.0), both[None])[0]
    return np.where(known[:, None], away, np.nan)


def colours(plddt):
    """L colours, of BANDS."""
    return [band(each)[1] for each in plddt]


def legend(plddt):
    """A patch, with its limits, for each of BANDS that occurs."""
    from matplotlib.patches import Patch
    shown, most = [], None
    for least, tint, words, _ in BANDS:
        limits = f"{least} to {most}" if most and least else f"below {most}" if most else f"above {least}"
        most = least
        if tint in colours(plddt):
            shown.append(Patch(facecolor=tint, label=f"pLDDT {limits}: {words}"))
    return shown


def draw_fold(axis, title, sequence, atoms, places, shades):
    """The chain, what is near over what is far; a gap where residues are missing. atoms (L, 4 or 5, 3):
    N, CA, C, O, NaN where missing; places (L, 3): where its CA atoms are drawn; shades: L colours."""
    from matplotlib.collections import LineCollection
    letters = secondary_structure(sequence, atoms[:, :4].astype(float))
    strokes = []  # (depth, residue, points of a piece with one neighbour on each side and with two): the
    # outline reaches over one, so that it has no gaps, and the colour over two, so that it has no ends
    for first, last in maps.runs(np.isfinite(places).all(axis=1)):
        run = places[first:last + 1]
        curve = smooth(run) if len(run) > 1 else np.repeat(run, 2, axis=0)
        for k in range(len(curve) - 1):
            strokes.append((curve[k:k + 2, 2].mean(), min(first + int(k / PIECES + 0.5), last),
                            *(curve[max(k - more, 0):k + 2 + more, :2] for more in (1, 2))))
    for _, k, *pieces in sorted(strokes, key=lambda stroke: stroke[0]):
        width = 1.8 if letters[k] == OTHER else 4.5
        for points, tint, more in zip(pieces, ("#333333", shades[k]), (1.4, 0), strict=True):
            axis.add_collection(LineCollection([points], colors=[tint], capstyle="butt", joinstyle="round",
                                               linewidths=[width + more]))
    ends = np.flatnonzero(np.isfinite(places).all(axis=1))[[0, -1]]
    for k, end in zip(ends, "NC", strict=True):
        axis.annotate(end, places[k, :2], textcoords="offset points", xytext=(4, 4), fontsize=10, zorder=5)
    reach = np.nanmax(np.abs(places)) + 4
    axis.set(xlim=(-reach, reach), ylim=(-reach, reach), aspect="equal", xticks=[], yticks=[])
    axis.set_title(title, fontsize=11)
