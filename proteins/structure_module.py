"""AlphaFold 2's structure module (supplement 1.8): from the Evoformer's representations to a backbone.

    module = InFloat32(StructureModule(c_m, c_z))
    frames, lddt_logits = module(msa[:, 0], pair, mask)    # a list of frames, one for each layer
    frames, lddt_logits = module(msa[:, 0], pair, mask, *frames[-1])    # recycled: goes on from there

Every residue is a frame: a rotation and the place of its CA. All begin at the origin, unturned; each layer
lets residues look at each other, by what they hold, by the pair representation and by how near the points lie
that they point at, and then moves each by what it saw. The layers share their weights. Reading order:
StructureModule, then the parts above it.

Letters in shapes: B samples, S residues, c channels of a residue, c_z of a pair, H heads, D width of a head,
P points of a head. Places in Å. DISCREPANCIES: no side chains (Alg. 24, 25), whose angles a backbone does not
need, so atoms of the loss are N, CA and C; each loss takes all errors clamped and a tenth of them unclamped,
where AF2 unclamps all of a tenth of its batches; attention's output begins as any layer's, not at zero: else
nothing of the pairs reaches the frames until these move (one chain, 300 steps: FAPE .74 instead of .40 Å).
"""
import functools
import math

import torch
import torch.nn.functional as F
from torch import nn
from torch.func import functional_call

from fusion_lab.kernels.precision import at_least_float32
from proteins import geometry

LAYERS = 6              # AF2: 8
CHANNELS, HEADS, HEAD = 128, 8, 16  # AF2: 384, 12, 16
QUERY_POINTS, VALUE_POINTS = 4, 8
UNIT = 10.0             # Å: places within the module are in units of this
CLAMP = 10.0            # Å, of FAPE
UNCLAMPED = 0.1         # share of the error that is not clamped
LDDT_BINS, LDDT_RADIUS, LDDT_CUTOFFS = 50, 15.0, (0.5, 1.0, 2.0, 4.0)
CONFIDENCE_WEIGHT = 0.01
EPSILON = 1e-4          # Å^2, or the gradient of a length of 0 is infinite


def linear(c_in, c_out, zero=False):
    """nn.Linear with bias 0, LeCun or zero (supplement 1.11.4)."""
    layer = nn.Linear(c_in, c_out)
    nn.init.zeros_(layer.weight) if zero else nn.init.trunc_normal_(layer.weight, std=c_in ** -0.5)
    nn.init.zeros_(layer.bias)
    return layer


def turned(rotation, place, points):
    """Points in the frames' own coordinates -> in everybody's: rotation (B, S, 3, 3), place (B, S, 3),
    points (B, S, ..., 3) with at least one dimension between. One product for each residue."""
    there = points.flatten(2, -2) @ rotation.mT + place[:, :, None]
    return there.view(points.shape)


def turned_back(rotation, place, points):
    """The inverse of turned()."""
    there = (points.flatten(2, -2) - place[:, :, None]) @ rotation
    return there.view(points.shape)


class InvariantPointAttention(nn.Module):
    """Alg. 22. Moving all frames together changes nothing.

    fused: scalars and points of a head are one vector each for q, k and v, so that scores are one product
    and values another: -|q - k|^2 / 2 is q.k - |q|^2 / 2 - |k|^2 / 2. Else each as the paper has it."""

    def __init__(self, c, c_z, fused=True):
        super().__init__()
        self.fused = fused
        self.sizes = HEADS * HEAD, HEADS * QUERY_POINTS * 3, HEADS * VALUE_POINTS * 3
        scalars, query_points, value_points = self.sizes
        self.q = linear(c, scalars + query_points)
        self.k = linear(c, scalars + query_points)
        self.v = linear(c, scalars + value_points)
        self.bias = nn.Linear(c_z, HEADS, bias=False)
        self.weight = nn.Parameter(torch.full((HEADS,), math.log(math.e - 1)))  # softplus of it is 1
        self.out = linear(HEADS * (HEAD + 4 * VALUE_POINTS + c_z), c)

    def forward(self, x, pair, rotation, place, mask):
        """x (B, S, c), pair (B, S, S, c_z), frames, mask (B, S; 1 = present) -> (B, S, c)"""
        q, k, v = (self.scalars_and_points(proj(x), rotation, place) for proj in (self.q, self.k, self.v))
        bias = self.bias(pair).permute(0, 3, 1, 2)  # (B, H, S, S)
        bias = bias + (mask[:, None, None, :] - 1) * 1e6
        share = math.sqrt(1 / 3)  # three summands of equal variance
        near = share * math.sqrt(2 / (9 * QUERY_POINTS)) * F.softplus(self.weight)[:, None, None]
        scores = self.joined if self.fused else self.apart
        scores = scores(q, k, share * HEAD ** -0.5, near) + share * bias
        weights = scores.softmax(-1)  # (B, H, S, S)
        scalars, points = self.values(weights, v)
        points = turned_back(rotation, place, points)  # (B, S, H, P, 3)
        lengths = (points.square().sum(-1) + 1e-8).sqrt()
        pairs = torch.einsum("bhij,bijc->bihc", weights, pair)
        return self.out(torch.cat([scalars, points.flatten(3), lengths, pairs], -1).flatten(2))

    def scalars_and_points(self, projected, rotation, place):
        """(B, S, H, D) and (B, S, H, P, 3), those in everybody's coordinates."""
        scalars, points = projected.split([self.sizes[0], projected.shape[-1] - self.sizes[0]], -1)
        points = points.unflatten(-1, (HEADS, -1, 3))
        return scalars.unflatten(-1, (HEADS, HEAD)), turned(rotation, place, points)

    @staticmethod
    def apart(q, k, scale, near):
        """Scores (B, H, S, S) as the paper has them: a product of scalars, then distances of points."""
        away = q[1][:, :, None] - k[1][:, None]  # (B, S, S, H, P, 3)
        squares = away.square().sum((-1, -2)).permute(0, 3, 1, 2)
        return scale * torch.einsum("bihd,bjhd->bhij", q[0], k[0]) - near / 2 * squares

    @staticmethod
    def joined(q, k, scale, near):
        """The same by one product."""
        near = near[:, :, 0]  # (H, 1)
        ends = [-near / 2 * points.square().sum((-1, -2))[..., None] for _, points in (q, k)]  # (B, S, H, 1)
        one = torch.ones_like(ends[0])
        left = torch.cat([scale * q[0], near * q[1].flatten(3), ends[0], one], -1)
        right = torch.cat([k[0], k[1].flatten(3), one, ends[1]], -1)
        return left.transpose(1, 2) @ right.permute(0, 2, 3, 1)

    def values(self, weights, v):
        """Weighted means (B, S, H, D) and (B, S, H, P, 3)."""
        if not self.fused:
            return (torch.einsum("bhij,bjhd->bihd", weights, v[0]),
                    torch.einsum("bhij,bjhpx->bihpx", weights, v[1]))
        both = (weights @ torch.cat([v[0], v[1].flatten(3)], -1).transpose(1, 2)).transpose(1, 2)
        return both[..., :HEAD], both[..., HEAD:].unflatten(-1, (VALUE_POINTS, 3))


class StructureModule(nn.Module):
    """Alg. 20 without side chains, and the confidence head (Alg. 29)."""

    def __init__(self, c_m, c_z, fused=True):
        super().__init__()
        self.norm_single, self.norm_pair = nn.LayerNorm(c_m), nn.LayerNorm(c_z)
        self.single = linear(c_m, CHANNELS)
        self.attention = InvariantPointAttention(CHANNELS, c_z, fused)
        self.norm_attention, self.norm_transition = nn.LayerNorm(CHANNELS), nn.LayerNorm(CHANNELS)
        self.transition = nn.Sequential(linear(CHANNELS, CHANNELS), nn.ReLU(), linear(CHANNELS, CHANNELS),
                                        nn.ReLU(), linear(CHANNELS, CHANNELS, zero=True))
        self.move = linear(CHANNELS, 6, zero=True)  # Alg. 23
        self.confidence = nn.Sequential(nn.LayerNorm(CHANNELS), linear(CHANNELS, CHANNELS), nn.ReLU(),
                                        linear(CHANNELS, LDDT_BINS, zero=True))

    def forward(self, single, pair, mask, rotation=None, place=None):
        """single (B, S, c_m), pair (B, S, S, c_z), mask (B, S), frames to begin with (default: the origin) ->
        ([(rotation (B, S, 3, 3), place (B, S, 3) in Å)] of every layer, lDDT logits (B, S, LDDT_BINS))"""
        x, pair = self.single(self.norm_single(single)), self.norm_pair(pair)
        if rotation is None:
            rotation = torch.eye(3, dtype=x.dtype, device=x.device).expand(*x.shape[:2], 3, 3)
            place = rotation.new_zeros(*x.shape[:2], 3)
        place = place / UNIT
        frames = []
        for _ in range(LAYERS):
            x = self.norm_attention(x + self.attention(x, pair, rotation.detach(), place, mask))
            x = self.norm_transition(x + self.transition(x))
            turn, shift = self.move(x).split(3, -1)
            place = place + (rotation.detach() @ shift[..., None]).squeeze(-1)
            rotation = rotation.detach() @ rotation_of(turn)  # no gradient along the chain of rotations
            frames.append((rotation, UNIT * place))
        return frames, self.confidence(x)


class InFloat32(nn.Module):
    """A module on inputs and weights in float32 at least, whatever autocast or the weights' own dtype says:
    16 bits are too few for places of hundreds of Å."""

    def __init__(self, module):
        super().__init__()
        self.module = module

    def forward(self, *inputs):
        dtype = at_least_float32(inputs[0].dtype)
        weights = {name: weight.to(dtype) for name, weight in self.module.named_parameters()}
        with torch.autocast(inputs[0].device.type, enabled=False):
            return functional_call(self.module, weights, tuple(x.to(dtype) for x in inputs))


def rotation_of(turn):
    """Rotation matrices (..., 3, 3) of the quaternions (1, b, c, d), made units (Alg. 23). turn (..., 3)."""
    unit = F.normalize(F.pad(turn, (1, 0), value=1.0), dim=-1)
    cross = (unit[..., 1:] @ crosses(turn.dtype, turn.device)).unflatten(-1, (3, 3))
    half = unit[..., :1, None] * cross + cross @ cross
    return torch.eye(3, dtype=turn.dtype, device=turn.device) + 2 * half


@functools.cache
def crosses(dtype, device):
    """(3, 9): a vector times this is the matrix of the cross product with it. Few launches make rotations so;
    entry by entry they were half of the module's. Kept, since a copy to a GPU waits for all that runs."""
    axes = torch.eye(3, dtype=dtype)
    return torch.linalg.cross(axes[:, None], axes[None], dim=-1).mT.flatten(1).to(device)


# --- Losses ---------------------------------------------------------------------------------------------


def fape(frames, true, atoms, true_atoms, mask, unclamped=UNCLAMPED):
    """Frame aligned point error (Alg. 28), (B,) Å / 10: every atom seen from every frame. frames, true:
    (rotation, place); atoms, true_atoms (B, S, A, 3); mask (B, S): which residues count; unclamped: share of
    the error that counts however large it is."""
    seen, there = (seen_from(*own, points.flatten(1, 2)) for own, points in ((frames, atoms),
                                                                              (true, true_atoms)))
    error = ((seen - there).square().sum(-1) + EPSILON).sqrt()  # (B, S, S * A)
    error = (1 - unclamped) * error.clamp(max=CLAMP) + unclamped * error
    known = mask[:, :, None] * mask.repeat_interleave(atoms.shape[2], 1)[:, None]
    return (error * known).sum((1, 2)) / known.sum((1, 2)).clamp(min=1) / UNIT


def seen_from(rotation, place, points):
    """points (B, P, 3) in the coordinates of each frame, (B, S, P, 3)."""
    return (points[:, None] - place[:, :, None]) @ rotation


def true_lddt(place, true, mask):
    """lDDT-CA (B, S) of places against true ones, 0 to 1."""
    found, wanted = ((x[:, :, None] - x[:, None] + 1e-6).norm(dim=-1) for x in (place, true))
    near = (wanted < LDDT_RADIUS) * mask[:, :, None] * mask[:, None]
    near = near * (1 - torch.eye(mask.shape[1], dtype=near.dtype, device=near.device))
    error = (found - wanted).abs()
    kept = sum((error < cutoff).to(near.dtype) for cutoff in LDDT_CUTOFFS) / len(LDDT_CUTOFFS)
    return (kept * near).sum(-1) / near.sum(-1).clamp(min=1)


def structure_loss(frames, lddt_logits, backbone, mask, unclamped=UNCLAMPED):
    """(B,) FAPE of the last layer, of all layers on average (Alg. 20, line 17), and the confidence's
    cross-entropy. backbone (B, S, 3, 3): true N, CA, C in Å; mask (B, S); unclamped: see fape."""
    mask = mask.to(backbone.dtype)
    true = geometry.frames_of(*backbone.unbind(-2))
    losses = [fape(own, true, own[1][:, :, None], true[1][:, :, None], mask, unclamped)
              for own in frames[:-1]]
    local = ideal_backbone(backbone.dtype, backbone.device)
    rotation, place = frames[-1]
    atoms = place[:, :, None] + local @ rotation.transpose(-1, -2)  # (B, S, 3, 3)
    last = fape(frames[-1], true, atoms, backbone, mask, unclamped)
    bins = (true_lddt(place.detach(), true[1], mask) * LDDT_BINS).long().clamp(max=LDDT_BINS - 1)
    nll = F.cross_entropy(lddt_logits.transpose(1, 2), bins, reduction="none")  # (B, S)
    confidence = (nll * mask).sum(1) / mask.sum(1).clamp(min=1)
    return last + (sum(losses) + last) / len(frames) + CONFIDENCE_WEIGHT * confidence


@functools.cache
def ideal_backbone(dtype, device):
    """N, CA, C of a residue in its own frame, (3, 3). Kept, since a copy to a GPU waits for all that runs."""
    return geometry.ideal_residue(dtype)[:3].to(device)


def expected_lddt(logits):
    """(..., S) lDDT, 0 to 1, of logits (..., S, LDDT_BINS)."""
    centres = (torch.arange(LDDT_BINS, device=logits.device) + 0.5) / LDDT_BINS
    return logits.float().softmax(-1) @ centres
