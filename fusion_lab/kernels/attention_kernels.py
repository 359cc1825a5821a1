"""The Triton kernels of biased attention, which biased_attention.py launches and explains.

Strides are those of sample, row, head and position, along D it is 1: q for q, k, v; g for the gate; o for the
output; t for gradients of q, k, v, and tg for the gate's. lse is in base 2. A score is two multiply-adds, one
for scale and bias, one for the exponent: what comes on top of these is most of their instructions.
"""
import triton
import triton.language as tl

from fusion_lab.kernels.triton_parts import LOG2E, reciprocal, sigmoid


@triton.jit
def places(pointer, l0, stride, BL: tl.constexpr, BD: tl.constexpr):
    """Addresses (BL, BD) in an (L, D) matrix from position l0 on; only within a tile do 32 bits suffice."""
    first = pointer + tl.cast(l0, tl.int64) * stride
    return first + (tl.arange(0, BL)[:, None] * stride + tl.arange(0, BD)[None, :])


@triton.jit
def tile(pointer, l0, L, D, stride, BL: tl.constexpr, BD: tl.constexpr, EVEN: tl.constexpr):
    """(BL, BD) of an (L, D) matrix from position l0 on; zeros outside."""
    i, d = l0 + tl.arange(0, BL), tl.arange(0, BD)
    at = places(pointer, l0, stride, BL, BD)
    if EVEN:
        found = tl.load(at)
    else:
        found = tl.load(at, mask=(i[:, None] < L) & (d[None, :] < D), other=0.0)
    return found


@triton.jit
def put(pointer, values, l0, L, D, stride, EVEN: tl.constexpr):
    """values (BL, BD) into an (L, D) matrix from position l0 on."""
    BL: tl.constexpr = values.shape[0]
    BD: tl.constexpr = values.shape[1]
    at, values = places(pointer, l0, stride, BL, BD), values.to(pointer.dtype.element_ty)
    if EVEN:
        tl.store(at, values)
    else:
        i, d = l0 + tl.arange(0, BL), tl.arange(0, BD)
        tl.store(at, values, mask=(i[:, None] < L) & (d[None, :] < D))


@triton.jit
def gates(gate, gate_bias, h, D, BD: tl.constexpr, BIASED: tl.constexpr):
    """sigmoid(gate + gate_bias) of a (BL, BD) tile of head h, in float32."""
    x = gate.to(tl.float32)
    if BIASED:
        d = tl.arange(0, BD)
        x += tl.load(gate_bias + h * D + d, mask=d < D, other=0.0).to(tl.float32)[None, :]
    return sigmoid(x)


@triton.jit
def bias_tile(bias, bh, i0, j0, LP, BM: tl.constexpr, BN: tl.constexpr, BIAS: tl.constexpr):
    """(BM, BN) of the bias from row i0 and column j0 on, or 0."""
    if BIAS:
        found = tl.load(places(bias + j0, bh.to(tl.int64) * LP + i0, LP, BM, BN)).to(tl.float32)
    else:
        found = 0.0
    return found


@triton.jit
def key_tile(keys, b, r, j, kb, kr):
    """Summand of the keys j of row r; kb, kr: strides of keys (B, R, LP), 0 if shared."""
    return tl.load(keys + b * kb + r * kr + j)


@triton.jit
def statistic(pointer, i, L, beyond, EVEN: tl.constexpr):
    """Of queries i, a float32 each; `beyond` L."""
    if EVEN:
        found = tl.load(pointer + i)
    else:
        found = tl.load(pointer + i, mask=i < L, other=beyond)
    return found


@triton.jit
def row_statistics(lse, delta, keys, b, r, h, i, j, R, H, L, kb, kr, KEYS: tl.constexpr, EVEN: tl.constexpr):
    """lse and delta of a row's queries i, and the summand of its keys j, or 0. Loaded a row ahead: no product
    takes them, so the compiler does not load them early by itself."""
    at = ((b * R + r) * H + h) * L
    if KEYS:
        mask = key_tile(keys, b, r, j, kb, kr)
    else:
        mask = 0.0
    return statistic(lse + at, i, L, float("inf"), EVEN), statistic(delta + at, i, L, 0.0, EVEN), mask


@triton.jit
def forward_kernel(q, k, v, g, gb, bias, keys, out, lse, R, H: tl.constexpr, L, LP, D: tl.constexpr, scale,
                   kb, kr, sqb, sqr, sqh, sql, sgb, sgr, sgh, sgl, sob, sor, soh, sol, BIAS: tl.constexpr,
                   KEYS: tl.constexpr, GATE: tl.constexpr, GATE_BIAS: tl.constexpr, EVEN: tl.constexpr,
                   PRECISION: tl.constexpr, BD: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
                   RU: tl.constexpr):
    """BM queries of one sample and head, in RU rows side by side."""
    i0, r0, bh = tl.program_id(0) * BM, tl.program_id(2).to(tl.int64) * RU, tl.program_id(1)
    b, h = (bh // H).to(tl.int64), (bh % H).to(tl.int64)
    i = i0 + tl.arange(0, BM)
    # Maxima are kept to base 2, so that an exponent is one multiply-add. But a tile may have no key except
    # -1e9, whose product with LOG2E is off by 18, and 2^18 is beyond float16: there differences come first.
    # A bias far below -1e9 would be off by more than float32 holds: row_attention() lifts it to that.
    UNIT: tl.constexpr = 1.0 if q.dtype.element_ty == tl.float16 else LOG2E
    REST: tl.constexpr = LOG2E / UNIT
    queries, openings, tops, sums, accs = (), (), (), (), ()
    for u in tl.static_range(RU):
        r = tl.minimum(r0 + u, R - 1)
        queries = queries + (tile(q + b * sqb + r * sqr + h * sqh, i0, L, D, sql, BM, BD, EVEN),)
        if GATE:  # long before it is needed: nothing waits for it then
            openings = openings + (tile(g + b * sgb + r * sgr + h * sgh, i0, L, D, sgl, BM, BD, EVEN),)
        tops = tops + (tl.full((BM,), float("-inf"), tl.float32),)
        sums = sums + (tl.zeros((BM,), tl.float32),)
        accs = accs + (tl.zeros((BM, BD), tl.float32),)
    for n in range(0, L, BN):
        j = n + tl.arange(0, BN)
        t = bias_tile(bias, bh, i0, n, LP, BM, BN, BIAS)
        new_tops, new_sums, new_accs = (), (), ()
        for u in tl.static_range(RU):
            r = tl.minimum(r0 + u, R - 1)
            at = b * sqb + r * sqr + h * sqh
            kt, vt = tile(k + at, n, L, D, sql, BN, BD, EVEN), tile(v + at, n, L, D, sql, BN, BD, EVEN)
            s = tl.dot(queries[u], tl.trans(kt), input_precision=PRECISION) * scale + t
            if KEYS:
                s += key_tile(keys, b, r, j, kb, kr)[None, :]
            top = tl.maximum(tops[u], tl.max(s, 1) * UNIT)
            p, shrink = tl.exp2((s * UNIT - top[:, None]) * REST), tl.exp2((tops[u] - top) * REST)
            new_tops = new_tops + (top,)
            new_sums = new_sums + (sums[u] * shrink + tl.sum(p, 1),)
            new_accs = new_accs + (tl.dot(p.to(vt.dtype), vt, accs[u] * shrink[:, None],
                                          input_precision=PRECISION),)
        tops, sums, accs = new_tops, new_sums, new_accs
    for u in tl.static_range(RU):
        r = r0 + u
        if r < R:
            result = accs[u] * reciprocal(sums[u])[:, None]  # the largest exponential is about 1
            if GATE:
                result = result * gates(openings[u], gb, h, D, BD, GATE_BIAS)
            put(out + b * sob + r * sor + h * soh, result, i0, L, D, sol, EVEN)
            # A row without any key: no probability in backward, where this sum would drown in its maximum.
            found = tl.where(tops[u] < -5e8, float("inf"), tops[u] * REST + tl.log2(sums[u]))
            tl.store(lse + ((b * R + r) * H + h) * L + i, found, mask=i < L)


@triton.jit
def gate_backward_kernel(g, gb, out, dout, dg, do, delta, R, H: tl.constexpr, L, D: tl.constexpr, sgb, sgr,
                         sgh, sgl, sob, sor, soh, sol, tgb, tgr, tgh, tgl, GATE: tl.constexpr,
                         GATE_BIAS: tl.constexpr, EVEN: tl.constexpr, BD: tl.constexpr, BM: tl.constexpr,
                         dgb=None):
    """What backward of attention reads, of BM queries of a row: delta (B, R, H, L) = rowsum(dout out) and,
    with a gate, do (as out lies). And dg; dgb holds a part (B programs, H, D) of the gate bias's gradient."""
    i0, r, bh = tl.program_id(0) * BM, tl.program_id(2).to(tl.int64), tl.program_id(1)
    b, h = (bh // H).to(tl.int64), (bh % H).to(tl.int64)
    i, d = i0 + tl.arange(0, BM), tl.arange(0, BD)
    at_out = b * sob + r * sor + h * soh
    dt = tile(dout + at_out, i0, L, D, sol, BM, BD, EVEN)
    ot = tile(out + at_out, i0, L, D, sol, BM, BD, EVEN)
    if GATE:
        gt = tile(g + b * sgb + r * sgr + h * sgh, i0, L, D, sgl, BM, BD, EVEN)
    product = dt.to(tl.float32) * ot.to(tl.float32)
    tl.store(delta + ((b * R + r) * H + h) * L + i, tl.sum(product, 1), mask=i < L)
    if GATE:
        opening = gates(gt, gb, h, D, BD, GATE_BIAS)
        dgate = product * (1 - opening)
        put(do + at_out, dt.to(tl.float32) * opening, i0, L, D, sol, EVEN)
        put(dg + b * tgb + r * tgr + h * tgh, dgate, i0, L, D, tgl, EVEN)
        if GATE_BIAS:
            row = (b * R + r) * tl.num_programs(0) + tl.program_id(0)
            tl.store(dgb + (row * H + h) * D + d, tl.sum(dgate, 0), mask=d < D)


@triton.jit
def backward_q_kernel(q, k, v, bias, keys, do, lse, delta, dq, R, H: tl.constexpr, L, LP, D: tl.constexpr,
                      scale, kb, kr, sqb, sqr, sqh, sql, sob, sor, soh, sol, tqb, tqr, tqh, tql,
                      BIAS: tl.constexpr, KEYS: tl.constexpr, EVEN: tl.constexpr, PRECISION: tl.constexpr,
                      BD: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, RU: tl.constexpr):
    """dq of BM queries in RU rows side by side. t*: strides of dq."""
    i0, r0, bh = tl.program_id(0) * BM, tl.program_id(2).to(tl.int64) * RU, tl.program_id(1)
    b, h = (bh // H).to(tl.int64), (bh % H).to(tl.int64)
    i = i0 + tl.arange(0, BM)
    queries, dos, stats, deltas, accs, ks, vs = (), (), (), (), (), (), ()
    for u in tl.static_range(RU):
        r = tl.minimum(r0 + u, R - 1)
        at, stat = b * sqb + r * sqr + h * sqh, ((b * R + r) * H + h) * L
        queries = queries + (tile(q + at, i0, L, D, sql, BM, BD, EVEN),)
        dos = dos + (tile(do + b * sob + r * sor + h * soh, i0, L, D, sol, BM, BD, EVEN),)
        stats = stats + (statistic(lse + stat, i, L, float("inf"), EVEN),)
        deltas = deltas + (statistic(delta + stat, i, L, 0.0, EVEN),)
        accs = accs + (tl.zeros((BM, BD), tl.float32),)
        ks, vs = ks + (k + at,), vs + (v + at,)
    for n in range(0, L, BN):
        j = n + tl.arange(0, BN)
        t = bias_tile(bias, bh, i0, n, LP, BM, BN, BIAS)
        new_accs, new_ks, new_vs = (), (), ()
        for u in tl.static_range(RU):
            r = tl.minimum(r0 + u, R - 1)
            kt, vt = tile(ks[u], 0, L - n, D, sql, BN, BD, EVEN), tile(vs[u], 0, L - n, D, sql, BN, BD, EVEN)
            new_ks, new_vs = new_ks + (ks[u] + BN * sql,), new_vs + (vs[u] + BN * sql,)
            s = tl.dot(queries[u], tl.trans(kt), input_precision=PRECISION) * scale + t
            if KEYS:
                s += key_tile(keys, b, r, j, kb, kr)[None, :]
            ds = tl.exp2(s * LOG2E - stats[u][:, None]) * (
                tl.dot(dos[u], tl.trans(vt), input_precision=PRECISION) - deltas[u][:, None])
            new_accs = new_accs + (tl.dot(ds.to(kt.dtype), kt, accs[u], input_precision=PRECISION),)
        accs, ks, vs = new_accs, new_ks, new_vs
    for u in tl.static_range(RU):
        if r0 + u < R:
            put(dq + b * tqb + (r0 + u) * tqr + h * tqh, accs[u] * scale, i0, L, D, tql, EVEN)


@triton.jit
def backward_kv_kernel(q, k, v, turned, keys, do, lse, delta, dk, dv, scores, R, H: tl.constexpr, L, LP,
                       D: tl.constexpr, scale, first, end, kb, kr, sqb, sqr, sqh, sql, sob, sor, soh, sol,
                       tqb, tqr, tqh, tql, BIAS: tl.constexpr, KEYS: tl.constexpr, STORE: tl.constexpr,
                       EVEN: tl.constexpr, PRECISION: tl.constexpr, BD: tl.constexpr, BM: tl.constexpr,
                       BN: tl.constexpr, RU: tl.constexpr):
    """dk and dv of BN keys in RU rows of those from first to end; with STORE dS, too, as scores (rows, B, H,
    keys, queries). Scores are (keys, queries), so that P and dS are left operands as they stand, and the bias
    is read along the rows of its transpose."""
    j0, r0, bh = tl.program_id(0) * BN, first + tl.program_id(2).to(tl.int64) * RU, tl.program_id(1)
    b, h = (bh // H).to(tl.int64), (bh % H).to(tl.int64)
    j = j0 + tl.arange(0, BN)
    ks, vs, dks, dvs, masks, qs, dos = (), (), (), (), (), (), ()
    for u in tl.static_range(RU):
        r = tl.minimum(r0 + u, end - 1)
        at = b * sqb + r * sqr + h * sqh
        ks = ks + (tile(k + at, j0, L, D, sql, BN, BD, EVEN),)
        vs = vs + (tile(v + at, j0, L, D, sql, BN, BD, EVEN),)
        if KEYS:
            masks = masks + (key_tile(keys, b, r, j, kb, kr),)
        dks = dks + (tl.zeros((BN, BD), tl.float32),)
        dvs = dvs + (tl.zeros((BN, BD), tl.float32),)
        qs, dos = qs + (q + at,), dos + (do + b * sob + r * sor + h * soh,)
    for m in range(0, L, BM):
        i = m + tl.arange(0, BM)
        t = bias_tile(turned, bh, j0, m, LP, BN, BM, BIAS)
        new_dks, new_dvs, new_qs, new_dos = (), (), (), ()
        for u in tl.static_range(RU):
            r = tl.minimum(r0 + u, end - 1)
            qt, dt = tile(qs[u], 0, L - m, D, sql, BM, BD, EVEN), tile(dos[u], 0, L - m, D, sol, BM, BD, EVEN)
            new_qs, new_dos = new_qs + (qs[u] + BM * sql,), new_dos + (dos[u] + BM * sol,)
            stat = ((b * R + r) * H + h) * L
            ls = statistic(lse + stat, i, L, float("inf"), EVEN)
            de = statistic(delta + stat, i, L, 0.0, EVEN)
            s = tl.dot(ks[u], tl.trans(qt), input_precision=PRECISION) * scale + t
            dp = tl.dot(vs[u], tl.trans(dt), input_precision=PRECISION)  # while exponentials are made
            if KEYS:
                s += masks[u][:, None]
            p = tl.exp2(s * LOG2E - ls[None, :])
            ds = (p * (dp - de[None, :])).to(qt.dtype)
            new_dvs = new_dvs + (tl.dot(p.to(dt.dtype), dt, dvs[u], input_precision=PRECISION),)
            new_dks = new_dks + (tl.dot(ds, qt, dks[u], input_precision=PRECISION),)
            if STORE:
                here = scores + ((r - first) * tl.num_programs(1) + bh) * LP * LP + m
                tl.store(places(here, j0, LP, BN, BM), ds)
        dks, dvs, qs, dos = new_dks, new_dvs, new_qs, new_dos
    for u in tl.static_range(RU):
        if r0 + u < end:
            at = b * tqb + (r0 + u) * tqr + h * tqh
            put(dk + at, dks[u] * scale, j0, L, D, tql, EVEN)
            put(dv + at, dvs[u], j0, L, D, tql, EVEN)


@triton.jit
def backward_scores_kernel(k, scores, dq, dbias, H: tl.constexpr, L, D: tl.constexpr, scale, first, end, rows,
                           sqb, sqr, sqh, sql, tqb, tqr, tqh, tql, EVEN: tl.constexpr,
                           FULL: tl.constexpr, PRECISION: tl.constexpr, BD: tl.constexpr, BM: tl.constexpr,
                           BN: tl.constexpr, LP: tl.constexpr):
    """dq of BM queries from dS, as backward_kv_kernel wrote it, and the bias's gradient of these queries and
    all LP keys, of a share of `rows` rows of those from first to end: dbias (shares, B, H, LP, LP), to which
    rows behind the first ones are added. FULL: there are LP keys, and heads as wide as a tile."""
    i0, share, bh = tl.program_id(0) * BM, tl.program_id(1).to(tl.int64), tl.program_id(2)
    b, h = (bh // H).to(tl.int64), (bh % H).to(tl.int64)
    i, j, dbs = i0 + tl.arange(0, BM), tl.arange(0, BN), ()
    dbias += (share * tl.num_programs(2) + bh) * LP * LP
    for _ in tl.static_range(LP // BN):
        dbs = dbs + (tl.zeros((BN, BM), tl.float32),)
    for r in range(first + share * rows, tl.minimum(first + share * rows + rows, end)):
        at, acc, new_dbs = b * sqb + r * sqr + h * sqh, tl.zeros((BM, BD), tl.float32), ()
        here = scores + ((r - first) * tl.num_programs(2) + bh) * LP * LP + i0
        for n in tl.static_range(LP // BN):
            ds = tile(here, n * BN, L, LP, LP, BN, BM, FULL)  # keys beyond L were not written
            kt = tile(k + at, n * BN, L, D, sql, BN, BD, FULL)
            acc = tl.dot(tl.trans(ds), kt, acc, input_precision=PRECISION)
            new_dbs = new_dbs + (dbs[n] + ds.to(tl.float32),)
        dbs = new_dbs
        put(dq + b * tqb + r * tqr + h * tqh, acc * scale, i0, L, D, tql, EVEN)
    for n in tl.static_range(LP // BN):
        at, db = dbias + i[:, None] * LP + n * BN + j[None, :], tl.trans(dbs[n])
        if first > 0:
            db += tl.load(at)
        tl.store(at, db)


@triton.jit
def backward_bias_kernel(q, k, v, bias, keys, do, lse, delta, dbias, R, H: tl.constexpr, L, LP,
                         D: tl.constexpr, scale, rows, kb, kr, sqb, sqr, sqh, sql, sob, sor, soh, sol,
                         KEYS: tl.constexpr, EVEN: tl.constexpr, PRECISION: tl.constexpr, BD: tl.constexpr,
                         BM: tl.constexpr, BN: tl.constexpr):
    """A (BM, BN) tile of the bias gradient, of a share of `rows` rows: dbias (shares, B, H, LP, LP)."""
    bh, share, nj = tl.program_id(2), tl.program_id(1).to(tl.int64), tl.cdiv(L, BN)
    i0, j0 = tl.program_id(0) // nj * BM, tl.program_id(0) % nj * BN
    b, h = (bh // H).to(tl.int64), (bh % H).to(tl.int64)
    i, j = i0 + tl.arange(0, BM), j0 + tl.arange(0, BN)
    t = bias_tile(bias, bh, i0, j0, LP, BM, BN, True)
    db = tl.zeros((BM, BN), tl.float32)
    end = tl.minimum(share * rows + rows, R)
    ls, de, mask = row_statistics(lse, delta, keys, b, share * rows, h, i, j, R, H, L, kb, kr, KEYS, EVEN)
    for r in range(share * rows, end):
        after = row_statistics(lse, delta, keys, b, tl.minimum(r + 1, end - 1), h, i, j, R, H, L, kb, kr,
                               KEYS, EVEN)
        at, at_out = b * sqb + r * sqr + h * sqh, b * sob + r * sor + h * soh
        qt, dt = tile(q + at, i0, L, D, sql, BM, BD, EVEN), tile(do + at_out, i0, L, D, sol, BM, BD, EVEN)
        kt, vt = tile(k + at, j0, L, D, sql, BN, BD, EVEN), tile(v + at, j0, L, D, sql, BN, BD, EVEN)
        s = tl.dot(qt, tl.trans(kt), input_precision=PRECISION) * scale + t
        if KEYS:
            s += mask[None, :]
        p = tl.exp2(s * LOG2E - ls[:, None])
        db += p * (tl.dot(dt, tl.trans(vt), input_precision=PRECISION) - de[:, None])
        ls, de, mask = after
    place = (share * tl.num_programs(2) + bh).to(tl.int64) * LP * LP
    tl.store(dbias + place + i[:, None].to(tl.int64) * LP + j[None, :], db)


@triton.jit
def backward_short_kernel(q, k, v, bias, keys, do, lse, delta, dq, dk, dv, scores, R, H: tl.constexpr, L, LP,
                          D: tl.constexpr, scale, first, end, kb, kr, sqb, sqr, sqh, sql, sob, sor, soh, sol,
                          tqb, tqr, tqh, tql, BIAS: tl.constexpr, KEYS: tl.constexpr, EVEN: tl.constexpr,
                          PRECISION: tl.constexpr, BD: tl.constexpr, BL: tl.constexpr, ROWS: tl.constexpr):
    """All gradients of ROWS whole rows, L <= BL, of those from first to end: five products and one
    exponential a score. With a bias dS, too, as scores (rows, B, H, queries, keys)."""
    r0, bh = first + tl.program_id(0).to(tl.int64) * ROWS, tl.program_id(1)
    b, h = (bh // H).to(tl.int64), (bh % H).to(tl.int64)
    i = tl.arange(0, BL)
    for r in range(r0, tl.minimum(r0 + ROWS, end)):
        at, stat = b * sqb + r * sqr + h * sqh, ((b * R + r) * H + h) * L
        qt, kt = tile(q + at, 0, L, D, sql, BL, BD, EVEN), tile(k + at, 0, L, D, sql, BL, BD, EVEN)
        vt = tile(v + at, 0, L, D, sql, BL, BD, EVEN)
        dt = tile(do + b * sob + r * sor + h * soh, 0, L, D, sol, BL, BD, EVEN)
        ls = statistic(lse + stat, i, L, float("inf"), EVEN)
        de = statistic(delta + stat, i, L, 0.0, EVEN)
        s = tl.dot(qt, tl.trans(kt), input_precision=PRECISION) * scale
        s += bias_tile(bias, bh, 0, 0, LP, BL, BL, BIAS)
        if KEYS:
            s += key_tile(keys, b, r, i, kb, kr)[None, :]
        p = tl.exp2(s * LOG2E - ls[:, None])
        ds = p * (tl.dot(dt, tl.trans(vt), input_precision=PRECISION) - de[:, None])
        p, ds = p.to(qt.dtype), ds.to(qt.dtype)
        if BIAS:
            here = scores + ((r - first) * tl.num_programs(1) + bh) * LP * LP
            tl.store(places(here, 0, LP, BL, BL), ds)
        at = b * tqb + r * tqr + h * tqh
        put(dv + at, tl.dot(tl.trans(p), dt, input_precision=PRECISION), 0, L, D, tql, EVEN)
        put(dk + at, tl.dot(tl.trans(ds), qt, input_precision=PRECISION) * scale, 0, L, D, tql, EVEN)
        put(dq + at, tl.dot(ds, kt, input_precision=PRECISION) * scale, 0, L, D, tql, EVEN)
