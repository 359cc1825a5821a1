"""The blocks of each project that hold triangle layers, at small widths, and how the project calls them."""
import contextlib
import copy
import warnings
from typing import NamedTuple

import torch

from tests.kernels.clients import ours, sources

C, HEADS, WIDTH = 32, 2, 16
TRIANGLES = dict(c_hidden_mul=C, c_hidden_pair_att=WIDTH, no_heads_pair=HEADS)
OF_MSA = dict(c_m=C, c_z=C, c_hidden_msa_att=8, c_hidden_opm=8, no_heads_msa=2, transition_n=2,
              msa_dropout=0., pair_dropout=0., opm_first=True, fuse_projection_weights=False,
              inf=1e9, eps=1e-5, **TRIANGLES)
OPENFOLD_TEMPLATE = dict(c_t=C, c_hidden_tri_mul=C, c_hidden_tri_att=WIDTH, no_heads=HEADS,
                         pair_transition_n=2, dropout_rate=0., tri_mul_first=True,
                         fuse_projection_weights=False, inf=1e9)
OPENFOLD3 = dict(transition_type="swiglu")
OPENFOLD3_PAIR = dict(c_s=C, c_z=C, c_hidden_pair_bias=8, no_heads_pair_bias=2, transition_n=2,
                      pair_dropout=0., fuse_projection_weights=False, inf=1e9, **TRIANGLES, **OPENFOLD3)
BOLTZ = dict(token_z=C, pairwise_head_width=WIDTH, pairwise_num_heads=HEADS)
SHAPES = {"s": "S", "z": "SS", "m": "RS", "t": "TSS"}  # of a single representation, pairs, an MSA, templates
ROWS, TEMPLATES = 3, 2
PLAIN = contextlib.nullcontext()


class Block(NamedTuple):
    """How a block is made and called. tensors and masks: {argument: which of SHAPES}; a result has the shape
    of the argument whose name stands in results, None is returned for others."""
    module: str
    name: str
    arguments: dict
    tensors: dict
    masks: dict
    results: tuple
    calls: tuple = (2, 2)  # of our attention and multiplication, through cuEquivariance's names
    said: str = "$."  # by patch(), of a layer that keeps its own forward; nothing matches this


OF3 = "core.model.latent"
BLOCKS = {
    "openfold": {
        "MSA": Block("model.evoformer", "EvoformerBlock", dict(no_column_attention=False, **OF_MSA),
                     dict(m="m", z="z"), dict(msa_mask="m", pair_mask="z"), "mz"),
        "extra MSA": Block("model.evoformer", "ExtraMSABlock", dict(ckpt=False, **OF_MSA),
                           dict(m="m", z="z"), dict(msa_mask="m", pair_mask="z"), "mz"),
        "fused": Block("model.evoformer", "EvoformerBlock",
                       dict(no_column_attention=False, **OF_MSA | dict(fuse_projection_weights=True)),
                       dict(m="m", z="z"), dict(msa_mask="m", pair_mask="z"), "mz"),
        "templates": Block("model.template", "TemplatePairStackBlock", OPENFOLD_TEMPLATE,
                           dict(z="t"), dict(mask="t"), "t")},
    "openfold3": {
        "pair": Block(f"{OF3}.pairformer", "PairFormerBlock", OPENFOLD3_PAIR, dict(s="s", z="z"),
                      dict(single_mask="s", pair_mask="z"), "sz"),
        "MSA": Block(f"{OF3}.msa_module", "MSAModuleBlock", OF_MSA | OPENFOLD3, dict(m="m", z="z"),
                     dict(msa_mask="m", pair_mask="z"), "mz"),
        "templates": Block(f"{OF3}.template_module", "TemplatePairBlock",
                           dict(ckpt_per_template=False, **OPENFOLD_TEMPLATE, **OPENFOLD3),
                           dict(t="t"), dict(mask="t"), "t", (4, 0))},
    "protenix": {
        "pair": Block("model.modules.pairformer", "PairformerBlock", dict(
            c_s=0, c_z=C, num_intermediate_factor=2, dropout=0., **TRIANGLES), dict(s=None, z="z"),
            dict(pair_mask="z"), "-z"),
        "MSA": Block("model.modules.pairformer", "MSABlock", dict(
            c_m=C, c_z=2 * C, c_hidden=8, msa_dropout=0., pair_dropout=0., msa_max_size=4,
            hidden_scale_up=True),
            dict(m="m", z="z"), dict(pair_mask="z"), "mz"),
        "templates": Block("model.modules.pairformer", "PairformerStack", dict(
            c_s=0, c_z=C, n_blocks=1, num_intermediate_factor=2, dropout=0.), dict(s=None, z="z"),
            dict(pair_mask="z"), "-z", (2, 0), ".*another inner width than 32")},  # 128
    "boltz": {
        "pair": Block("model.layers.pairformer", "PairformerLayer",
                      dict(token_s=C, num_heads=2, dropout=0., v2=True, **BOLTZ), dict(s="s", z="z"),
                      dict(mask="s", pair_mask="z"), "sz"),
        "MSA": Block("model.modules.trunkv2", "MSALayer",
                     dict(msa_s=C, msa_dropout=0., z_dropout=0., **BOLTZ), dict(z="z", m="m"),
                     dict(token_mask="z", msa_mask="m"), "zm"),
        "templates": Block("model.layers.pairformer", "PairformerNoSeqModule",
                           dict(num_blocks=1, dropout=0., **BOLTZ), dict(z="z"), dict(pair_mask="z"), "z")}}
OLDER = {  # blocks that differ from the release's; attention over the single representation is called, too
    ("commits/openfold3", "templates"): BLOCKS["openfold3"]["templates"]._replace(tensors=dict(z="t")),
    ("commits/openfold3", "pair"): BLOCKS["openfold3"]["pair"]._replace(calls=(3, 2))}
BLOCKS["boltzgen"] = {
    "pair": BLOCKS["boltz"]["pair"]._replace(
        arguments=dict(token_s=C, num_heads=2, dropout=0., **BOLTZ)),
    "MSA": BLOCKS["boltz"]["MSA"]._replace(
        module="model.modules.trunk",
        arguments=BLOCKS["boltz"]["MSA"].arguments | dict(miniformer_blocks=False)),
    "templates": BLOCKS["boltz"]["templates"]}
KERNELS = {  # how a project is asked for cuEquivariance; OpenFold cannot be
    "openfold3": dict(use_cueq_triangle_kernels=True), "boltz": dict(use_kernels=True),
    "boltzgen": dict(use_kernels=True),
    "protenix": dict(triangle_attention="cuequivariance", triangle_multiplicative="cuequivariance")}


BATCH = {"protenix": (), "openfold": (1,), "openfold3": (1,), "boltz": (1,), "boltzgen": (1,)}


class Problem:
    """A block of a project, its inputs, and gradients of its results."""

    def __init__(self, where, kind, S, masked, device="cpu"):
        self.of, self.masked = sources.PROJECTS[where], masked
        self.project = sources.project(where)
        self.block = OLDER.get((where, kind), BLOCKS[self.of][kind])
        torch.manual_seed(0)
        with self.project.loaded():
            made = getattr(self.project.load(self.block.module), self.block.name)
            self.model = made(**self.block.arguments)
        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter.add_(torch.randn_like(parameter), alpha=0.2)
        self.model.to(device).train()  # without dropout
        sizes = dict(S=S, R=ROWS, T=TEMPLATES)
        shape = {key: (*BATCH[self.of], *(sizes[n] for n in value)) for key, value in SHAPES.items()}
        there = torch.ones(S, device=device)
        if masked:
            there[-(S // 8 + 1):] = 0  # as batches are padded
        self.there = {key: (there[:, None] * there if key in "zt" else there).expand(shape[key])
                      for key in SHAPES}
        channels = {key: self.block.arguments.get("c_z", C) if key == "z" else C for key in SHAPES}
        self.tensors, self.incoming = ({key: torch.randn(*shape[key], channels[key], device=device)
                                        for key in SHAPES} for _ in range(2))

    def masks(self, dtype):
        """As a project gives them; Protenix gives None for none, others ones."""
        none = self.of == "protenix" and not self.masked
        return {name: None if none else self.there[key].to(dtype) for name, key in self.block.masks.items()}

    def called(self, dtype, by, autocast, **flags):
        """(the block, its inputs, {which of SHAPES: a result}): by its own code, by the "names" of
        cuEquivariance's or by "patch". What is masked counts for nothing."""
        model = copy.deepcopy(self.model).to(dtype)
        given = {name: key and self.tensors[key].to(dtype, copy=True).requires_grad_(torch.is_grad_enabled())
                 for name, key in self.block.tensors.items()}
        if by == "names":
            flags = flags | KERNELS[self.of]
        if by == "patch":
            ours.patch(model)  # for good: a block that recomputes runs again in its backward
        with self.project.loaded(), autocast, warnings.catch_warnings():
            warnings.filterwarnings("error", ".*its own forward runs")
            warnings.filterwarnings("ignore", self.block.said)
            out = model(**given, **self.masks(dtype), **flags)
        results = zip(self.block.results, out if isinstance(out, tuple) else (out,), strict=True)
        return model, given, {key: x * self.there[key][..., None] for key, x in results if x is not None}

    def inference(self, dtype, by="own", autocast=PLAIN, **flags):
        """{which of SHAPES: a result}"""
        with torch.no_grad():
            return self.called(dtype, by, autocast, **flags)[2]

    def results(self, dtype, by="own", autocast=PLAIN, **flags):
        """The same, and gradients of inputs and parameters, by name."""
        model, given, out = self.called(dtype, by, autocast, **flags)
        sum((x * self.incoming[key]).sum() for key, x in out.items()).backward()
        return out | {f"gradient of {name}": x.grad for name, x in (*given.items(), *model.named_parameters())
                      if x is not None}


def errors(found, truth):
    """{name: norm of the difference over the norm}; infinite where one alone is None, or of another shape. A
    gradient that vanishes, as of a bias before a softmax, is a sum of others that do not."""
    least = 1e-3 * max(x.norm().item() for x in truth.values() if x is not None)

    def error(x, y):
        if x is None or y is None or x.shape != y.shape:
            return 0. if x is y else float("inf")
        return (x.double() - y.double()).norm().item() / max(y.norm().item(), least)
    assert found.keys() == truth.keys()
    return {name: error(found[name], truth[name]) for name in truth}


def wrong(found, truth, allowed):
    """The errors that are larger than this."""
    return {name: error for name, error in errors(found, truth).items() if not error <= allowed}
