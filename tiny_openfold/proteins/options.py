"""Options of training on proteins: where they come from, which are held out, what is drawn. No torch."""
import os
from dataclasses import dataclass

from evoformer_kernels import limits
from fusion_lab.training import options
from fusion_lab.training.options import option

# The shipped model, of predictions without --resume and of --init-from shipped
MODEL = os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "models", "families.pt")
# Fields that a mode takes which predicts something of one alignment.
OF_PREDICTIONS = ("structure", "query", "min_coordinates", "resume", "eval_seqs", "output", "seed", "device",
                  "use_amp", "amp_dtype", "use_tf32", "deterministic", "json")


@dataclass(frozen=True)
class TrainingConfig(options.TrainingConfig):
    """Real proteins and which are held out, artificial ones, pictures, predictions."""
    data: str | None = option(
        None, "directory of real proteins: NAME.cif or NAME.pdb beside an alignment NAME.a3m, .a2m, .sto, "
        ".fasta or .aln", type=str, metavar="DIR", read=True)
    holdout: str | None = option(
        None, "families kept out of training, NAME[,NAME...]", type=str, metavar="NAMES")
    holdout_fraction: float | None = option(
        None, "share of families kept out of training", low=0.0, below=1.0, type=float)
    synthetic_world: str = option("paired", "artificial proteins: paired (easy: one table of partners) or "
                                  "natural (Potts models of folds, along a tree)",
                                  choices=("paired", "natural"))
    real_folds: str | None = option(
        None, "with --synthetic-world natural: NPZ file of real chains, pieces of which are half of the "
        "folds (docs/proteins.md)", type=str, metavar="FILE", read=True)
    eval_seqs: int | None = option(
        None, "alignment rows in the evaluation of real proteins; default: --num-seqs, with --contacts and "
        "--fold 512", low=1, type=int)
    extra_seqs: int = option(1024, "alignment rows that --coevolution reads in training; an evaluation reads "
                                   "all, at most 4096", low=1)
    validate_fraction: float | None = option(
        None, "share of the families neither trained on nor held out, whose contact precision decides for "
        "--early-stopping and --save-best", low=1e-6, below=1.0, type=float)
    msa: str | None = option(None, "alignment of one real protein", type=str, metavar="FILE", read=True)
    structure: str | None = option(None, "its structure, FILE or FILE:CHAIN", type=str, metavar="FILE",
                                   read=True)
    query: str | None = option(None, "name of the query row in --msa, --contacts or --fold; default: the "
                               "first row", type=str, metavar="NAME")
    min_coordinates: float = option(0.1, "share of a real protein's residues that must have coordinates; "
                                         "fewer are refused", low=0.0, at_most=1.0)
    plot_contacts: str | None = option(
        None, "directory for contact maps of held-out proteins (PNG, and the numbers as TSV)", type=str,
        training_only=True, metavar="DIR")
    contacts: list | None = option(
        None, "predict contacts and distances of alignments (files, directories of them, - for standard "
        "input), by the model of this project or that of --resume (docs/contacts.md)", type=str,
        metavar="ALIGNMENT", takes=OF_PREDICTIONS, several=True, read=True)
    fold: list | None = option(
        None, "predict the structure of each alignment's first protein, by the same models "
        "(docs/folding.md)", type=str, metavar="ALIGNMENT", takes=OF_PREDICTIONS, several=True, read=True)
    output: str | None = option(
        None, "directory for the files of --contacts and --fold; default: contacts or fold", type=str,
        short="-o", metavar="DIR")

    def __post_init__(self):
        super().__post_init__()
        if self.init_from == "shipped":
            object.__setattr__(self, "init_from", MODEL)
        if self.holdout and self.holdout_fraction is not None:
            self.refuse("holdout", "allowed without --holdout-fraction only")
        predicts = self.contacts is not None or self.fold is not None
        if not predicts and (self.msa is None) != (self.structure is None):
            given, missing = (("msa", "--structure") if self.msa else
                              ("structure", "--msa or --contacts or --fold"))
            self.refuse(given, f"must come together with {missing}")
        if self.output is not None and not predicts:
            self.refuse("output", "needs --contacts or --fold")
        for name, needed in (("holdout", "data"), ("holdout_fraction", "data"), ("validate_fraction", "data"),
                             ("early_stopping", "validate_fraction"),
                             ("save_best", "validate_fraction"), *[("query", "msa")] * (not predicts)):
            self.require(name, needed)
        if self.data and self.msa:
            self.refuse("msa", "allowed without --data only")
        if (self.data or self.msa) and self.synthetic_world != "paired":
            self.refuse("synthetic_world", "not with real proteins")
        if self.real_folds is not None and self.synthetic_world != "natural":
            self.refuse("real_folds", "needs --synthetic-world natural")


def arithmetic_of(training, on_gpu):
    """What gpu_arithmetic() of fast_evoformer.py says of the tensors of such a training."""
    if training.use_amp:
        return "half" if on_gpu and limits.HAS_TRITON else None
    return "float32" if on_gpu and not training.use_tf32 else None
