#!/usr/bin/env python3
"""Draw one protein's experimental structure and predicted folds of it side by side, as PNG.

    python benchmarks/plot_folds.py x.a3m x.pdb:A fold/x.json fewer_rows/x.json --output docs/fold.png

The JSON files are those that `--fold ALIGNMENT --structure x.pdb:A` writes, beside their PDB files; the
alignment says which residues there are. Needs gemmi and matplotlib.
"""
import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))
from fusion_lab.training import errors

errors.begin(__name__, "torch")

from fusion_lab.measuring.plotting import require_matplotlib
from fusion_lab.training.errors import exit_code
from fusion_lab.training.files import read_json
from fusion_lab.training.flags import Parser
from tiny_openfold.proteins import fold_pictures, maps
from tiny_openfold.proteins.files import load_protein, read_structure, split_structure_argument
from tiny_openfold.proteins.geometry import CA


def draw(output, protein, folds):
    """protein: a Protein with its structure; folds: [(result of --fold, backbone (L, 4, 3))]."""
    require_matplotlib()
    from matplotlib.figure import Figure
    figure = Figure(figsize=(1.95 * (len(folds) + 1), 3.0), layout="constrained")
    first, *others = figure.subplots(1, len(folds) + 1)
    places = fold_pictures.turned(protein.backbone[:, CA])
    fold_pictures.draw_fold(first, f"{maps.printable(protein.name)}\nexperiment", protein.sequence,
                            protein.backbone, places, [fold_pictures.EXPERIMENT] * protein.length)
    for axis, (result, backbone) in zip(others, folds, strict=True):
        title = f"from {result['rows']:,} rows\nTM-score {result['scores']['tm_score']:.2f}"
        fold_pictures.draw_fold(axis, title, protein.sequence, backbone,
                                fold_pictures.fitted(backbone[:, CA], places),
                                fold_pictures.colours(result["plddt_by_residue"]))
    shown = [each for result, _ in folds for each in result["plddt_by_residue"]]
    figure.legend(handles=fold_pictures.legend(shown), loc="outside lower center", frameon=False, ncols=4,
                  fontsize=9)
    maps.save(figure, output)


def run(argv=None):
    """Draw what the command line names; returns the exit code. Raises UserError."""
    parser = Parser(prog="plot_folds.py", description=__doc__)
    parser.add_argument("alignment", metavar="ALIGNMENT")
    parser.add_argument("structure", metavar="STRUCTURE[:CHAIN]")
    parser.add_argument("folds", metavar="FOLD.json", nargs="+", type=pathlib.Path)
    parser.add_argument("--output", metavar="FILE", required=True)
    given = parser.parse_args(argv)
    protein = load_protein(given.alignment, *split_structure_argument(given.structure))
    draw(given.output, protein, [(read_json(path), read_structure(path.with_suffix(".pdb"))[0].backbone)
                                 for path in given.folds])
    return 0


if __name__ == "__main__":
    sys.exit(exit_code(run, None, "plot_folds.py"))
