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
import torch
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
def pad_kernel(bias, mask, padded, turned, H, L, LP, sb, sh, si, sj, MASK: tl.constexpr, T: tl.constexpr):
    """bias (B, H, L, L) of any strides, and mask (B, L; 0 = masked), into padded and its transpose (B, H, LP, LP)."""
    bh = tl.program_id(2)
    b, h = (bh // H).to(tl.int64), (bh % H).to(tl.int64)
    i, j = tl.program_id(0) * T + tl.arange(0, T), tl.program_id(1) * T + tl.arange(0, T)
    inside = (i[:, None] < L) & (j[None, :] < L)
    x = tl.load(bias + b * sb + h * sh + i[:, None].to(tl.int64) * si + j[None, :].to(tl.int64) * sj, mask=inside,
                other=0.0).to(tl.float32)
    if MASK:
        x = tl.where(tl.load(mask + b * L + j, mask=j < L, other=1)[None, :] != 0, x, MASKED_KEY)
    x = tl.where(j[None, :] < L, x, PADDED_KEY).to(padded.dtype.element_ty)
    at = bh.to(tl.int64) * LP * LP
    tl.store(padded + at + i[:, None] * LP + j[None, :], x)
    tl.store(turned + at + j[:, None] * LP + i[None, :], tl.trans(x))


MASKED_KEY, PADDED_KEY = tl.constexpr(MASKED), tl.constexpr(PADDING)


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
def backward_q_kernel(q, k, v, g, gb, bias, keys, out, dout, lse, dq, dg, do, delta, dgb, R, H, L, LP, D, scale,
                      kb, kr, sqb, sqr, sqh, sql, sgb, sgr, sgh, sgl, sob, sor, soh, sol, tqb, tqr, tqh, tql,
                      tgb, tgr, tgh, tgl, BIAS: tl.constexpr, KEYS: tl.constexpr, GATE: tl.constexpr,
                      GATE_BIAS: tl.constexpr, EVEN: tl.constexpr, PRECISION: tl.constexpr, BD: tl.constexpr,
                      BM: tl.constexpr, BN: tl.constexpr, RU: tl.constexpr):
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
            s = gates(tile(g + b * sgb + r * sgr + h * sgh, i0, L, D, sgl, BM, BD, EVEN), gb, h, D, BD, GATE_BIAS)
            dgate = product * (1 - s)
            dt = (dt.to(tl.float32) * s).to(dt.dtype)
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
            at = b * tqb + (r0 + u) * tqr + h * tqh + i[:, None] * tql + d[None, :]
            tl.store(dq + at, (accs[u] * scale).to(dq.dtype.element_ty), mask=inside)


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
            at = b * tqb + (r0 + u) * tqr + h * tqh + j[:, None] * tql + d[None, :]
            tl.store(dk + at, (dks[u] * scale).to(dk.dtype.element_ty), mask=inside)
            tl.store(dv + at, dvs[u].to(dv.dtype.element_ty), mask=inside)


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
    at = (share * tl.num_programs(2) + bh).to(tl.int64) * LP * LP
    tl.store(dbias + at + i[:, None].to(tl.int64) * LP + j[None, :], db)


@triton.jit
def backward_short_kernel(q, k, v, g, gb, bias, keys, out, dout, lse, dq, dk, dv, dg, dbias, dgb, R, H, L, LP, D,
                          scale, rows, kb, kr, sqb, sqr, sqh, sql, sgb, sgr, sgh, sgl, sob, sor, soh, sol,
                          tqb, tqr, tqh, tql, tgb, tgr, tgh, tgl, BIAS: tl.constexpr, KEYS: tl.constexpr,
                          GATE: tl.constexpr, GATE_BIAS: tl.constexpr, EVEN: tl.constexpr,
                          PRECISION: tl.constexpr, BD: tl.constexpr, BL: tl.constexpr):
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
            s = gates(tile(g + b * sgb + r * sgr + h * sgh, 0, L, D, sgl, BL, BD, EVEN), gb, h, D, BD, GATE_BIAS)
            dgate = product * (1 - s)
            dt = (dt.to(tl.float32) * s).to(dt.dtype)
            part += tl.sum(dgate, 0)
            tl.store(dg + b * tgb + r * tgr + h * tgh + i[:, None] * tgl + d[None, :],
                     dgate.to(dg.dtype.element_ty), mask=inside)
        ls = tl.load(lse + ((b * R + r) * H + h) * L + i, mask=i < L, other=float("inf"))
        s = tl.dot(qt, tl.trans(kt), input_precision=PRECISION) * (scale * LOG2E) + t
        s += key_tile(keys, b, r, i, kb, kr, KEYS, BL)[None, :]
        p = tl.exp2(s - ls[:, None])
        ds = p * (tl.dot(dt, tl.trans(vt), input_precision=PRECISION) - de[:, None])
        db += ds
        pt, ds = p.to(qt.dtype), ds.to(qt.dtype)
        at = b * tqb + r * tqr + h * tqh + i[:, None] * tql + d[None, :]
        tl.store(dv + at, tl.dot(tl.trans(pt), dt, input_precision=PRECISION).to(dv.dtype.element_ty), mask=inside)
        tl.store(dk + at, (tl.dot(tl.trans(ds), qt, input_precision=PRECISION) * scale).to(dk.dtype.element_ty),
                 mask=inside)
        tl.store(dq + at, (tl.dot(ds, kt, input_precision=PRECISION) * scale).to(dq.dtype.element_ty), mask=inside)
    if BIAS:
        at = (share * tl.num_programs(1) + bh).to(tl.int64) * LP * LP
        tl.store(dbias + at + i[:, None] * LP + i[None, :], db)
    if GATE_BIAS:
        tl.store(dgb + (bh * tl.num_programs(0) + share).to(tl.int64) * BD + d, part)
