"""The Triton kernels of biased attention. plan.py says which of them run when, and launches them.

Tensors: B samples, R rows, H heads, L positions of a row, D channels of a head. LP: L, rounded up to tiles.
Tiles: BM queries, BN keys, BD channels: D rounded up to a power of two, 16 at least. RU: rows that a program
takes together, loading each bias tile once. ROWS: rows that it takes one after another. In helpers: BL
positions from l0 on, BC columns.
Indices: sample b, row r, head h, bh = b H + h; queries i from i0 on, keys j from j0 on, channels d.

    s = scale q k^T + bias + key_bias              scores, never stored
    p = softmax(s) = 2^(s log2(e) - lse)           lse (B, R, H, L): log2 of the sum of exponentials
    o = p v;  out = o sigmoid(gate + gate_bias)    out = o where there is no gate
    do = dout sigmoid(.);  delta = rowsum(do o) = rowsum(dout out)
    ds = p (do v^T - delta)
    dq = scale ds k;  dk = scale ds^T q;  dv = p^T do;  dbias = the sum of ds over rows

Pointers, of which a launch says the strides (sample, row, head, position); along channels it is 1:
    q, k, v (B, R, H, L, D): q_strides; gate: gate_strides; out, dout, do: out_strides
    dq, dk, dv: dq_strides; dgate: dgate_strides
Contiguous pointers:
    bias (B, H, LP, LP) and bias_transposed, its transpose: PADDING beyond L, so that no kernel masks a score.
    Where LP is more than L and there is no bias, the launcher makes a key mask.
    key_bias (B or 1, R or 1, LP): added to scores; key_bias_strides (sample, row) are 0 where it is shared
    lse, delta (B, R, H, L) in float32; gate_bias (H, D)

Order of parameters: tensors; numbers, which a launch gives by position (R, H, L, LP, D, scale, then rows or
shares); strides and flags, by name.

Flags: BIAS, KEY_BIAS, GATE, GATE_BIAS say what there is. With WHOLE_TILES L is a multiple of all tiles and D
is BD: loads and stores need no bounds checks, which would cost more than the scores.
"""
import triton
import triton.language as tl

from evoformer_kernels.attention.online_softmax import log_sum_exp, online_softmax
from evoformer_kernels.common import LOG2E, reciprocal, sigmoid

SAMPLE, ROW, HEAD, POSITION = (tl.constexpr(n) for n in range(4))  # of a tuple of strides


@triton.jit
def head_offset(b, r, h, strides):
    """Offset of the matrix (L, D) of one sample, row and head; strides: sample, row, head, position."""
    return b * strides[SAMPLE] + r * strides[ROW] + h * strides[HEAD]


@triton.jit
def tile_pointers(matrix, l0, stride, BL: tl.constexpr, BD: tl.constexpr):
    """Pointers (BL, BD) into a matrix (L, D) from position l0 on; `stride` lies between two positions."""
    first = matrix + tl.cast(l0, tl.int64) * stride  # within a tile offsets fit 32 bits, beyond they may not
    return first + (tl.arange(0, BL)[:, None] * stride + tl.arange(0, BD)[None, :])


@triton.jit
def load_tile(matrix, l0, L, D, stride, BL: tl.constexpr, BD: tl.constexpr, WHOLE_TILES: tl.constexpr):
    """A tile (BL, BD) of a matrix (L, D) from position l0 on; 0 outside."""
    pointers = tile_pointers(matrix, l0, stride, BL, BD)
    i, d = l0 + tl.arange(0, BL), tl.arange(0, BD)
    inside = (i[:, None] < L) & (d[None, :] < D)
    return tl.load(pointers) if WHOLE_TILES else tl.load(pointers, mask=inside, other=0.0)


@triton.jit
def store_tile(matrix, values, l0, L, D, stride, WHOLE_TILES: tl.constexpr):
    """values (BL, BD) into a matrix (L, D) from position l0 on, in its dtype."""
    BL: tl.constexpr = values.shape[0]
    BD: tl.constexpr = values.shape[1]
    pointers = tile_pointers(matrix, l0, stride, BL, BD)
    values = values.to(matrix.dtype.element_ty)
    if WHOLE_TILES:
        tl.store(pointers, values)
    else:
        i, d = l0 + tl.arange(0, BL), tl.arange(0, BD)
        tl.store(pointers, values, mask=(i[:, None] < L) & (d[None, :] < D))


@triton.jit
def store_dscores(dscores, row, bh, heads, LP, l0, column0, ds):
    """ds (BL, BC) into the matrix (LP, LP) of a row and head; dscores (rows, heads, LP, LP), heads = B H."""
    matrix = dscores + (row * heads + bh) * LP * LP + column0
    tl.store(tile_pointers(matrix, l0, LP, ds.shape[0], ds.shape[1]), ds)


@triton.jit
def gate_sigmoid(gate_tile, gate_bias, h, D, BD: tl.constexpr, GATE_BIAS: tl.constexpr):
    """sigmoid(gate + gate_bias) (BL, BD) in float32, of a tile (BL, BD) of head h; gate_bias (H, D)."""
    x = gate_tile.to(tl.float32)
    if GATE_BIAS:
        d = tl.arange(0, BD)
        x += tl.load(gate_bias + h * D + d, mask=d < D, other=0.0).to(tl.float32)[None, :]
    return sigmoid(x)


@triton.jit
def load_bias(bias, bh, row0, column0, LP, BL: tl.constexpr, BC: tl.constexpr, BIAS: tl.constexpr):
    """A tile (BL, BC) of bias (B H, LP, LP) in float32, from row0 and column0 on; the number 0 without."""
    l0 = bh.to(tl.int64) * LP + row0
    return tl.load(tile_pointers(bias + column0, l0, LP, BL, BC)).to(tl.float32) if BIAS else 0.0


@triton.jit
def load_key_bias(key_bias, b, r, j, key_bias_strides):
    """What is added to scores of keys j (BN,) in row r: (BN,), 0 or -1e9, and PADDING beyond L."""
    return tl.load(key_bias + b * key_bias_strides[SAMPLE] + r * key_bias_strides[ROW] + j)


@triton.jit
def load_statistic(pointer, i, L, beyond, WHOLE_TILES: tl.constexpr):
    """Numbers (BM,) of queries i (BM,) from pointer (L,), of one row; `beyond` for those beyond L."""
    return tl.load(pointer + i) if WHOLE_TILES else tl.load(pointer + i, mask=i < L, other=beyond)


@triton.jit
def load_statistics(lse, delta, first, i, L, WHOLE_TILES: tl.constexpr):
    """lse (BM,) and delta (BM,) of queries i (BM,) of the row and head whose first number has this offset."""
    return (load_statistic(lse + first, i, L, float("inf"), WHOLE_TILES),
            load_statistic(delta + first, i, L, 0.0, WHOLE_TILES))


@triton.jit
def load_row_statistics(lse, delta, key_bias, b, r, h, i, j, R, H, L, key_bias_strides,
                        KEY_BIAS: tl.constexpr, WHOLE_TILES: tl.constexpr):
    """lse (BM,) and delta (BM,) of queries i in row r, and the mask (BN,) of its keys j, 0 without."""
    first = ((b * R + r) * H + h) * L
    mask = load_key_bias(key_bias, b, r, j, key_bias_strides) if KEY_BIAS else 0.0
    lse_tile, delta_tile = load_statistics(lse, delta, first, i, L, WHOLE_TILES)
    return lse_tile, delta_tile, mask


@triton.jit
def attention_forward_kernel(q, k, v, gate, gate_bias, bias, key_bias, out, lse, R, H: tl.constexpr, L, LP,
                             D: tl.constexpr, scale, key_bias_strides, q_strides, gate_strides, out_strides,
                             BIAS: tl.constexpr, KEY_BIAS: tl.constexpr, GATE: tl.constexpr,
                             GATE_BIAS: tl.constexpr, WHOLE_TILES: tl.constexpr, BD: tl.constexpr,
                             BM: tl.constexpr, BN: tl.constexpr, RU: tl.constexpr):
    """One program: out and lse of BM queries of one sample and head, in RU rows.

    Grid: tiles of BM queries; bh; groups of RU rows. Writes out (B, R, H, L, D), lse (B, R, H, L).
    Reads q, k, v, gate (B, R, H, L, D), gate_bias (H, D), bias (B, H, LP, LP), key_bias (B|1, R|1, LP).

    For each tile of keys s = scale q k^T + bias + key_bias, which online_softmax() adds to maxima, sums and
    outputs acc. Then out = acc / sum sigmoid(gate + gate_bias); log_sum_exp() makes lse.
    """
    i0, r0, bh = tl.program_id(0) * BM, tl.program_id(2).to(tl.int64) * RU, tl.program_id(1)
    b, h = (bh // H).to(tl.int64), (bh % H).to(tl.int64)
    i = i0 + tl.arange(0, BM)  # (BM,)
    SCORE_FACTOR: tl.constexpr = 1.0 if q.dtype.element_ty == tl.float16 else LOG2E  # of online_softmax()
    # Tuples have one entry for each of the RU rows.
    q_tiles, gate_tiles, maxima, sums, accs = (), (), (), (), ()
    for u in tl.static_range(RU):
        r = tl.minimum(r0 + u, R - 1)  # rows beyond the last are that one again, and not stored
        q_tile = load_tile(q + head_offset(b, r, h, q_strides), i0, L, D, q_strides[POSITION], BM, BD,
                           WHOLE_TILES)  # (BM, BD)
        q_tiles = q_tiles + (q_tile,)
        if GATE:  # loaded long before it is needed: nothing waits for it then
            gate_tile = load_tile(gate + head_offset(b, r, h, gate_strides), i0, L, D, gate_strides[POSITION],
                                  BM, BD, WHOLE_TILES)  # (BM, BD)
            gate_tiles = gate_tiles + (gate_tile,)
        maxima = maxima + (tl.full((BM,), float("-inf"), tl.float32),)
        sums, accs = sums + (tl.zeros((BM,), tl.float32),), accs + (tl.zeros((BM, BD), tl.float32),)
    for j0 in range(0, L, BN):
        j = j0 + tl.arange(0, BN)  # (BN,)
        bias_tile = load_bias(bias, bh, i0, j0, LP, BM, BN, BIAS)  # (BM, BN)
        new_maxima, new_sums, new_accs = (), (), ()
        for u in tl.static_range(RU):
            r = tl.minimum(r0 + u, R - 1)
            offset = head_offset(b, r, h, q_strides)
            k_tile = load_tile(k + offset, j0, L, D, q_strides[POSITION], BN, BD, WHOLE_TILES)  # (BN, BD)
            v_tile = load_tile(v + offset, j0, L, D, q_strides[POSITION], BN, BD, WHOLE_TILES)  # (BN, BD)
            # Scores.
            s = tl.dot(q_tiles[u], tl.trans(k_tile))  # (BM, BN)
            s = s * scale + bias_tile
            if KEY_BIAS:
                s += load_key_bias(key_bias, b, r, j, key_bias_strides)[None, :]
            # Online softmax, and the output.
            maximum, total, acc = online_softmax(s, v_tile, maxima[u], sums[u], accs[u], SCORE_FACTOR)
            new_maxima, new_sums = new_maxima + (maximum,), new_sums + (total,)  # (BM,) each
            new_accs = new_accs + (acc,)  # (BM, BD)
        maxima, sums, accs = new_maxima, new_sums, new_accs
    for u in tl.static_range(RU):
        r = r0 + u
        if r < R:
            result = accs[u] * reciprocal(sums[u])[:, None]  # (BM, BD); each sum has one exponential of 1
            if GATE:
                result = result * gate_sigmoid(gate_tiles[u], gate_bias, h, D, BD, GATE_BIAS)
            store_tile(out + head_offset(b, r, h, out_strides), result, i0, L, D, out_strides[POSITION],
                       WHOLE_TILES)
            row_lse = log_sum_exp(maxima[u], sums[u], SCORE_FACTOR)  # (BM,)
            tl.store(lse + ((b * R + r) * H + h) * L + i, row_lse, mask=i < L)


@triton.jit
def attention_gate_backward_kernel(gate, gate_bias, out, dout, dgate, do, delta, gate_bias_sums, R,
                                   H: tl.constexpr, L, D: tl.constexpr, gate_strides, out_strides,
                                   dgate_strides, GATE: tl.constexpr, GATE_BIAS: tl.constexpr,
                                   WHOLE_TILES: tl.constexpr, BD: tl.constexpr, BM: tl.constexpr):
    """One program: delta, do and dgate of BM queries of one sample, head and row, which backward begins with.

    Grid: axis 0: tiles of BM queries; axis 1: bh; axis 2: rows.
    Reads gate, out, dout (B, R, H, L, D), gate_bias (H, D).
    Writes delta (B, R, H, L) and, with GATE, do, dgate (B, R, H, L, D).
    With GATE_BIAS also gate_bias_sums (B R tiles, H, D): partial sums of the gate bias's gradient.

        delta = rowsum(dout out);  do = dout sigmoid(.);  dgate = dout out (1 - sigmoid(.))
    Without GATE do is dout. Behind an output projection output_backward.py does this instead.
    """
    i0, r, bh = tl.program_id(0) * BM, tl.program_id(2).to(tl.int64), tl.program_id(1)
    b, h = (bh // H).to(tl.int64), (bh % H).to(tl.int64)
    i, d = i0 + tl.arange(0, BM), tl.arange(0, BD)  # (BM,), (BD,)
    offset = head_offset(b, r, h, out_strides)
    dout_tile = load_tile(dout + offset, i0, L, D, out_strides[POSITION], BM, BD, WHOLE_TILES)  # (BM, BD)
    out_tile = load_tile(out + offset, i0, L, D, out_strides[POSITION], BM, BD, WHOLE_TILES)  # (BM, BD)
    if GATE:
        gate_tile = load_tile(gate + head_offset(b, r, h, gate_strides), i0, L, D, gate_strides[POSITION], BM,
                              BD, WHOLE_TILES)  # (BM, BD)
    dout_out = dout_tile.to(tl.float32) * out_tile.to(tl.float32)  # (BM, BD)
    tl.store(delta + ((b * R + r) * H + h) * L + i, tl.sum(dout_out, 1), mask=i < L)  # (BM,)
    if GATE:
        opening = gate_sigmoid(gate_tile, gate_bias, h, D, BD, GATE_BIAS)  # (BM, BD)
        dgate_tile = dout_out * (1 - opening)  # (BM, BD)
        store_tile(do + offset, dout_tile.to(tl.float32) * opening, i0, L, D, out_strides[POSITION],
                   WHOLE_TILES)
        store_tile(dgate + head_offset(b, r, h, dgate_strides), dgate_tile, i0, L, D, dgate_strides[POSITION],
                   WHOLE_TILES)
        if GATE_BIAS:
            number = (b * R + r) * tl.num_programs(0) + tl.program_id(0)  # of this partial sum
            tl.store(gate_bias_sums + (number * H + h) * D + d, tl.sum(dgate_tile, 0), mask=d < D)  # (BD,)


@triton.jit
def attention_backward_q_kernel(q, k, v, bias, key_bias, do, lse, delta, dq, R, H: tl.constexpr, L, LP,
                                D: tl.constexpr, scale, key_bias_strides, q_strides, out_strides, dq_strides,
                                BIAS: tl.constexpr, KEY_BIAS: tl.constexpr, WHOLE_TILES: tl.constexpr,
                                BD: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, RU: tl.constexpr):
    """One program: dq of BM queries of one sample and head, in RU rows. It recomputes scores.

    Grid: axis 0: tiles of BM queries; axis 1: bh; axis 2: groups of RU rows.
    Reads q, k, v, do (B, R, H, L, D), bias (B, H, LP, LP), key_bias (B|1, R|1, LP), lse, delta (B, R, H, L).
    Writes dq (B, R, H, L, D).

    For each tile of keys: s = scale q k^T + bias + key_bias;  p = 2^(s log2(e) - lse)
        ds = p (do v^T - delta);  dq += ds k.  At the end dq is multiplied by scale.
    """
    i0, r0, bh = tl.program_id(0) * BM, tl.program_id(2).to(tl.int64) * RU, tl.program_id(1)
    b, h = (bh // H).to(tl.int64), (bh % H).to(tl.int64)
    i = i0 + tl.arange(0, BM)  # (BM,)
    # Tuples have one entry for each of the RU rows; k_rows and v_rows move with the keys.
    q_tiles, do_tiles, lses, deltas, accs, k_rows, v_rows = (), (), (), (), (), (), ()
    for u in tl.static_range(RU):
        r = tl.minimum(r0 + u, R - 1)  # rows beyond the last are that one again, and not stored
        offset, first = head_offset(b, r, h, q_strides), ((b * R + r) * H + h) * L
        q_tile = load_tile(q + offset, i0, L, D, q_strides[POSITION], BM, BD, WHOLE_TILES)  # (BM, BD)
        do_tile = load_tile(do + head_offset(b, r, h, out_strides), i0, L, D, out_strides[POSITION], BM, BD,
                            WHOLE_TILES)  # (BM, BD)
        q_tiles, do_tiles = q_tiles + (q_tile,), do_tiles + (do_tile,)
        lse_tile, delta_tile = load_statistics(lse, delta, first, i, L, WHOLE_TILES)  # (BM,) each
        lses, deltas = lses + (lse_tile,), deltas + (delta_tile,)
        accs = accs + (tl.zeros((BM, BD), tl.float32),)
        k_rows, v_rows = k_rows + (k + offset,), v_rows + (v + offset,)
    for j0 in range(0, L, BN):
        j = j0 + tl.arange(0, BN)  # (BN,)
        bias_tile = load_bias(bias, bh, i0, j0, LP, BM, BN, BIAS)  # (BM, BN)
        new_accs, new_k_rows, new_v_rows = (), (), ()
        for u in tl.static_range(RU):
            r = tl.minimum(r0 + u, R - 1)
            k_tile = load_tile(k_rows[u], 0, L - j0, D, q_strides[POSITION], BN, BD, WHOLE_TILES)  # (BN, BD)
            v_tile = load_tile(v_rows[u], 0, L - j0, D, q_strides[POSITION], BN, BD, WHOLE_TILES)  # (BN, BD)
            new_k_rows = new_k_rows + (k_rows[u] + BN * q_strides[POSITION],)
            new_v_rows = new_v_rows + (v_rows[u] + BN * q_strides[POSITION],)
            # Scores again.
            s = tl.dot(q_tiles[u], tl.trans(k_tile))  # (BM, BN)
            s = s * scale + bias_tile
            if KEY_BIAS:
                s += load_key_bias(key_bias, b, r, j, key_bias_strides)[None, :]
            # Their gradient, p (do v^T - delta), and that of q.
            p = tl.exp2(s * LOG2E - lses[u][:, None])  # (BM, BN)
            dp = tl.dot(do_tiles[u], tl.trans(v_tile))  # (BM, BN)
            ds = p * (dp - deltas[u][:, None])
            acc = tl.dot(ds.to(k_tile.dtype), k_tile, accs[u])  # (BM, BD)
            new_accs = new_accs + (acc,)
        accs, k_rows, v_rows = new_accs, new_k_rows, new_v_rows
    for u in tl.static_range(RU):
        if r0 + u < R:
            store_tile(dq + head_offset(b, r0 + u, h, dq_strides), accs[u] * scale, i0, L, D,
                       dq_strides[POSITION], WHOLE_TILES)


@triton.jit
def attention_backward_kv_kernel(
        q, k, v, bias_transposed, key_bias, do, lse, delta, dk, dv, dscores, R, H: tl.constexpr, L, LP,
        D: tl.constexpr, scale, first_row, end_row, key_bias_strides, q_strides, out_strides, dq_strides,
        BIAS: tl.constexpr, KEY_BIAS: tl.constexpr, STORE: tl.constexpr, WHOLE_TILES: tl.constexpr,
        BD: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, RU: tl.constexpr):
    """One program: dk and dv of BN keys of one sample and head, in RU rows. It recomputes scores.

    Grid: axis 0: tiles of BN keys; axis 1: bh; axis 2: groups of RU rows, from first_row to end_row.
    Reads q, k, v, do, lse, delta, key_bias, bias_transposed (B, H, LP, LP: keys, queries).
    Writes dk, dv (B, R, H, L, D); with STORE ds, dscores (end_row - first_row, B, H, LP, LP: keys, queries).

    For each tile of queries, all transposed: s = scale k q^T + bias^T + key_bias;  p = 2^(s log2(e) - lse)
        ds = p (v do^T - delta);  dv += p do;  dk += ds q.  At the end dk is multiplied by scale.
    Scores are (keys, queries), so that p and ds are left operands of products as they stand.
    """
    j0, r0, bh = tl.program_id(0) * BN, first_row + tl.program_id(2).to(tl.int64) * RU, tl.program_id(1)
    b, h, j = (bh // H).to(tl.int64), (bh % H).to(tl.int64), j0 + tl.arange(0, BN)  # (), (), (BN,)
    # Tuples have one entry for each of the RU rows; q_rows and do_rows move with the queries.
    k_tiles, v_tiles, dk_accs, dv_accs, masks, q_rows, do_rows = (), (), (), (), (), (), ()
    for u in tl.static_range(RU):
        r = tl.minimum(r0 + u, end_row - 1)  # rows beyond the last are that one again, and not stored
        offset = head_offset(b, r, h, q_strides)
        k_tiles = k_tiles + (load_tile(k + offset, j0, L, D, q_strides[POSITION], BN, BD, WHOLE_TILES),)
        v_tiles = v_tiles + (load_tile(v + offset, j0, L, D, q_strides[POSITION], BN, BD, WHOLE_TILES),)
        if KEY_BIAS:
            masks = masks + (load_key_bias(key_bias, b, r, j, key_bias_strides),)  # (BN,)
        empty = tl.zeros((BN, BD), tl.float32)
        dk_accs, dv_accs = dk_accs + (empty,), dv_accs + (empty,)
        q_rows, do_rows = q_rows + (q + offset,), do_rows + (do + head_offset(b, r, h, out_strides),)
    for i0 in range(0, L, BM):
        i = i0 + tl.arange(0, BM)  # (BM,)
        bias_tile = load_bias(bias_transposed, bh, j0, i0, LP, BN, BM, BIAS)  # (BN, BM)
        new_dk_accs, new_dv_accs, new_q_rows, new_do_rows = (), (), (), ()
        for u in tl.static_range(RU):
            r = tl.minimum(r0 + u, end_row - 1)
            q_tile = load_tile(q_rows[u], 0, L - i0, D, q_strides[POSITION], BM, BD, WHOLE_TILES)  # (BM, BD)
            do_tile = load_tile(do_rows[u], 0, L - i0, D, out_strides[POSITION], BM, BD,
                                WHOLE_TILES)  # (BM, BD)
            new_q_rows = new_q_rows + (q_rows[u] + BM * q_strides[POSITION],)
            new_do_rows = new_do_rows + (do_rows[u] + BM * out_strides[POSITION],)
            lse_tile, delta_tile = load_statistics(lse, delta, ((b * R + r) * H + h) * L, i, L, WHOLE_TILES)
            # Scores again. dp does not wait for them: it runs while exponentials are computed.
            s = tl.dot(k_tiles[u], tl.trans(q_tile)) * scale + bias_tile
            dp = tl.dot(v_tiles[u], tl.trans(do_tile))  # (BN, BM)
            if KEY_BIAS:
                s += masks[u][:, None]
            # Probabilities, gradients of scores, and what both add to dv and dk.
            p = tl.exp2(s * LOG2E - lse_tile[None, :])  # (BN, BM)
            ds = (p * (dp - delta_tile[None, :])).to(q_tile.dtype)  # (BN, BM)
            dv_acc = tl.dot(p.to(do_tile.dtype), do_tile, dv_accs[u])  # (BN, BD)
            dk_acc = tl.dot(ds, q_tile, dk_accs[u])  # (BN, BD)
            new_dv_accs, new_dk_accs = new_dv_accs + (dv_acc,), new_dk_accs + (dk_acc,)
            if STORE:
                store_dscores(dscores, r - first_row, bh, tl.num_programs(1), LP, j0, i0, ds)
        dk_accs, dv_accs, q_rows, do_rows = new_dk_accs, new_dv_accs, new_q_rows, new_do_rows
    for u in tl.static_range(RU):
        if r0 + u < end_row:
            offset = head_offset(b, r0 + u, h, dq_strides)
            store_tile(dk + offset, dk_accs[u] * scale, j0, L, D, dq_strides[POSITION], WHOLE_TILES)
            store_tile(dv + offset, dv_accs[u], j0, L, D, dq_strides[POSITION], WHOLE_TILES)


@triton.jit
def attention_backward_scores_kernel(k, dscores, dq, bias_sums, H: tl.constexpr, L, D: tl.constexpr, scale,
                                     first_row, end_row, rows_per_share, q_strides, dq_strides,
                                     WHOLE_TILES: tl.constexpr, NO_PADDING: tl.constexpr, BD: tl.constexpr,
                                     BM: tl.constexpr, BN: tl.constexpr, LP: tl.constexpr):
    """One program: dq of BM queries of one sample and head, and a partial sum of the bias's gradient of these
    queries and all keys, in one share of the rows from first_row to end_row. It reads stored ds.

    Grid: axis 0: tiles of BM queries; axis 1: shares of rows_per_share rows; axis 2: bh.
    Reads k (B, R, H, L, D), dscores (end_row - first_row, B, H, LP, LP: keys, queries), which is ds.
    Writes dq (B, R, H, L, D). Writes bias_sums (shares, B, H, LP, LP: queries, keys) in float32, to which
    rounds of rows behind the first one are added.

    For each row: dq = scale ds k, and the partial sum grows by ds. NO_PADDING: L is LP and D is BD, which is
    what loads up to LP need; WHOLE_TILES is about stores up to L.
    """
    i0, share, bh = tl.program_id(0) * BM, tl.program_id(1).to(tl.int64), tl.program_id(2)
    b, h = (bh // H).to(tl.int64), (bh % H).to(tl.int64)
    i, j, sums = i0 + tl.arange(0, BM), tl.arange(0, BN), ()  # (BM,), (BN,), one entry for each tile of keys
    bias_sums += (share * tl.num_programs(2) + bh) * LP * LP
    for _ in tl.static_range(LP // BN):
        sums = sums + (tl.zeros((BN, BM), tl.float32),)
    begin = first_row + share * rows_per_share
    for r in range(begin, tl.minimum(begin + rows_per_share, end_row)):
        offset = head_offset(b, r, h, q_strides)
        acc, new_sums = tl.zeros((BM, BD), tl.float32), ()
        ds_head = dscores + ((r - first_row) * tl.num_programs(2) + bh) * LP * LP + i0
        for n in tl.static_range(LP // BN):
            # Keys beyond L were not written in ds, so they are masked. Queries beyond L are cropped later.
            ds = load_tile(ds_head, n * BN, L, LP, LP, BN, BM, NO_PADDING)  # (BN, BM)
            k_tile = load_tile(k + offset, n * BN, L, D, q_strides[POSITION], BN, BD, NO_PADDING)  # (BN, BD)
            acc = tl.dot(tl.trans(ds), k_tile, acc)  # (BM, BD)
            new_sums = new_sums + (sums[n] + ds.to(tl.float32),)  # (BN, BM)
        sums = new_sums
        store_tile(dq + head_offset(b, r, h, dq_strides), acc * scale, i0, L, D, dq_strides[POSITION],
                   WHOLE_TILES)
    for n in tl.static_range(LP // BN):
        pointers = bias_sums + i[:, None] * LP + n * BN + j[None, :]  # (BM, BN)
        total = tl.trans(sums[n])  # (BM, BN)
        if first_row > 0:
            total += tl.load(pointers)
        tl.store(pointers, total)


@triton.jit
def attention_backward_bias_kernel(q, k, v, bias, key_bias, do, lse, delta, bias_sums, R, H: tl.constexpr, L,
                                   LP, D: tl.constexpr, scale, rows_per_share, key_bias_strides, q_strides,
                                   out_strides, KEY_BIAS: tl.constexpr, WHOLE_TILES: tl.constexpr,
                                   BD: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr):
    """One program: a partial sum of the bias's gradient, of BM queries and BN keys of one sample and head, in
    one share of all rows. It recomputes scores.

    Grid: axis 0: tiles (BM, BN), along keys first; axis 1: shares of rows_per_share rows; axis 2: bh.
    Reads q, k, v, do (B, R, H, L, D), bias (B, H, LP, LP), key_bias (B|1, R|1, LP), lse, delta (B, R, H, L).
    Writes bias_sums (shares, B, H, LP, LP: queries, keys) in float32.

    For each row: s = scale q k^T + bias + key_bias;  p = 2^(s log2(e) - lse);  sum += p (do v^T - delta)
    """
    bh, share, key_tiles = tl.program_id(2), tl.program_id(1).to(tl.int64), tl.cdiv(L, BN)
    i0, j0 = tl.program_id(0) // key_tiles * BM, tl.program_id(0) % key_tiles * BN
    b, h = (bh // H).to(tl.int64), (bh % H).to(tl.int64)
    i, j = i0 + tl.arange(0, BM), j0 + tl.arange(0, BN)  # (BM,), (BN,)
    bias_tile = load_bias(bias, bh, i0, j0, LP, BM, BN, True)  # (BM, BN)
    total = tl.zeros((BM, BN), tl.float32)
    begin = share * rows_per_share
    end = tl.minimum(begin + rows_per_share, R)
    # Statistics and mask are loaded one row ahead. No product takes them, so the compiler would not load them
    # early by itself.
    lse_tile, delta_tile, mask = load_row_statistics(lse, delta, key_bias, b, begin, h, i, j, R, H, L,
                                                     key_bias_strides, KEY_BIAS, WHOLE_TILES)
    for r in range(begin, end):
        next_row = load_row_statistics(lse, delta, key_bias, b, tl.minimum(r + 1, end - 1), h, i, j, R, H, L,
                                       key_bias_strides, KEY_BIAS, WHOLE_TILES)
        offset, do_offset = head_offset(b, r, h, q_strides), head_offset(b, r, h, out_strides)
        q_tile = load_tile(q + offset, i0, L, D, q_strides[POSITION], BM, BD, WHOLE_TILES)  # (BM, BD)
        do_tile = load_tile(do + do_offset, i0, L, D, out_strides[POSITION], BM, BD, WHOLE_TILES)  # (BM, BD)
        k_tile = load_tile(k + offset, j0, L, D, q_strides[POSITION], BN, BD, WHOLE_TILES)  # (BN, BD)
        v_tile = load_tile(v + offset, j0, L, D, q_strides[POSITION], BN, BD, WHOLE_TILES)  # (BN, BD)
        # Scores again.
        s = tl.dot(q_tile, tl.trans(k_tile)) * scale + bias_tile  # (BM, BN)
        if KEY_BIAS:
            s += mask[None, :]
        # Probabilities, and the gradient of scores, which is summed over rows.
        p = tl.exp2(s * LOG2E - lse_tile[:, None])  # (BM, BN)
        dp = tl.dot(do_tile, tl.trans(v_tile))  # (BM, BN)
        total += p * (dp - delta_tile[:, None])
        lse_tile, delta_tile, mask = next_row
    bias_sums += (share * tl.num_programs(2) + bh).to(tl.int64) * LP * LP
    tl.store(bias_sums + i[:, None].to(tl.int64) * LP + j[None, :], total)


@triton.jit
def attention_backward_short_kernel(q, k, v, bias, key_bias, do, lse, delta, dq, dk, dv, dscores, R,
                                    H: tl.constexpr, L, LP, D: tl.constexpr, scale, first_row, end_row,
                                    key_bias_strides, q_strides, out_strides, dq_strides, BIAS: tl.constexpr,
                                    KEY_BIAS: tl.constexpr, WHOLE_TILES: tl.constexpr, BD: tl.constexpr,
                                    BL: tl.constexpr, ROWS: tl.constexpr):
    """One program: all gradients of one sample and head, in ROWS rows, one after another.

    A tile holds a whole row: L <= BL = LP.

    Grid: axis 0: groups of ROWS rows, from first_row to end_row; axis 1: bh.
    Reads q, k, v, do (B, R, H, L, D), bias (B, H, LP, LP), key_bias (B|1, R|1, LP), lse, delta (B, R, H, L).
    Writes dq, dk, dv (B, R, H, L, D). With BIAS also dscores (end_row - first_row, B, H, LP, LP: queries,
    keys), which is ds.

    For each row: s = scale q k^T + bias + key_bias;  p = 2^(s log2(e) - lse);  ds = p (do v^T - delta)
        dv = p^T do;  dk = scale ds^T q;  dq = scale ds k: five products and one exponential a score.
    """
    r0, bh = first_row + tl.program_id(0).to(tl.int64) * ROWS, tl.program_id(1)
    b, h = (bh // H).to(tl.int64), (bh % H).to(tl.int64)
    i = tl.arange(0, BL)  # (BL,): queries, and keys as well
    for r in range(r0, tl.minimum(r0 + ROWS, end_row)):
        offset, first = head_offset(b, r, h, q_strides), ((b * R + r) * H + h) * L
        q_tile = load_tile(q + offset, 0, L, D, q_strides[POSITION], BL, BD, WHOLE_TILES)  # (BL, BD)
        k_tile = load_tile(k + offset, 0, L, D, q_strides[POSITION], BL, BD, WHOLE_TILES)  # (BL, BD)
        v_tile = load_tile(v + offset, 0, L, D, q_strides[POSITION], BL, BD, WHOLE_TILES)  # (BL, BD)
        do_tile = load_tile(do + head_offset(b, r, h, out_strides), 0, L, D, out_strides[POSITION], BL, BD,
                            WHOLE_TILES)  # (BL, BD)
        lse_tile, delta_tile = load_statistics(lse, delta, first, i, L, WHOLE_TILES)  # (BL,) each
        # Scores again.
        s = tl.dot(q_tile, tl.trans(k_tile)) * scale  # (BL, BL): queries, keys
        s += load_bias(bias, bh, 0, 0, LP, BL, BL, BIAS)
        if KEY_BIAS:
            of_keys = load_key_bias(key_bias, b, r, i, key_bias_strides)  # (BL,)
            s += of_keys[None, :]
        # Probabilities, and gradients of scores.
        p = tl.exp2(s * LOG2E - lse_tile[:, None])  # (BL, BL)
        dp = tl.dot(do_tile, tl.trans(v_tile))  # (BL, BL)
        ds = p * (dp - delta_tile[:, None])
        if KEY_BIAS:  # the probability of a single key is 1, whatever its score is
            ds = tl.where(tl.sum((of_keys == 0).to(tl.int32)) == 1, 0.0, ds)
        p, ds = p.to(q_tile.dtype), ds.to(q_tile.dtype)
        if BIAS:
            store_dscores(dscores, r - first_row, bh, tl.num_programs(1), LP, 0, 0, ds)
        # Gradients of v, k and q, (BL, BD) each.
        offset = head_offset(b, r, h, dq_strides)
        dv_tile = tl.dot(tl.trans(p), do_tile)
        store_tile(dv + offset, dv_tile, 0, L, D, dq_strides[POSITION], WHOLE_TILES)
        dk_tile = tl.dot(tl.trans(ds), q_tile) * scale
        store_tile(dk + offset, dk_tile, 0, L, D, dq_strides[POSITION], WHOLE_TILES)
        dq_tile = tl.dot(ds, k_tile) * scale
        store_tile(dq + offset, dq_tile, 0, L, D, dq_strides[POSITION], WHOLE_TILES)
