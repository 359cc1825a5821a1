"""AlphaFold 2's structure module (supplement 1.8): from the Evoformer's representations to a backbone.

    module = InFloat32(StructureModule(c_m, c_z))
    (rotation, place), lddt_logits = module(msa[:, 0], pair, mask)    # of all layers, the last one last

Every residue is a frame: a rotation and the place of its CA. All begin at the origin, unturned; each layer
lets residues look at each other, by what they hold, by the pair representation and by how near the points lie
that they point at, and then moves each by what it saw. The layers share their weights. Reading order:
StructureModule, then the parts above it.

Letters in shapes: B samples, S residues, c channels of a residue, c_z of a pair, H heads, D width of a head,
P points of a head. Places in Å. DISCREPANCIES: no side chains (Alg. 24, 25), whose angles a backbone does not
need, so atoms of the loss are N, CA and C; FAPE is .9 of each error clamped and .1 of it unclamped, where AF2
unclamps all of a tenth of its batches; no dropout; LayerNorm of pairs without weights; attention's output
begins as any layer's, not at zero, or else nothing of the pairs reaches the frames until these move (one
chain, 300 steps: FAPE .74 instead of .40 Å).
Beside FAPE, distances of CA are a loss: they need no frame to be right (500 updates of pieces of 32 residues:
lDDT-CA of unseen families .35 instead of .31, and .33 instead of .20 after 200).
"""
import functools
import math

import torch
import torch.nn.functional as F
from torch import nn
from torch.func import functional_call

from fusion_lab.kernels.precision import at_least_float32
from proteins import geometry
from proteins.structure_metrics import LDDT_CUTOFFS, LDDT_RADIUS

LAYERS = 6              # AF2: 8
CHANNELS, HEADS, HEAD = 128, 8, 16  # AF2: 384, 12, 16
QUERY_POINTS, VALUE_POINTS = 4, 8
UNIT = 10.0             # Å: places within the module are in units of this
CLAMP = 10.0            # Å, of FAPE
UNCLAMPED = 0.1         # share of the error that is not clamped
LDDT_BINS = 50          # of the confidence head
CONFIDENCE_WEIGHT = 0.01
DISTANCE_RADIUS, DISTANCE_WEIGHT = 20.0, 1.0
EPSILON = 1e-4          # Å^2, or the gradient of a length of 0 is infinite


def linear(c_in, c_out, zero=False):
    """nn.Linear with bias 0, LeCun or zero (supplement 1.11.4)."""
    layer = nn.Linear(c_in, c_out)
    nn.init.zeros_(layer.weight) if zero else nn.init.trunc_normal_(layer.weight, std=c_in ** -0.5)
    nn.init.zeros_(layer.bias)
    return layer


def turned(rotation, place, points):
    """Points in the frames' own coordinates -> in everybody's: rotation (B, S, 3, 3), place (B, S, 3),
    points (B, S, P, 3). One product for each residue."""
    return points @ rotation.mT + place[:, :, None]


def turned_back(rotation, place, points):
    """The inverse of turned()."""
    return (points - place[:, :, None]) @ rotation


class InvariantPointAttention(nn.Module):
    """Alg. 22. Moving all frames together changes nothing.

    fused: scalars and points of a head are one vector each for q, k and v, so that scores are one product
    and values another: -|q - k|^2 / 2 is q.k - |q|^2 / 2 - |k|^2 / 2, and the softmax over keys does not see
    |q|^2. Else each as the paper has it."""

    def __init__(self, c, c_z, fused=True):
        super().__init__()
        self.fused = fused
        points = 2 * QUERY_POINTS + VALUE_POINTS
        self.scalars, self.points = linear(c, HEADS * 3 * HEAD), linear(c, HEADS * points * 3)
        self.bias = nn.Linear(c_z, HEADS, bias=False)
        self.weight = nn.Parameter(torch.full((HEADS,), math.log(math.e - 1)))  # softplus of it is 1
        self.out = linear(HEADS * (HEAD + 4 * VALUE_POINTS + c_z), c)

    def of_pairs(self, pair, mask):
        """What all layers share: what pairs and mask add to scores (B, H, S, S), and what they are multiplied
        by, (H, D + 3 P + 1), for a scalar, a coordinate and |k|^2."""
        share = math.sqrt(1 / 3)  # three summands of equal variance
        near = share * math.sqrt(2 / (9 * QUERY_POINTS)) * F.softplus(self.weight)[:, None]  # (H, 1)
        scale = near.new_full((HEADS, HEAD), share * HEAD ** -0.5)
        scales = torch.cat([scale, near.expand(-1, 3 * QUERY_POINTS), -near / 2], -1)
        absent = (mask[:, None, None, :] - 1) * 1e6
        return share * self.bias(pair).permute(0, 3, 1, 2) + absent, scales

    def forward(self, x, pair, of_pairs, rotation, place):
        """x (B, S, c), pair (B, S, S, c_z), of_pairs, frames -> (B, S, c)"""
        scalars = self.scalars(x).unflatten(-1, (HEADS, 3, HEAD))
        points = turned(rotation, place, self.points(x).unflatten(-1, (-1, 3))).unflatten(2, (HEADS, -1))
        points = points.split([QUERY_POINTS, QUERY_POINTS, VALUE_POINTS], 3)  # (B, S, H, P, 3)
        q, k, v = zip(scalars.unbind(3), points, strict=True)
        bias, scales = of_pairs
        scores = bias + (self.joined if self.fused else self.apart)(q, k, scales)
        weights = scores.softmax(-1)  # (B, H, S, S)
        scalars, points = self.values(weights, v)
        points = turned_back(rotation, place, points.flatten(2, 3))  # (B, S, H P, 3)
        lengths = torch.linalg.vector_norm(points, dim=-1)
        pairs = weights.transpose(1, 2) @ pair  # (B, S, H, c_z)
        return self.out(torch.cat([x.flatten(2) for x in (scalars, points, lengths, pairs)], -1))

    @staticmethod
    def apart(q, k, scales):
        """Scores (B, H, S, S) as the paper has them: a product of scalars, then distances of points."""
        away = q[1][:, :, None] - k[1][:, None]  # (B, S, S, H, P, 3)
        squares = away.square().sum((-1, -2)).permute(0, 3, 1, 2)
        near = scales[:, -1:, None]  # (H, 1, 1)
        return scales[0, 0] * torch.einsum("bihd,bjhd->bhij", q[0], k[0]) + near * squares

    @staticmethod
    def joined(q, k, scales):
        """The same by one product, but for what is the same for all keys."""
        squares = k[1].square().sum((-1, -2))[..., None]  # (B, S, H, 1)
        left = torch.cat([q[0], q[1].flatten(3), torch.ones_like(squares)], -1) * scales
        right = torch.cat([k[0], k[1].flatten(3), squares], -1)
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
        # without weights, which the products behind it hold: so pairs that do not learn need no gradient
        self.norm_pair = nn.LayerNorm(c_z, elementwise_affine=False)
        self.norm_single = nn.LayerNorm(c_m)
        self.single = linear(c_m, CHANNELS)
        self.attention = InvariantPointAttention(CHANNELS, c_z, fused)
        self.norm_attention, self.norm_transition = nn.LayerNorm(CHANNELS), nn.LayerNorm(CHANNELS)
        self.transition = nn.Sequential(linear(CHANNELS, CHANNELS), nn.ReLU(), linear(CHANNELS, CHANNELS),
                                        nn.ReLU(), linear(CHANNELS, CHANNELS, zero=True))
        self.move = linear(CHANNELS, 6, zero=True)  # Alg. 23
        self.confidence = nn.Sequential(nn.LayerNorm(CHANNELS), linear(CHANNELS, CHANNELS), nn.ReLU(),
                                        linear(CHANNELS, LDDT_BINS, zero=True))

    def forward(self, single, pair, mask):
        """single (B, S, c_m), pair (B, S, S, c_z), mask (B, S) -> ((rotation (layers, B, S, 3, 3), place
        (layers, B, S, 3) in Å) of every layer, lDDT logits (B, S, LDDT_BINS))"""
        x, pair = self.single(self.norm_single(single)), self.norm_pair(pair)
        rotation = identity(x.dtype, x.device).expand(*x.shape[:2], 3, 3)
        place = x.new_zeros(*x.shape[:2], 3)
        of_pairs, frames = self.attention.of_pairs(pair, mask), []
        for _ in range(LAYERS):
            x = self.norm_attention(x + self.attention(x, pair, of_pairs, rotation, place))
            x = self.norm_transition(x + self.transition(x))
            turn, shift = self.move(x).split(3, -1)
            place = place + (rotation @ shift[..., None]).squeeze(-1)
            frames.append((rotation @ rotation_of(turn), place))
            rotation = frames[-1][0].detach()  # no gradient along the chain of rotations
        rotations, places = (torch.stack(kind) for kind in zip(*frames, strict=True))
        return (rotations, UNIT * places), self.confidence(x)


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
    """Rotation matrices (..., 3, 3) of the quaternions (1, b, c, d), made units (Alg. 23). turn (..., 3).
    Few kernels: with K x = turn x x, it is 1 + 2 (K + K K) / (1 + |turn|^2)."""
    cross = (turn @ crosses(turn.dtype, turn.device)).unflatten(-1, (3, 3))
    scale = 2 / (1 + turn.square().sum(-1))
    return torch.addcmul(identity(turn.dtype, turn.device), scale[..., None, None], cross + cross @ cross)


@functools.cache
def identity(dtype, device):
    return torch.eye(3, dtype=dtype, device=device)


@functools.cache
def crosses(dtype, device):
    """(3, 9): a vector times this is the matrix of the cross product with it. Few launches make rotations so;
    entry by entry they were half of the module's. Kept, since a copy to a GPU waits for all that runs."""
    axes = torch.eye(3, dtype=dtype)
    return torch.linalg.cross(axes[:, None], axes[None], dim=-1).mT.flatten(1).to(device)


# --- Losses ---------------------------------------------------------------------------------------------


def fape(frames, true, atoms, true_atoms, mask, unclamped=UNCLAMPED):
    """Frame aligned point error (Alg. 28), (..., B) Å / 10: every atom seen from every frame. frames:
    (rotation, place), true: the same without the layers that may come first; atoms (..., B, S, A, 3),
    true_atoms; mask (B, S): which residues count; unclamped: share of the error that counts however large
    it is."""
    seen, there = (seen_from(*own, points.flatten(-3, -2)) for own, points in ((frames, atoms),
                                                                               (true, true_atoms)))
    error = ((seen - there).square().sum(-1) + EPSILON).sqrt()  # (..., B, S, S * A)
    error = error.clamp(max=CLAMP).lerp(error, unclamped)
    # expanded, not repeated: repeat_interleave would copy a number to the GPU
    each = mask[:, None, :, None].expand(-1, 1, -1, atoms.shape[-2]).flatten(2)  # (B, 1, S * A)
    known = mask[:, :, None] * each
    return (error * known).sum((-1, -2)) / known.sum((1, 2)).clamp(min=1) / UNIT


def distance_error(place, true, mask):
    """(..., B) Å / 10: by how much distances of CA within DISTANCE_RADIUS are wrong, clamped as FAPE. place
    (..., B, S, 3), true (B, S, 3), mask (B, S)."""
    found, wanted = (((x[..., :, None, :] - x[..., None, :, :]).square().sum(-1) + EPSILON).sqrt()
                     for x in (place, true))
    near = (wanted < DISTANCE_RADIUS) * mask[:, :, None] * mask[:, None]
    error = (found - wanted).abs().clamp(max=CLAMP) * near
    return error.sum((-1, -2)) / near.sum((1, 2)).clamp(min=1) / UNIT


def seen_from(rotation, place, points):
    """points (..., P, 3) in the coordinates of each frame, (..., S, P, 3)."""
    return (points[..., None, :, :] - place[..., None, :]) @ rotation


def true_lddt(place, true, mask):
    """lDDT-CA (B, S) of places against true ones, 0 to 1."""
    found, wanted = ((x[:, :, None] - x[:, None] + 1e-6).norm(dim=-1) for x in (place, true))
    near = (wanted < LDDT_RADIUS) * mask[:, :, None] * mask[:, None]
    near = near * (1 - torch.eye(mask.shape[1], dtype=near.dtype, device=near.device))
    error = (found - wanted).abs()
    kept = sum((error < cutoff).to(near.dtype) for cutoff in LDDT_CUTOFFS) / len(LDDT_CUTOFFS)
    return (kept * near).sum(-1) / near.sum(-1).clamp(min=1)


def structure_loss(frames, lddt_logits, backbone, mask):
    """(B,) FAPE of the last layer, FAPE of CA of all layers on average (Alg. 20, lines 17 and 28), errors of
    distances likewise, and the confidence's cross-entropy. frames: of all layers; backbone (B, S, 3, 3): true
    N, CA, C in Å; mask (B, S)."""
    mask = mask.to(backbone.dtype)
    true = geometry.frames_of(*backbone.unbind(-2))
    rotation, place = (kind[-1] for kind in frames)
    layers = fape(frames, true, frames[1][..., None, :], true[1][..., None, :], mask)
    atoms = place[:, :, None] + ideal_backbone(backbone.dtype, backbone.device) @ rotation.mT  # (B, S, 3, 3)
    last = fape((rotation, place), true, atoms, backbone, mask)
    bins = (true_lddt(place.detach(), true[1], mask) * LDDT_BINS).long().clamp(max=LDDT_BINS - 1)
    nll = F.cross_entropy(lddt_logits.transpose(1, 2), bins, reduction="none")  # (B, S)
    confidence = (nll * mask).sum(1) / mask.sum(1).clamp(min=1)
    distances = distance_error(frames[1], true[1], mask)
    return last + (layers + DISTANCE_WEIGHT * distances).mean(0) + CONFIDENCE_WEIGHT * confidence


@functools.cache
def ideal_backbone(dtype, device):
    """N, CA, C of a residue in its own frame, (3, 3). Kept, since a copy to a GPU waits for all that runs."""
    return geometry.ideal_residue(dtype)[:3].to(device)


def expected_lddt(logits):
    """(..., S) lDDT, 0 to 1, of logits (..., S, LDDT_BINS)."""
    centres = (torch.arange(LDDT_BINS, device=logits.device) + 0.5) / LDDT_BINS
    return logits.float().softmax(-1) @ centres
