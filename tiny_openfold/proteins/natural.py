"""The world `natural`: alignments like real ones, drawn from a Potts model of a fold along a tree.

Contacts of a fold get couplings between amino acids, columns get preferences by burial and conservation, and
rows evolve: from a root through clades to leaves, by Gibbs sampling, so that relatives resemble each other
and coupled columns change together. Then gaps, inherited as they are in nature. The constants were fitted to
real families (measured at e77e90b).

All of it is tensor operations, on the device that trains. Letters: B proteins, S residues, n rows at a level
of the tree, A = 20 amino acids. DISCREPANCY: a sweep draws a share of the sites at once, given the others as
they were, so it is not exactly the Potts model's own distribution.
"""
import math
import threading
from functools import lru_cache

import torch
from torch.nn.functional import one_hot

from tiny_openfold.proteins.files import GAP

A = 20
# Of ACDEFGHIKLMNPQRSTVWY: hydrophobicity (Kyte and Doolittle 1982), volume in Å^3 (Zamyatnin 1972), charge.
HYDROPHOBICITY = (1.8, 2.5, -3.5, -3.5, 2.8, -0.4, -3.2, 4.5, -3.9, 3.8,
                  1.9, -3.5, -1.6, -3.5, -4.5, -0.8, -0.7, 4.2, -0.9, -1.3)
VOLUME = (88.6, 108.5, 111.1, 138.4, 189.9, 60.1, 153.2, 166.7, 168.6, 166.7,
          162.9, 114.1, 112.7, 143.8, 173.4, 89.0, 116.1, 140.0, 227.8, 193.6)
CHARGE = (0, 0, -1, -1, 0, 0, 0.3, 0, 1, 0, 0, 0, 0, 0, 1, 0, 0, 0, 0, 0)
LIKE = (1.0, -1.0, -1.0)  # hydrophobic residues seek their like; volumes and charges make up for each other
# Share of the amino acids in proteins, UniProtKB/Swiss-Prot, percent.
COMMON = (8.25, 1.38, 5.46, 6.72, 3.86, 7.07, 2.27, 5.91, 5.80, 9.65,
          2.41, 4.06, 4.74, 3.93, 5.53, 6.64, 5.35, 6.86, 1.10, 2.92)

NEAR, FAR = 6.5, 8.5       # Å between CB atoms: coupled in full, not at all
PAIRS = 8                  # of coupled residues, at most, for each residue
COUPLED = 0.9              # share of contacts that are coupled
STRENGTH, SPREAD = 0.6, 0.5  # of couplings; spread: of a logarithm
ALONG = 0.8                # couplings of residues less than five apart along the chain, relative to others
CHEMICAL, OWN = 0.45, 0.55   # parts of a coupling: by LIKE; any, of rank 2, for this pair alone
PREFERENCE, PREFERENCES = 0.55, 0.6  # of columns for amino acids; spread over columns
BURIAL = 0.5               # how much of that is hydrophobicity by burial
CONSERVED = 0.10           # share of columns with one dominant amino acid
FAMILIES = 0.4             # spread of all of this over families
TREE = ((6, 10), (40, 5), (None, 6))  # clades at a level (None: the leaves), sweeps since the level above
DRIFT = (0.55, 0.55, 0.0)  # how far the preferences of a clade move from those of the one above
AT_ONCE, ACCEPTED = 0.4, 0.7  # share of the sites that a sweep draws; of the rows that take a new letter
BURN_IN = 25               # sweeps of the root
GAPS, GAP_LENGTH = 0.002, 2.0  # chance that a gap begins at a site; its mean length
FRAGMENTS, FLANKS = 0.04, 0.3  # share of rows cut short; of ends of the chain outside of the family


class Draw:
    """Random numbers of one generator, on its device."""

    def __init__(self, generator):
        self.how = dict(generator=generator, device=generator.device)

    def uniform(self, *shape):
        return torch.rand(shape, **self.how)

    def normal(self, *shape):
        return torch.randn(shape, **self.how)

    def factor(self, *shape, spread=FAMILIES):
        """About 1, log-normal."""
        return torch.exp(spread * self.normal(*shape))

    def letters(self, logits):
        """One for each distribution over the last dimension."""
        race = torch.empty_like(logits).exponential_(generator=self.how["generator"])
        return (logits - race.log_()).argmax(-1)


@lru_cache
def tables(device):
    """On this device: the properties (A, 3), each with mean 0 and variance 1; how they attract (3,);
    logarithms of COMMON (A,). Kept, because nothing can be copied while a CUDA graph is captured."""
    table = torch.tensor([HYDROPHOBICITY, VOLUME, CHARGE], device=device).T
    table = (table - table.mean(0)) / table.std(0, correction=0)
    return table, torch.tensor(LIKE, device=device), torch.tensor(COMMON, device=device).log()


def couplings(draw, distances):
    """(B, S*A, S*A), symmetric: what a letter at one site adds to the logit of a letter at another.
    distances (B, S, S) in Å."""
    samples, size = distances.shape[:2]
    site = torch.arange(size, device=distances.device)
    apart = site[None, :] - site[:, None]
    weight = ((FAR - distances) / (FAR - NEAR)).clamp(0, 1) * (apart > 0)
    weight = weight * (1 - (1 - ALONG) * (apart < 5)) * draw.factor(samples, size, size, spread=SPREAD)
    share = COUPLED * draw.factor(samples, 1, 1).clamp(max=1.4)
    weight = weight * (draw.uniform(samples, size, size) < share) * STRENGTH * draw.factor(samples, 1, 1)
    weight, pair = weight.flatten(1).topk(min(PAIRS * size, size * size))  # (B, K)
    left, right = draw.normal(2, *pair.shape, 2, A)  # (B, K, 2, A)
    own = torch.einsum("bkra,bkrc->bkac", left, right) / math.sqrt(2)
    table, like, _ = tables(distances.device)
    mixed = draw.normal(*pair.shape, 3).abs() * like
    energy = OWN * own + CHEMICAL * torch.einsum("bkp,ap,cp->bkac", mixed, table, table)
    energy = energy - energy.mean(2, keepdim=True) - energy.mean(3, keepdim=True) + energy.mean((2, 3), True)
    matrix = distances.new_zeros(samples, size * size, A, A)
    matrix.scatter_(1, pair[..., None, None].expand(-1, -1, A, A), weight[..., None, None] * energy)
    matrix = matrix.view(samples, size, size, A, A).transpose(2, 3).reshape(samples, size * A, size * A)
    return matrix + matrix.transpose(1, 2)


def preferences(draw, distances):
    """(B, S, A): logits of letters by themselves."""
    samples, size = distances.shape[:2]
    properties, _, common = tables(distances.device)
    around = (distances < 10).sum(2).float()
    buried = (around - around.mean(1, keepdim=True)) / (around.std(1, keepdim=True) + 1e-3)
    scale = PREFERENCE * draw.factor(samples, 1, 1) * draw.factor(samples, size, 1, spread=PREFERENCES)
    liked = BURIAL * buried[..., None] * properties[:, 0] + draw.normal(samples, size, A)
    dominant = one_hot(draw.letters(common.expand(samples, size, A)), A)
    conserved = (draw.uniform(samples, size, 1) < CONSERVED) * (3 + 5 * draw.uniform(samples, size, 1))
    return common + scale * liked + dominant * conserved


def evolve(draw, rows, sweeps, coupling, logits, accepted):
    """rows (B, n, S) of letters after some sweeps; logits (B, n or 1, S, A); accepted (B, n, 1) or a number:
    the chance that a row takes the letter drawn."""
    size = rows.shape[2]
    for _ in range(sweeps):
        sites = draw.uniform(size).argsort()[:max(int(AT_ONCE * size), 1)]
        columns = coupling.unflatten(2, (size, A)).index_select(2, sites).flatten(2)  # (B, S*A, sites*A)
        field = one_hot(rows, A).flatten(2).to(coupling.dtype) @ columns
        field = field.float().unflatten(2, (-1, A)) + logits.index_select(2, sites)
        drawn = draw.letters(field)
        now = rows.index_select(2, sites)
        rows = rows.index_copy(2, sites, torch.where(draw.uniform(*drawn.shape) < accepted, drawn, now))
    return rows


def inherit(x, parent):
    """x (B, n, ...) of the parents (B, m) -> (B, m, ...)."""
    index = parent.view(*parent.shape, *[1] * (x.ndim - 2)).expand(*parent.shape, *x.shape[2:])
    return x.gather(1, index)


def begin_gaps(draw, rate, rows):
    """(B, rows, S): sites in gaps that begin in these rows; rate (B, 1, S)."""
    samples, _, size = rate.shape
    site = torch.arange(size, device=rate.device)
    length = 1 + (draw.uniform(samples, rows, size).log() / math.log(1 - 1 / GAP_LENGTH)).floor()
    ends = (site + length) * (draw.uniform(samples, rows, size) < rate)
    return site < ends.cummax(2).values


def missing_ends(draw, samples, rows, size, device):
    """(B, rows, S): rows that are fragments, and ends of the chain that the family lacks."""
    site = torch.arange(size, device=device)
    cut = 0.5 * size * draw.uniform(samples, rows, 1)
    left = draw.uniform(samples, rows, 1) < 0.5
    fragment = torch.where(left, site < cut, site >= size - cut)
    fragment &= draw.uniform(samples, rows, 1) < FRAGMENTS
    flank = -6 * draw.uniform(samples, 2).log() * (draw.uniform(samples, 2) < FLANKS)
    return fragment | ((site < flank[:, :1]) | (site >= size - flank[:, 1:]))[:, None]


@torch.no_grad()
def natural_alignments(generator, coords, num_seqs):
    """(B, num_seqs, S) tokens, the query first and without gaps, for folds with CB atoms coords (B, S, 3) in
    Å on the generator's device. No step waits for the device, so that a CUDA graph can hold all of it."""
    draw, (samples, size) = Draw(generator), coords.shape[:2]
    distances = (coords[:, :, None] - coords[:, None]).norm(dim=-1)  # cdist's products would run in TF32
    coupling = couplings(draw, distances)
    coupling = coupling.bfloat16() if coupling.is_cuda else coupling
    logits = preferences(draw, distances)[:, None]
    rows = evolve(draw, draw.letters(logits), BURN_IN, coupling, logits, 1.0)  # (B, 1, S)
    gapped = torch.zeros_like(rows, dtype=torch.bool)
    gap_rate = GAPS * draw.factor(samples, 1, 1) * draw.factor(samples, 1, size, spread=1.2)
    for (clades, sweeps), drift in zip(TREE, DRIFT, strict=True):
        count = min(clades or num_seqs, num_seqs)
        parent = (draw.uniform(samples, count) ** 1.7 * rows.shape[1]).long()  # clades differ in size
        rows, gapped, logits = (inherit(x, parent) for x in (rows, gapped, logits))
        if drift:
            moved = draw.normal(samples, count, size, A) * draw.factor(samples, 1, size, 1, spread=0.5)
            logits = logits + drift * draw.factor(samples, 1, 1, 1) * moved
        accepted = ACCEPTED * draw.factor(samples, count, 1, spread=0.5) * draw.factor(samples, 1, 1)
        rows = evolve(draw, rows, sweeps, coupling, logits, accepted.clamp(max=1))
        gapped = gapped | begin_gaps(draw, gap_rate, count)
    gapped |= missing_ends(draw, samples, num_seqs, size, coords.device)
    gapped[:, 0] = False
    return rows.masked_fill(gapped, GAP)


class GraphedWorld:
    """natural_alignments() for one shape on a GPU: some thousand small kernels in one CUDA graph, on a stream
    of its own beside the training. A replay allocates nothing, which would break the capture of a training
    step that runs meanwhile."""

    def __init__(self, device, coords, num_seqs):
        self.generator, self.stream = torch.Generator(device), torch.cuda.Stream(device)
        self.lock = threading.Lock()  # an evaluation may ask while the next batch is made
        with torch.cuda.stream(self.stream):
            self.coords = coords.to(device)
            natural_alignments(self.generator, self.coords, num_seqs)  # what happens once, before the capture
        self.stream.synchronize()
        self.graph = torch.cuda.CUDAGraph()
        self.graph.register_generator_state(self.generator)
        with torch.cuda.graph(self.graph, stream=self.stream, capture_error_mode="thread_local"):
            self.rows = natural_alignments(self.generator, self.coords, num_seqs).to(torch.uint8)

    def __call__(self, seed, coords):
        """(B, num_seqs, S) tokens on the CPU."""
        with self.lock, torch.cuda.stream(self.stream):
            self.coords.copy_(coords)
            self.generator.manual_seed(seed)
            self.graph.replay()
            return self.rows.cpu()
