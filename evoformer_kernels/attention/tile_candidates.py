"""Tiles of the kernels of attention, of which the tuner chooses (tuner.py).

BM queries, BN keys, RU rows that share a bias tile, ROWS rows that a program takes one after another. The
first candidate of each list needs no more than any GPU has.
"""
import torch

from evoformer_kernels.common import candidates

TILES = ("BM", "BN", "RU", "num_warps", "num_stages")
FORWARD = candidates(TILES, (64, 64, 1, 4, 2), (64, 64, 1, 4, 3), (128, 64, 1, 8, 3), (64, 64, 2, 4, 3),
                     (64, 32, 1, 4, 3))
GATE = candidates(("BM", "num_warps"), (64, 4), (128, 4), (64, 2), (32, 1))
BACKWARD_Q = candidates(TILES, (64, 64, 1, 4, 2), (64, 64, 1, 4, 3), (64, 32, 2, 4, 3), (64, 32, 1, 4, 3),
                        (128, 64, 1, 8, 3))
BACKWARD_KV = candidates(TILES, (32, 64, 1, 4, 2), (32, 64, 1, 4, 3), (32, 64, 1, 4, 4), (64, 64, 1, 4, 3),
                         (32, 128, 1, 8, 3), (32, 64, 2, 4, 2))
SUM_TILES = ("BM", "BN", "num_warps", "num_stages")
BACKWARD_BIAS = candidates(SUM_TILES, (64, 32, 4, 2), (64, 64, 4, 3), (64, 32, 4, 3), (64, 64, 4, 2),
                           (64, 64, 4, 4), (128, 64, 8, 3))
BACKWARD_SCORES = candidates(SUM_TILES, (64, 128, 8, 1), (64, 64, 8, 3), (128, 32, 8, 3), (64, 64, 4, 3))
SHORT_TILES = ("ROWS", "num_warps", "num_stages")
BACKWARD_SHORT = candidates(SHORT_TILES, (2, 4, 2), (1, 4, 1), (4, 4, 2))
if not torch.version.hip:  # maxnreg is NVIDIA's option: with fewer registers more programs share a processor
    BACKWARD_KV += candidates((*TILES, "maxnreg"), (32, 64, 1, 4, 3, 128), (64, 64, 1, 4, 3, 168))
    BACKWARD_BIAS += candidates((*SUM_TILES, "maxnreg"), (64, 32, 4, 3, 128), (64, 64, 4, 3, 168),
                                (64, 64, 4, 4, 168))
    BACKWARD_SCORES += candidates((*SUM_TILES, "maxnreg"), (64, 64, 8, 2, 128), (64, 128, 8, 1, 128))
    BACKWARD_SHORT += candidates((*SHORT_TILES, "maxnreg"), (2, 4, 2, 168), (1, 4, 1, 168), (4, 4, 2, 168))
# Of backward as a whole: bytes of ds that are stored at a time, or 0: scores are recomputed.
STORED = candidates(("STORED",), (0,), *((n << 20,) for n in (64, 256)))
CANDIDATES = {f"attention_{name}": tiles for name, tiles in dict(
    forward_kernel=FORWARD, gate_backward_kernel=GATE, backward_q_kernel=BACKWARD_Q,
    backward_kv_kernel=BACKWARD_KV, backward_bias_kernel=BACKWARD_BIAS,
    backward_scores_kernel=BACKWARD_SCORES, backward_short_kernel=BACKWARD_SHORT).items()}
