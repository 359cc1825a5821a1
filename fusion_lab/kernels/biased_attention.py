"""Attention whose rows share one bias, with the gate in its epilogue, as Triton kernels with derivatives.

    out = softmax(q k^T scale + bias + key mask) v * sigmoid(gate + gate_bias)

Letters: B samples, R rows, H heads, L length of a row, D head width; LP is L rounded up to whole tiles. The
forward keeps each bias tile for RU rows side by side: while one row waits for its product, another takes
exponentials. No scores are written. Bias and key mask together are one padded tensor that holds PADDING beyond
L, so that no kernel masks a score; a second one is its transpose, which the gradient of k and v reads.

Backward, with do = dout sigmoid(g) and delta = rowsum(do o) = rowsum(dout out): o itself is never stored. Up to
SHORT keys one kernel makes everything from whole rows. Beyond, three do: dq with the gate's gradient; dk and dv;
the bias gradient, whose programs own a tile, sum a share of the rows in registers and store it once. Nothing is
added atomically: every run gives the same bits.

Sources: Dao et al. 2022 (arXiv:2205.14135) for attention in tiles; AlphaFold 2 supplement, Alg. 7, 8, 13, 14.
"""
import math

import torch
import torch.nn.functional as F
import triton
import triton.language as tl

from fusion_lab.kernels import tuner
from fusion_lab.kernels.precision import at_least_float32
from fusion_lab.kernels.triton_parts import LOG2E, operation, padded_width, precision

MASKED, PADDING = -1e9, -1e30  # added to scores of masked keys; and beyond L, below those even in a masked row
SHORT = 64  # keys that one tile holds
WIDTHS = range(1, 129)  # head widths the kernels take
DTYPES = (torch.float16, torch.bfloat16, torch.float32)


def reference(q, k, v, bias=None, keys=None, gate=None, gate_bias=None, scale=None):
    """The same in plain PyTorch. q, k, v, gate (B, R, H, L, D); bias (B, H, L, L); keys (B, L) or (B, R, L),
    1 = present; gate_bias (H, D)."""
    scores = q @ k.mT * (q.shape[-1] ** -0.5 if scale is None else scale)
    if bias is not None:
        scores = scores + bias[:, None]
    if keys is not None:
        keys = keys[:, None] if keys.dim() == 2 else keys
        scores = scores.masked_fill(~keys.bool()[:, :, None, None, :], MASKED if scores.dtype != torch.float16
                                    else torch.finfo(torch.float16).min / 2)
    out = scores.softmax(-1, dtype=at_least_float32(scores.dtype)).to(v.dtype) @ v
    if gate is None:
        return out
    return out * (gate if gate_bias is None else gate + gate_bias[:, None]).sigmoid()


# --------------------------------------------------------------------------------------------------------
# Kernels. Strides are those of sample, row, head, position; along D it is 1.
# --------------------------------------------------------------------------------------------------------


@triton.jit
def tile(pointer, l0, L, D, stride, BL: tl.constexpr, BD: tl.constexpr, EVEN: tl.constexpr):
    """(BL, BD) of an (L, D) matrix from position l0 on; zeros outside."""
    l, d = l0 + tl.arange(0, BL), tl.arange(0, BD)
    at = pointer + l[:, None] * stride + d[None, :]
    if EVEN:
        found = tl.load(at)
    else:
        found = tl.load(at, mask=(l[:, None] < L) & (d[None, :] < D), other=0.0)
    return found


@triton.jit
def gates(gate, gate_bias, h, D, BD: tl.constexpr, BIASED: tl.constexpr):
    """sigmoid(gate + gate_bias) of a (BL, BD) tile of head h, in float32."""
    x = gate.to(tl.float32)
    if BIASED:
        d = tl.arange(0, BD)
        x += tl.load(gate_bias + h * D + d, mask=d < D, other=0.0).to(tl.float32)[None, :]
    return tl.sigmoid(x)


@triton.jit
def bias_tile(bias, bh, i, j, LP, BIAS: tl.constexpr, BI: tl.constexpr, BJ: tl.constexpr):
    """Base-2 bias of rows i (BI,) and columns j (BJ,), or zeros."""
    if BIAS:
        found = tl.load(bias + (bh * LP + i[:, None]).to(tl.int64) * LP + j[None, :]).to(tl.float32) * LOG2E
    else:
        found = tl.zeros((BI, BJ), tl.float32)
    return found


@triton.jit
def key_tile(keys, b, r, j, kb, kr, KEYS: tl.constexpr, BJ: tl.constexpr):
    """Base-2 summand (BJ,) of the keys j of row r, or zeros; keys (B, R, LP) has a row stride of 0 if shared."""
    if KEYS:
        found = tl.load(keys + b * kb + r * kr + j)
    else:
        found = tl.zeros((BJ,), tl.float32)
    return found


@triton.jit
def forward_kernel(q, k, v, g, gb, bias, keys, out, lse, R, H, L, LP, D, scale, kb, kr, sqb, sqr, sqh, sql,
                   sgb, sgr, sgh, sgl, sob, sor, soh, sol, BIAS: tl.constexpr, KEYS: tl.constexpr,
                   GATE: tl.constexpr, GATE_BIAS: tl.constexpr, EVEN: tl.constexpr, PRECISION: tl.constexpr,
                   BD: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, RU: tl.constexpr):
    """BM queries of one sample and head, in RU rows side by side."""
    i0, r0, bh = tl.program_id(0) * BM, tl.program_id(1).to(tl.int64) * RU, tl.program_id(2)
    b, h = (bh // H).to(tl.int64), (bh % H).to(tl.int64)
    i, d = i0 + tl.arange(0, BM), tl.arange(0, BD)
    queries, tops, sums, accs = (), (), (), ()
    for u in tl.static_range(RU):
        at = b * sqb + tl.minimum(r0 + u, R - 1) * sqr + h * sqh
        queries = queries + (tile(q + at, i0, L, D, sql, BM, BD, EVEN),)
        tops = tops + (tl.full((BM,), float("-inf"), tl.float32),)
        sums = sums + (tl.zeros((BM,), tl.float32),)
        accs = accs + (tl.zeros((BM, BD), tl.float32),)
    for n in range(0, L, BN):
        j = n + tl.arange(0, BN)
        t = bias_tile(bias, bh, i, j, LP, BIAS, BM, BN)
        new_tops, new_sums, new_accs = (), (), ()
        for u in tl.static_range(RU):
            r = tl.minimum(r0 + u, R - 1)
            at = b * sqb + r * sqr + h * sqh
            kt, vt = tile(k + at, n, L, D, sql, BN, BD, EVEN), tile(v + at, n, L, D, sql, BN, BD, EVEN)
            s = tl.dot(queries[u], tl.trans(kt), input_precision=PRECISION) * (scale * LOG2E) + t
            s += key_tile(keys, b, r, j, kb, kr, KEYS, BN)[None, :]
            top = tl.maximum(tops[u], tl.max(s, 1))
            p, shrink = tl.exp2(s - top[:, None]), tl.exp2(tops[u] - top)
            new_tops = new_tops + (top,)
            new_sums = new_sums + (sums[u] * shrink + tl.sum(p, 1),)
            new_accs = new_accs + (tl.dot(p.to(vt.dtype), vt, accs[u] * shrink[:, None],
                                          input_precision=PRECISION),)
        tops, sums, accs = new_tops, new_sums, new_accs
    for u in tl.static_range(RU):
        r = r0 + u
        if r < R:
            result = accs[u] / sums[u][:, None]
            if GATE:
                gt = tile(g + b * sgb + r * sgr + h * sgh, i0, L, D, sgl, BM, BD, EVEN)
                result = result * gates(gt, gb, h, D, BD, GATE_BIAS)
            tl.store(out + b * sob + r * sor + h * soh + i[:, None] * sol + d[None, :],
                     result.to(out.dtype.element_ty), mask=(i[:, None] < L) & (d[None, :] < D))
            tl.store(lse + ((b * R + r) * H + h) * L + i, tops[u] + tl.log2(sums[u]), mask=i < L)


@triton.jit
def backward_q_kernel(q, k, v, g, gb, bias, keys, out, dout, lse, dq, dg, do, delta, R, H, L, LP, D, scale, kb, kr,
                      sqb, sqr, sqh, sql, sgb, sgr, sgh, sgl, sob, sor, soh, sol, tqb, tqr, tqh, tql, tgb, tgr,
                      tgh, tgl, BIAS: tl.constexpr, KEYS: tl.constexpr, GATE: tl.constexpr,
                      GATE_BIAS: tl.constexpr, EVEN: tl.constexpr, PRECISION: tl.constexpr, BD: tl.constexpr,
                      BM: tl.constexpr, BN: tl.constexpr, RU: tl.constexpr, dgb=None):
    """dq and, with a gate, dg; for the other kernels do (as out lies) and delta (B, R, H, L); dgb holds a
    part (B H, programs, BD) of the gate bias's gradient. t*: strides of dq and dg."""
    i0, r0, bh = tl.program_id(0) * BM, tl.program_id(1).to(tl.int64) * RU, tl.program_id(2)
    b, h = (bh // H).to(tl.int64), (bh % H).to(tl.int64)
    i, d = i0 + tl.arange(0, BM), tl.arange(0, BD)
    inside = (i[:, None] < L) & (d[None, :] < D)
    queries, dos, stats, deltas, accs = (), (), (), (), ()
    part = tl.zeros((BD,), tl.float32)
    for u in tl.static_range(RU):
        r = tl.minimum(r0 + u, R - 1)
        at_out = b * sob + r * sor + h * soh
        dt = tile(dout + at_out, i0, L, D, sol, BM, BD, EVEN)
        product = dt.to(tl.float32) * tile(out + at_out, i0, L, D, sol, BM, BD, EVEN).to(tl.float32)
        row_delta = tl.sum(product, 1)
        stat = ((b * R + r) * H + h) * L + i
        if GATE:
            opening = gates(tile(g + b * sgb + r * sgr + h * sgh, i0, L, D, sgl, BM, BD, EVEN), gb, h, D, BD, GATE_BIAS)
            dgate = product * (1 - opening)
            dt = (dt.to(tl.float32) * opening).to(dt.dtype)
            tl.store(do + at_out + i[:, None] * sol + d[None, :], dt, mask=inside)
            tl.store(dg + b * tgb + r * tgr + h * tgh + i[:, None] * tgl + d[None, :],
                     dgate.to(dg.dtype.element_ty), mask=inside)
            if GATE_BIAS:
                part += tl.where(r0 + u < R, tl.sum(dgate, 0), 0.0)
        tl.store(delta + stat, row_delta, mask=i < L)
        queries = queries + (tile(q + b * sqb + r * sqr + h * sqh, i0, L, D, sql, BM, BD, EVEN),)
        dos, deltas = dos + (dt,), deltas + (row_delta,)
        stats = stats + (tl.load(lse + stat, mask=i < L, other=float("inf")),)
        accs = accs + (tl.zeros((BM, BD), tl.float32),)
    if GATE_BIAS:
        program = (bh * tl.num_programs(1) + tl.program_id(1)).to(tl.int64) * tl.num_programs(0) + tl.program_id(0)
        tl.store(dgb + program * BD + d, part)
    for n in range(0, L, BN):
        j = n + tl.arange(0, BN)
        t = bias_tile(bias, bh, i, j, LP, BIAS, BM, BN)
        new_accs = ()
        for u in tl.static_range(RU):
            r = tl.minimum(r0 + u, R - 1)
            at = b * sqb + r * sqr + h * sqh
            kt, vt = tile(k + at, n, L, D, sql, BN, BD, EVEN), tile(v + at, n, L, D, sql, BN, BD, EVEN)
            s = tl.dot(queries[u], tl.trans(kt), input_precision=PRECISION) * (scale * LOG2E) + t
            s += key_tile(keys, b, r, j, kb, kr, KEYS, BN)[None, :]
            ds = tl.exp2(s - stats[u][:, None]) * (
                tl.dot(dos[u], tl.trans(vt), input_precision=PRECISION) - deltas[u][:, None])
            new_accs = new_accs + (tl.dot(ds.to(kt.dtype), kt, accs[u], input_precision=PRECISION),)
        accs = new_accs
    for u in tl.static_range(RU):
        if r0 + u < R:
            place = b * tqb + (r0 + u) * tqr + h * tqh + i[:, None] * tql + d[None, :]
            tl.store(dq + place, (accs[u] * scale).to(dq.dtype.element_ty), mask=inside)


@triton.jit
def backward_kv_kernel(q, k, v, turned, keys, do, lse, delta, dk, dv, R, H, L, LP, D, scale, kb, kr,
                       sqb, sqr, sqh, sql, sob, sor, soh, sol, tqb, tqr, tqh, tql, BIAS: tl.constexpr,
                       KEYS: tl.constexpr, EVEN: tl.constexpr, PRECISION: tl.constexpr, BD: tl.constexpr,
                       BM: tl.constexpr, BN: tl.constexpr, RU: tl.constexpr):
    """dk and dv of BN keys in RU rows. Scores are (keys, queries), so that P and dS are left operands as they
    stand, and the bias is read along the rows of its transpose."""
    j0, r0, bh = tl.program_id(0) * BN, tl.program_id(1).to(tl.int64) * RU, tl.program_id(2)
    b, h = (bh // H).to(tl.int64), (bh % H).to(tl.int64)
    j, d = j0 + tl.arange(0, BN), tl.arange(0, BD)
    ks, vs, dks, dvs, masks = (), (), (), (), ()
    for u in tl.static_range(RU):
        r = tl.minimum(r0 + u, R - 1)
        at = b * sqb + r * sqr + h * sqh
        ks = ks + (tile(k + at, j0, L, D, sql, BN, BD, EVEN),)
        vs = vs + (tile(v + at, j0, L, D, sql, BN, BD, EVEN),)
        masks = masks + (key_tile(keys, b, r, j, kb, kr, KEYS, BN),)
        dks = dks + (tl.zeros((BN, BD), tl.float32),)
        dvs = dvs + (tl.zeros((BN, BD), tl.float32),)
    for m in range(0, L, BM):
        i = m + tl.arange(0, BM)
        t = bias_tile(turned, bh, j, i, LP, BIAS, BN, BM)
        new_dks, new_dvs = (), ()
        for u in tl.static_range(RU):
            r = tl.minimum(r0 + u, R - 1)
            qt = tile(q + b * sqb + r * sqr + h * sqh, m, L, D, sql, BM, BD, EVEN)
            dt = tile(do + b * sob + r * sor + h * soh, m, L, D, sol, BM, BD, EVEN)
            stat = ((b * R + r) * H + h) * L + i
            ls = tl.load(lse + stat, mask=i < L, other=float("inf"))
            de = tl.load(delta + stat, mask=i < L, other=0.0)
            s = tl.dot(ks[u], tl.trans(qt), input_precision=PRECISION) * (scale * LOG2E) + t + masks[u][:, None]
            p = tl.exp2(s - ls[None, :])
            new_dvs = new_dvs + (tl.dot(p.to(dt.dtype), dt, dvs[u], input_precision=PRECISION),)
            ds = p * (tl.dot(vs[u], tl.trans(dt), input_precision=PRECISION) - de[None, :])
            new_dks = new_dks + (tl.dot(ds.to(qt.dtype), qt, dks[u], input_precision=PRECISION),)
        dks, dvs = new_dks, new_dvs
    inside = (j[:, None] < L) & (d[None, :] < D)
    for u in tl.static_range(RU):
        if r0 + u < R:
            place = b * tqb + (r0 + u) * tqr + h * tqh + j[:, None] * tql + d[None, :]
            tl.store(dk + place, (dks[u] * scale).to(dk.dtype.element_ty), mask=inside)
            tl.store(dv + place, dvs[u].to(dv.dtype.element_ty), mask=inside)


@triton.jit
def backward_bias_kernel(q, k, v, bias, keys, do, lse, delta, dbias, R, H, L, LP, D, scale, rows, kb, kr,
                         sqb, sqr, sqh, sql, sob, sor, soh, sol, KEYS: tl.constexpr, EVEN: tl.constexpr,
                         PRECISION: tl.constexpr, BD: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr):
    """The gradient of one (BM, BN) tile of the bias over a share of `rows` rows: dbias (shares, B, H, LP, LP)."""
    bh, share, nj = tl.program_id(2), tl.program_id(1), tl.cdiv(L, BN)
    i0, j0 = tl.program_id(0) // nj * BM, tl.program_id(0) % nj * BN
    b, h = (bh // H).to(tl.int64), (bh % H).to(tl.int64)
    i, j = i0 + tl.arange(0, BM), j0 + tl.arange(0, BN)
    t = bias_tile(bias, bh, i, j, LP, True, BM, BN)
    db = tl.zeros((BM, BN), tl.float32)
    for r in range(share * rows, tl.minimum(share * rows + rows, R)):
        at, at_out = b * sqb + r * sqr + h * sqh, b * sob + r * sor + h * soh
        qt, dt = tile(q + at, i0, L, D, sql, BM, BD, EVEN), tile(do + at_out, i0, L, D, sol, BM, BD, EVEN)
        kt, vt = tile(k + at, j0, L, D, sql, BN, BD, EVEN), tile(v + at, j0, L, D, sql, BN, BD, EVEN)
        stat = ((b * R + r) * H + h) * L + i
        ls = tl.load(lse + stat, mask=i < L, other=float("inf"))
        de = tl.load(delta + stat, mask=i < L, other=0.0)
        s = tl.dot(qt, tl.trans(kt), input_precision=PRECISION) * (scale * LOG2E) + t
        s += key_tile(keys, b, r, j, kb, kr, KEYS, BN)[None, :]
        db += tl.exp2(s - ls[:, None]) * (tl.dot(dt, tl.trans(vt), input_precision=PRECISION) - de[:, None])
    place = (share * tl.num_programs(2) + bh).to(tl.int64) * LP * LP
    tl.store(dbias + place + i[:, None].to(tl.int64) * LP + j[None, :], db)


@triton.jit
def backward_short_kernel(q, k, v, g, gb, bias, keys, out, dout, lse, dq, dk, dv, dg, dbias, R, H, L, LP, D,
                          scale, rows, kb, kr, sqb, sqr, sqh, sql, sgb, sgr, sgh, sgl, sob, sor, soh, sol,
                          tqb, tqr, tqh, tql, tgb, tgr, tgh, tgl, BIAS: tl.constexpr, KEYS: tl.constexpr,
                          GATE: tl.constexpr, GATE_BIAS: tl.constexpr, EVEN: tl.constexpr,
                          PRECISION: tl.constexpr, BD: tl.constexpr, BL: tl.constexpr, dgb=None):
    """All gradients of a share of `rows` whole rows, L <= BL: five products and one exponential a score."""
    share, bh = tl.program_id(0), tl.program_id(1)
    b, h = (bh // H).to(tl.int64), (bh % H).to(tl.int64)
    i, d = tl.arange(0, BL), tl.arange(0, BD)
    inside = (i[:, None] < L) & (d[None, :] < D)
    t = bias_tile(bias, bh, i, i, LP, BIAS, BL, BL)
    db, part = tl.zeros((BL, BL), tl.float32), tl.zeros((BD,), tl.float32)
    for r in range(share * rows, tl.minimum(share * rows + rows, R)):
        at, at_out = b * sqb + r * sqr + h * sqh, b * sob + r * sor + h * soh
        qt, kt = tile(q + at, 0, L, D, sql, BL, BD, EVEN), tile(k + at, 0, L, D, sql, BL, BD, EVEN)
        vt, dt = tile(v + at, 0, L, D, sql, BL, BD, EVEN), tile(dout + at_out, 0, L, D, sol, BL, BD, EVEN)
        product = dt.to(tl.float32) * tile(out + at_out, 0, L, D, sol, BL, BD, EVEN).to(tl.float32)
        de = tl.sum(product, 1)
        if GATE:
            opening = gates(tile(g + b * sgb + r * sgr + h * sgh, 0, L, D, sgl, BL, BD, EVEN), gb, h, D, BD, GATE_BIAS)
            dgate = product * (1 - opening)
            dt = (dt.to(tl.float32) * opening).to(dt.dtype)
            part += tl.sum(dgate, 0)
            tl.store(dg + b * tgb + r * tgr + h * tgh + i[:, None] * tgl + d[None, :],
                     dgate.to(dg.dtype.element_ty), mask=inside)
        ls = tl.load(lse + ((b * R + r) * H + h) * L + i, mask=i < L, other=float("inf"))
        s = tl.dot(qt, tl.trans(kt), input_precision=PRECISION) * (scale * LOG2E) + t
        s += key_tile(keys, b, r, i, kb, kr, KEYS, BL)[None, :]
        p = tl.exp2(s - ls[:, None])
        ds = p * (tl.dot(dt, tl.trans(vt), input_precision=PRECISION) - de[:, None])
        db += ds
        p, ds = p.to(qt.dtype), ds.to(qt.dtype)
        place = b * tqb + r * tqr + h * tqh + i[:, None] * tql + d[None, :]
        tl.store(dv + place, tl.dot(tl.trans(p), dt, input_precision=PRECISION).to(dv.dtype.element_ty), mask=inside)
        tl.store(dk + place, (tl.dot(tl.trans(ds), qt, input_precision=PRECISION) * scale).to(dk.dtype.element_ty),
                 mask=inside)
        tl.store(dq + place, (tl.dot(ds, kt, input_precision=PRECISION) * scale).to(dq.dtype.element_ty), mask=inside)
    if BIAS:
        dbias += (share * tl.num_programs(1) + bh).to(tl.int64) * LP * LP
        tl.store(dbias + i[:, None] * LP + i[None, :], db)
    if GATE_BIAS:
        tl.store(dgb + (bh * tl.num_programs(0) + share).to(tl.int64) * BD + d, part)


# --------------------------------------------------------------------------------------------------------
# Launchers. `parts` is [packed] (B, X, Y, 3 c or 4 c): q, k, v and the gate behind each other; or [q, k, v] or
# [q, k, v, gate], each (B, X, Y, c) with attention along `axis` 1 or 2, or, with axis 0, (B, R, H, L, D).
# --------------------------------------------------------------------------------------------------------

FORWARD = [dict(BM=64, BN=64, RU=1, num_warps=4, num_stages=2), dict(BM=64, BN=64, RU=1, num_warps=4, num_stages=3),
           dict(BM=128, BN=64, RU=1, num_warps=8, num_stages=3), dict(BM=64, BN=64, RU=2, num_warps=4, num_stages=3),
           dict(BM=64, BN=32, RU=1, num_warps=4, num_stages=3)]
BACKWARD_Q = [dict(BM=64, BN=64, RU=1, num_warps=4, num_stages=2), dict(BM=64, BN=64, RU=1, num_warps=4, num_stages=3),
              dict(BM=64, BN=64, RU=2, num_warps=4, num_stages=3), dict(BM=64, BN=32, RU=1, num_warps=4, num_stages=3),
              dict(BM=128, BN=64, RU=1, num_warps=8, num_stages=3)]
BACKWARD_KV = [dict(BM=32, BN=64, RU=1, num_warps=4, num_stages=2), dict(BM=32, BN=64, RU=1, num_warps=4, num_stages=3),
               dict(BM=64, BN=64, RU=1, num_warps=4, num_stages=3), dict(BM=32, BN=128, RU=1, num_warps=8, num_stages=3),
               dict(BM=32, BN=64, RU=2, num_warps=4, num_stages=2)]
BACKWARD_BIAS = [dict(BM=64, BN=64, num_warps=4, num_stages=2), dict(BM=64, BN=64, num_warps=4, num_stages=3),
                 dict(BM=64, BN=32, num_warps=4, num_stages=3), dict(BM=128, BN=64, num_warps=8, num_stages=3)]
BACKWARD_SHORT = [dict(num_warps=8, num_stages=1), dict(num_warps=4, num_stages=1), dict(num_warps=4, num_stages=2),
                  dict(num_warps=8, num_stages=2)]
PROGRAMS = 512  # that sums over rows are spread over: about four for each processor of a large GPU


def padded_length(length):
    """LP: a multiple of every tile that the kernels use at this length."""
    return triton.cdiv(length, 128) * 128 if length > SHORT else max(16, triton.next_power_of_2(length))


def as_rows(x, heads, axis):
    """(B, X, Y, c) -> a view (B, R, H, L, D); for axis 0 x itself."""
    if axis == 0:
        return x
    return x.unflatten(-1, (heads, -1)).permute((0, 2, 3, 1, 4) if axis == 1 else (0, 1, 3, 2, 4))


def views(parts, heads, axis, gated):
    """[q, k, v] or [q, k, v, gate], each (B, R, H, L, D)."""
    parts = parts[0].chunk(3 + gated, dim=-1) if len(parts) == 1 else parts
    return [as_rows(part, heads, axis) for part in parts]


class Launch:
    """What the launches of one call share: views, sizes, strides, the class of shape, the configuration."""

    def __init__(self, parts, gate_bias, bias, keys, heads, axis, gated, scale):
        self.q, self.k, self.v, *gate = views(parts, heads, axis, gated)
        self.gate, self.gated, self.gate_bias, self.bias, self.keys = (gate or [self.q])[0], gated, gate_bias, bias, keys
        self.B, self.R, self.H, self.L, self.D = self.q.shape
        if max(self.B * self.H, self.R) >= 1 << 16 or self.L * self.q.stride(3) >= 1 << 31:
            raise ValueError(f"attention over {tuple(self.q.shape)} is too large for one launch")
        self.LP, self.BD = padded_length(self.L), padded_width(self.D)
        self.keys_strides = (0, 0) if keys is None else (keys.stride(0) if len(keys) > 1 else 0,
                                                         keys.stride(1) if keys.shape[1] > 1 else 0)
        self.sizes = (self.R, self.H, self.L, self.LP, self.D, scale)
        self.shape = f"{str(self.q.dtype)[6:]} L{triton.next_power_of_2(self.L)} D{self.BD}"
        self.flags = dict(KEYS=keys is not None, PRECISION=precision(self.q.dtype), BD=self.BD)
        self.gate_flags = dict(GATE=gated, GATE_BIAS=gated and gate_bias is not None)

    def fitted(self, config):
        """The configuration for rows that may be shorter than its tiles, and whether nothing needs masks."""
        config = {**config, **{key: min(config[key], self.LP) for key in ("BM", "BN") if key in config}}
        tiles = [config[key] for key in ("BM", "BN") if key in config] or [self.LP]
        config["num_warps"] = max(1, min(config["num_warps"], min(tiles) // 16 if self.L <= SHORT else 16))
        return dict(config, EVEN=self.D == self.BD and all(self.L % tile == 0 for tile in tiles))

    def rows_a_program(self, others):
        """Of a sum over rows, where `others` programs share each row; and how many programs that makes."""
        rows = triton.cdiv(self.R, max(1, min(self.R, PROGRAMS // others)))
        return rows, triton.cdiv(self.R, rows)

    def run(self, kernel, candidates, grid, arguments, gate_sums=None, **flags):
        """Launch with the tuner's choice; grid is a function of a configuration. gate_sums (H, D), if given,
        becomes the sum of what the programs store in dgb, (B, H, programs, BD)."""
        def launch(config):
            config = self.fitted(config)
            size = grid(config)
            if gate_sums is None:
                return kernel[size](*arguments, **flags, **self.flags, **config)
            sums = gate_sums.new_empty(self.B, self.H, math.prod(size) // (self.B * self.H), self.BD)
            kernel[size](*arguments, dgb=sums, **flags, **self.flags, **config)
            torch.sum(sums[..., :self.D], (0, 2), out=gate_sums)
        tuner.launch(kernel.__name__, self.shape, candidates, launch)


def strides(x):
    return x.stride()[:4]


def forward(parts, gate_bias, bias, keys, heads, axis, gated, scale):
    """out (B, X, Y, c), or (B, R, H, L, D) for axis 0; lse (B, R, H, L), log2 of the sums of exponentials."""
    c = Launch(parts, gate_bias, bias, keys, heads, axis, gated, scale)
    out, lse = forward_sizes(parts, gate_bias, bias, keys, heads, axis, gated, scale)
    c.run(forward_kernel, FORWARD, lambda t: (triton.cdiv(c.L, t["BM"]), triton.cdiv(c.R, t["RU"]), c.B * c.H),
          (c.q, c.k, c.v, c.gate, gate_bias, bias, keys, out, lse, *c.sizes, *c.keys_strides, *strides(c.q),
           *strides(c.gate), *strides(as_rows(out, heads, axis))), BIAS=bias is not None, **c.gate_flags)
    return out, lse


def forward_sizes(parts, gate_bias, bias, keys, heads, axis, gated, scale):
    q = views(parts, heads, axis, gated)[0]
    out = q.new_empty(q.shape if axis == 0 else (*parts[0].shape[:3], q.shape[2] * q.shape[4]))
    return out, q.new_empty(q.shape[:-1], dtype=torch.float32)


def backward(parts, gate_bias, bias, turned, keys, out, lse, gradient, heads, axis, gated, scale):
    """[gradients of parts, each as its part lies; parts (n, B, H, LP, LP) of the bias gradient; parts
    (B H, n, D) of the gate bias's]: float32, to be summed over n."""
    c = Launch(parts, gate_bias, bias, keys, heads, axis, gated, scale)
    found = backward_sizes(parts, gate_bias, bias, turned, keys, out, lse, gradient, heads, axis, gated, scale)
    *grads, dbias, dgb = found
    dq, dk, dv, *dg = views(grads, heads, axis, gated)
    dg, o = (dg or [dq])[0], as_rows(out, heads, axis)
    grad_strides = (*strides(dq), *strides(dg))
    flags, sums = dict(BIAS=bias is not None), None if gate_bias is None else dgb
    if c.L <= SHORT:
        rows, shares = c.rows_a_program(c.B * c.H)
        c.run(backward_short_kernel, BACKWARD_SHORT, lambda t: (shares, c.B * c.H),
              (c.q, c.k, c.v, c.gate, gate_bias, bias, keys, out, gradient, lse, dq, dk, dv, dg, dbias, *c.sizes,
               rows, *c.keys_strides, *strides(c.q), *strides(c.gate), *strides(o), *grad_strides), sums,
              **flags, **c.gate_flags, BL=c.LP)
        return found
    delta, do = torch.empty_like(lse), torch.empty_like(out) if gated else gradient
    inner = (*c.keys_strides, *strides(c.q))
    c.run(backward_q_kernel, BACKWARD_Q, lambda t: (triton.cdiv(c.L, t["BM"]), triton.cdiv(c.R, t["RU"]), c.B * c.H),
          (c.q, c.k, c.v, c.gate, gate_bias, bias, keys, out, gradient, lse, dq, dg, do, delta, *c.sizes, *inner,
           *strides(c.gate), *strides(o), *grad_strides), sums, **flags, **c.gate_flags)
    c.run(backward_kv_kernel, BACKWARD_KV, lambda t: (triton.cdiv(c.L, t["BN"]), triton.cdiv(c.R, t["RU"]), c.B * c.H),
          (c.q, c.k, c.v, turned, keys, do, lse, delta, dk, dv, *c.sizes, *inner, *strides(o), *strides(dk)), **flags)
    if bias is not None:
        rows, shares = bias_shares(c)
        c.run(backward_bias_kernel, BACKWARD_BIAS,
              lambda t: (triton.cdiv(c.L, t["BM"]) * triton.cdiv(c.L, t["BN"]), shares, c.B * c.H),
              (c.q, c.k, c.v, bias, keys, do, lse, delta, dbias, *c.sizes, rows, *inner, *strides(o)))
    return found


def backward_sizes(parts, gate_bias, bias, turned, keys, out, lse, gradient, heads, axis, gated, scale):
    c = Launch(parts, gate_bias, bias, keys, heads, axis, gated, scale)
    grads = [part.new_empty(part.shape) for part in parts]
    shares = (c.rows_a_program(c.B * c.H) if c.L <= SHORT else bias_shares(c))[1]
    dbias = out.new_empty((shares, c.B, c.H, c.LP, c.LP) if bias is not None else 0, dtype=torch.float32)
    dgb = out.new_empty((c.H, c.D) if gate_bias is not None else 0, dtype=torch.float32)
    return [*grads, dbias, dgb]


def bias_shares(c):
    """Rows that a program of the bias gradient sums, and how many programs share a tile's rows."""
    return c.rows_a_program(c.B * c.H * triton.cdiv(c.L, 64) ** 2)


FORWARD_OP = operation("attention_forward(Tensor[] parts, Tensor? gate_bias, Tensor? bias, Tensor? keys, int heads, "
                       "int axis, bool gated, float scale) -> (Tensor, Tensor)", forward, forward_sizes)
BACKWARD_OP = operation("attention_backward(Tensor[] parts, Tensor? gate_bias, Tensor? bias, Tensor? turned, "
                        "Tensor? keys, Tensor out, Tensor lse, Tensor gradient, int heads, int axis, bool gated, "
                        "float scale) -> Tensor[]", backward, backward_sizes)


class BiasedAttention(torch.autograd.Function):
    """attend() with its derivative; saves parts, out, lse and the padded bias."""

    @staticmethod
    def forward(ctx, bias, keys, gate_bias, heads, axis, gated, scale, *parts):
        ctx.how = heads, axis, gated, scale
        padded, turned, summand = padded_bias(bias, keys, views(parts, heads, axis, gated)[0])
        out, lse = FORWARD_OP(parts, gate_bias, padded, summand, *ctx.how)
        ctx.save_for_backward(bias, gate_bias, padded, turned, summand, out, lse, *parts)
        return out

    @staticmethod
    def backward(ctx, gradient):
        bias, gate_bias, padded, turned, summand, out, lse, *parts = ctx.saved_tensors
        *grads, dbias, dgb = BACKWARD_OP(parts, gate_bias, padded, turned, summand, out, lse, gradient.contiguous(),
                                         *ctx.how)
        if bias is not None:
            dbias = dbias.sum(0)[..., :bias.shape[-1], :bias.shape[-1]].to(bias.dtype)
        return (None if bias is None else dbias, None,
                None if gate_bias is None else dgb.view(gate_bias.shape).to(gate_bias.dtype), *[None] * 4, *grads)


def padded_bias(bias, keys, q):
    """(bias with the key mask, (B, H, LP, LP); its transpose; summands of keys (B or 1, R or 1, LP)), None where
    not needed, from bias (B, H, L, L) or None and keys (B, L) or (B, R, L), 1 = present, or None."""
    length, turned = q.shape[-2], None
    pad = padded_length(length) - length
    if bias is not None:
        bias = bias.to(torch.float32 if bias.dtype == torch.float16 else bias.dtype)  # which can hold PADDING
        if keys is not None and keys.dim() == 2:
            bias, keys = bias.masked_fill(~keys.bool()[:, None, None, :], MASKED), None
        bias = F.pad(bias, (0, pad, 0, pad), value=PADDING) if pad else bias
        bias, turned = bias.contiguous(), bias.mT.contiguous()
    elif keys is None and pad:
        keys = q.new_ones(1, length)
    if keys is not None:
        keys = keys[:, None] if keys.dim() == 2 else keys
        keys = F.pad((keys.float() - 1) * -MASKED, (0, pad), value=PADDING).contiguous()
    return bias, turned, keys


def gated_attention(parts, heads, axis, bias=None, keys=None, gate_bias=None):
    """Gated attention along axis 1 or 2 of (B, X, Y, c), a row for each place on the other; returns (B, X, Y, c).

    parts: [packed], q, k, v and gate behind each other (B, X, Y, 4 c), or [q, k, v, gate]; bias (B, H, L, L);
    keys (B, L), 1 = present; gate_bias (c,), added to the gate. Gradients for all but keys.
    """
    width = parts[-1].shape[-1] // (4 if len(parts) == 1 else 1) // heads
    return BiasedAttention.apply(bias, keys, gate_bias, heads, axis, True, width ** -0.5, *parts)


def row_attention(q, k, v, bias=None, keys=None, scale=None):
    """Attention without a gate for q, k, v (B, R, H, L, D), bias (B, H, L, L), keys (B, L) or (B, R, L)."""
    parts = [x.contiguous() for x in (q, k, v)]
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    return BiasedAttention.apply(bias, keys, None, q.shape[2], 0, False, scale, *parts)


def unsupported(dtype, width):
    """Why these kernels cannot take heads of this dtype and width; "" if they can."""
    if dtype not in DTYPES:
        return f"no Triton attention in {str(dtype)[6:]}"
    return "" if width in WIDTHS else f"no Triton attention for heads of {width} channels (at most {WIDTHS[-1]})"
