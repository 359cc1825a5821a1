"""Options of training on proteins: where they come from, which are held out, what is drawn. No torch."""
from dataclasses import dataclass

from fusion_lab.training import options
from fusion_lab.training.options import option


@dataclass(frozen=True)
class Families(options.TrainingConfig):
    """Real proteins, and which are held out."""
    data: str = option(None, "directory of real proteins: NAME.cif or NAME.pdb beside an alignment NAME.a3m, "
                             ".sto or .fasta", type=str, metavar="DIR")
    holdout: str = option(None, "families kept out of training, NAME[,NAME...]", type=str, metavar="NAMES")
    holdout_fraction: float = option(None, "share of families kept out of training", low=0.0, below=1.0,
                                     type=float)

    def __post_init__(self):
        super().__post_init__()
        for name in ("holdout", "holdout_fraction"):
            self.require(name, "data")
        if self.holdout and self.holdout_fraction is not None:
            self.refuse("holdout", "allowed without --holdout-fraction only")


@dataclass(frozen=True)
class TrainingConfig(Families):
    """One protein, what is drawn, pictures."""
    eval_seqs: int = option(None, "alignment rows in the evaluation of real proteins; default: --num-seqs",
                            low=1, type=int)
    synthetic_world: str = option("paired", "built-in proteins: paired (easy: one table of partners) or "
                                  "covarying (hard, nearer to real alignments)",
                                  choices=("paired", "covarying"))
    msa: str = option(None, "alignment of one real protein", type=str, metavar="FILE")
    structure: str = option(None, "its structure, FILE or FILE:CHAIN", type=str, metavar="FILE")
    query: str = option(None, "name of the query row in --msa; default: the first row", type=str,
                        metavar="NAME")
    plot_contacts: str = option(None, "directory for contact maps of held-out proteins (PNG, and the numbers "
                                      "as TSV)", type=str, training_only=True, metavar="DIR")

    def __post_init__(self):
        super().__post_init__()
        if (self.msa is None) != (self.structure is None):
            given, missing = ("msa", "structure") if self.msa else ("structure", "msa")
            self.refuse(given, f"must come together with --{missing}")
        self.require("query", "msa")
        if self.data and self.msa:
            self.refuse("msa", "allowed without --data only")


@dataclass(frozen=True)
class DesignTraining(Families):
    """Backbones to train on, noise, design."""
    backbone_noise: float = option(0.1, "standard deviation of what is added to real coordinates in "
                                        "training, Å", low=0.0)
    design: str = option(None, "print sequences for this backbone, FILE or FILE:CHAIN, instead of training; "
                               "needs --weights", type=str, training_only=True, metavar="PDB")
    weights: str = option(None, "weights for --design: a checkpoint of this program, or the published ones",
                          type=str, training_only=True, metavar="FILE")
    temperature: float = option(0.1, "of the sampled sequences", low=1e-3)
    samples: int = option(4, "sequences to print", low=1)
    fixed: str = option(None, 'residues that keep their letter in --design: "A10-20,A35"', type=str,
                        metavar="NAMES")

    def __post_init__(self):
        super().__post_init__()
        for name, needed in (("design", "weights"), ("weights", "design"), ("fixed", "design")):
            self.require(name, needed)


@dataclass(frozen=True)
class TritonSwitches(options.Switches):
    """Triton kernels of this project, for a GPU (docs/kernels.md)."""
    enable_triton_attention: bool = option(False, "attention and its gate", ultra=True, rung=8)
    enable_triton_triangle: bool = option(False, "triangle multiplication round a batched GEMM", ultra=True,
                                          rung=9)
    enable_triton_transition: bool = option(False, "transitions, their hidden layer never in memory", rung=10)
