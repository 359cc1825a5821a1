"""Contact maps on disk: a picture and a table beside it. m is a contacts.Prediction of S residues."""
import math
import re
import textwrap
import warnings

import numpy as np

from fusion_lab.measuring.plotting import require_matplotlib
from fusion_lab.training.files import write_atomically, write_text
from tiny_openfold.proteins.contacts import CONTACT_DISTANCE, SEPARATION

# Blue and vermilion of Okabe and Ito's palette (2008), told apart under every colour blindness; the marks
# differ in shape as well, for grey printers.
RIGHT, WRONG = "#0072B2", "#D55E00"
NEAR_TO_FAR = ("#141E5A", "#4C8FBF", "#FFFFFF")  # distances up to FAR Å, in pictures and pages alike
FAR = 22
CONTACT, NEAR, HATCH = "#B0B0B0", "#EEEEEE", "#9A9A9A"
PANEL = 3.4  # inches, against which letters of 10 points are still read at half size


def printable(name, longest=60):
    """A name for titles: what cannot be shown replaced, its end left out if it is long."""
    return "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in name)[:longest]


# --- Table ----------------------------------------------------------------------------------------------

COLUMNS = ("number_i", "number_j", "residue_i", "residue_j", "contact_probability",
           "predicted_distance_angstrom", "true_distance_angstrom", "contact", "position_i", "position_j")


def write_table(path, m):
    """All pairs i < j as tab-separated text. number_* are the structure file's residue numbers, empty where
    it has no such residue; position_* count the residues of the query from 1."""
    lines, numbers, letters = ["\t".join(COLUMNS)], m.protein.numbers, m.protein.sequence
    pairs = np.triu_indices(len(letters), 1)
    values = (array[pairs].tolist() for array in (m.probability, m.distances, m.true))
    for i, j, probability, distance, true in zip(*(p.tolist() for p in pairs), *values, strict=True):
        known = not math.isnan(true)
        contact = ("yes" if true < CONTACT_DISTANCE else "no") if known else "unknown"
        lines.append(f"{numbers[i]}\t{numbers[j]}\t{letters[i]}\t{letters[j]}\t{probability:.4f}\t"
                     f"{distance:.2f}\t{f'{true:.2f}' if known else ''}\t{contact}\t{i + 1}\t{j + 1}")
    write_text(path, "\n".join([*lines, ""]))


# --- Picture --------------------------------------------------------------------------------------------


def ticks(numbers, most=8):
    """([position], [label]): round residue numbers of the file, which may have insertion codes ("52A")."""
    numbered = [(position, number) for position, number in enumerate(numbers) if number]
    for step in (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000):
        chosen = [(position, number) for position, number in numbered
                  if int(re.match(r"-?\d+", number)[0]) % step == 0]
        if len(chosen) <= most:
            break
    return [position for position, _ in chosen], [label for _, label in chosen]


def runs(flags):
    """[(first, last)] of the stretches of True."""
    edges = np.flatnonzero(np.diff(np.r_[0, np.asarray(flags, int), 0]))
    return [(int(first), int(end) - 1) for first, end in zip(edges[::2], edges[1::2], strict=True)]


def stretches(numbers):
    """[1, 2, 3, 8] -> "1-3, 8" """
    edges = runs(np.isin(np.arange(max(numbers) + 1), numbers))
    return ", ".join(f"{first}-{last}" if last > first else f"{first}" for first, last in edges)


def write_picture(path, m, cautions=()):
    """Contacts, true and predicted, and distances beside them, as PNG; cautions stand below its title."""
    require_matplotlib()
    from matplotlib.figure import Figure
    figure = Figure(figsize=(2 * PANEL + 1.7, PANEL + 1.4), layout="constrained")
    contacts, distances = figure.subplots(1, 2)
    handles = draw_contacts(contacts, m)
    image = draw_distances(distances, m)
    figure.colorbar(image, ax=distances, shrink=0.85, extend="max")
    if m.precision:
        dress(contacts, m, "contacts: marks predicted, squares true")
        dress(distances, m, "CB distance, Å: predicted above, true below")
    else:
        dress(contacts, m, "contacts: the more probable, the darker")
        dress(distances, m, "predicted CB distance, Å")
    scores = ", ".join(f"{label} {m.precision[key]:.2f}" for label, key in
                       (("P(L/2)", "p_l2"), ("P(L)", "p_l"), ("chance", "chance")) if m.precision)
    chain = f", chain {printable(m.protein.chain)}" if m.protein.chain else ""
    entitle(figure, f"{printable(m.protein.name)}{chain}: {scores or 'predicted'}", cautions)
    figure.legend(handles=handles, loc="outside lower left", frameon=False,
                  ncols=len(handles) if len(handles) <= 5 else -(-len(handles) // 2),
                  columnspacing=1.4, handletextpad=0.5, fontsize=9)
    save(figure, path)


def entitle(figure, title, cautions):
    below = [line for caution in cautions
             for line in textwrap.wrap(caution, 85, max_lines=2, placeholder=" ...")]
    figure.suptitle("\n".join([title, *below]), parse_math=False)


def save(figure, path):
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph .* missing")  # of a name in a rare script
        write_atomically(path, lambda file: figure.savefig(file, format="png", dpi=200))


def draw_contacts(axis, m):
    """True contacts as squares on both sides, probabilities in grey where there is no structure; the chosen
    pairs above the diagonal as marks. Returns what the legend shows."""
    from matplotlib.colors import to_rgb
    from matplotlib.patches import Patch
    position = np.arange(m.protein.length)
    touching = m.true < CONTACT_DISTANCE  # False where unknown
    image = np.ones((*touching.shape, 3))
    if not m.precision:
        image -= 0.7 * m.probability[:, :, None]
    image[touching] = to_rgb(CONTACT)
    image[np.abs(position[:, None] - position) < SEPARATION] = to_rgb(NEAR)
    axis.imshow(image, origin="upper")
    i, j = m.chosen
    right = touching[i, j] | (not m.precision)
    width = float(np.clip(0.75 * 72 * PANEL / len(position), 3.4, 7))  # of a mark, in points
    label = f"top L/2, right: {right.sum()}" if m.precision else f"the {len(i)} most probable (L/2)"
    legend = [Patch(facecolor=CONTACT, label=f"contact (CB < {CONTACT_DISTANCE:g} Å)")] * bool(m.precision)
    legend.append(Patch(facecolor=NEAR, label=f"|i-j| < {SEPARATION}, not counted"))
    legend += axis.plot(j[right], i[right], "o", color=RIGHT, markeredgewidth=0, markersize=width, zorder=3,
                        label=label)
    if m.precision:
        legend += axis.plot(j[~right], i[~right], "D", color="white", markeredgecolor=WRONG, zorder=3,
                            markeredgewidth=width / 4.5, markersize=0.75 * width,
                            label=f"wrong: {(~right).sum()}")
    if m.missing.any():
        legend.append(Patch(facecolor="white", edgecolor=HATCH, hatch="////", label="no coordinates"))
    return legend


def draw_distances(axis, m):
    shown = m.distances
    if m.precision:
        both = np.triu(m.distances, 1) + np.tril(np.nan_to_num(m.true, nan=0.0), -1)
        shown = np.ma.masked_where(np.isnan(m.true) & np.tri(m.protein.length, dtype=bool), both)
    from matplotlib.colors import LinearSegmentedColormap
    return axis.imshow(shown, origin="upper", vmin=0, vmax=FAR,
                       cmap=LinearSegmentedColormap.from_list("near to far", NEAR_TO_FAR))


def dress(axis, m, title):
    """What both panels share: the file's numbers, the diagonal, hatched missing residues."""
    axis.set_title(title, fontsize=11)
    positions, labels = ticks(m.protein.numbers)
    axis.set_xticks(positions, labels)
    axis.set_yticks(positions, labels)
    size = m.protein.length
    counted = m.protein.numbers == tuple(map(str, range(1, size + 1)))
    what = "residue" if counted else "residue number in the structure file"
    axis.set(xlabel=what, ylabel=what)
    axis.plot([-0.5, size - 0.5], [-0.5, size - 0.5], color="0.6", linewidth=0.7)
    for first, last in runs(m.missing):
        for span in (axis.axvspan, axis.axhspan):
            span(first - 0.5, last + 0.5, facecolor="none", edgecolor=HATCH, hatch="////", linewidth=0)
    axis.set(xlim=(-0.5, size - 0.5), ylim=(size - 0.5, -0.5))
