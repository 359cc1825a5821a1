"""The kernels of a product behind a LayerNorm, of its gradient, and of a product with dropout and residual.

Letters, here and in the launchers beside this file:
    B, X, Y    samples, and the two dimensions of positions (rows and columns of an MSA, or of pairs)
    P          positions, B X Y; PLANE = X Y are those of one sample
    C          channels of x and out, all of them in each program
    N          outputs of the first product, a chunk of BN at a time; may be 0
    H, HEADS   heads of an attention bias; padded to a power of two, at least 16, or 0 where there are none
    head_weight, head_bias    (H, C) weights that project such a bias, a row each head; the bias (B, H, PLANE)
    og         what the second product reads: attention's gated output, or a transition's hidden layer
    K          channels of og, a chunk of BK at a time
    BM         positions of a tile

Every tensor is contiguous, so a tensor (B, X, Y, C) is read as a matrix (P, C).
"""
import triton
import triton.language as tl

from evoformer_kernels.common import (
    below,
    from_the_end,
    layer_norm,
    layer_norm_backward,
    load_rows,
    relu,
    store_rows,
    store_sums,
    vector,
)

# --------------------------------------------------------------------------------------------------------
# Forward: LayerNorm and the projections of its result
# --------------------------------------------------------------------------------------------------------


@triton.jit
def head_offsets(number, h, P, PLANE, H, WHOLE_TILES: tl.constexpr, BM: tl.constexpr):
    """Offsets (BM, HEADS) in a bias (B, H, PLANE) of the positions of tile `number` and heads h (HEADS,), and
    which of them exist. Computed in 32 bits where it can be: in 64 the divisions were a quarter of the
    instructions of output_project_kernel, which has the same ones."""
    first, p = number * BM, tl.arange(0, BM)  # p: (BM,)
    if WHOLE_TILES:  # all positions are of one sample: one division a tile, not one a position
        sample_head = (first // PLANE).to(tl.int64) * H + h  # (HEADS,)
        offsets = (sample_head * PLANE + tl.multiple_of(first % PLANE, BM))[None, :] + p[:, None]
        exist = (h < H)[None, :]  # (1, HEADS)
    else:
        p += first
        sample, of_plane = (p // PLANE).to(tl.int64), p % PLANE  # (BM,) each
        offsets = (sample[:, None] * H + h[None, :]) * PLANE + of_plane[:, None]
        exist = (p[:, None] < P) & (h[None, :] < H)  # (BM, HEADS)
    return offsets, exist


@triton.jit
def normed_tile(x, norm_weight, norm_bias, heads_tile, head_bias, number, P, PLANE, H, eps,
                dtype: tl.constexpr, WHOLE_TILES: tl.constexpr, C: tl.constexpr, BM: tl.constexpr):
    """LayerNorm of tile `number` of x, (BM, C) in dtype. Where heads_tile (HEADS, C) is given, stores its
    product with that in head_bias (B, H, PLANE), too."""
    first = number.to(tl.int64) * BM
    remaining = None if WHOLE_TILES else (P - first).to(tl.int32)
    x_tile = load_rows(x + first * C, tl.arange(0, BM), remaining, C)  # (BM, C)
    normed = layer_norm(x_tile, norm_weight, norm_bias, eps, C)[0].to(dtype)  # (BM, C)
    if heads_tile is not None:
        bias_tile = tl.dot(normed, tl.trans(heads_tile))  # (BM, HEADS)
        offsets, exist = head_offsets(number, tl.arange(0, heads_tile.shape[0]), P, PLANE, H, WHOLE_TILES,
                                      BM)
        tl.store(head_bias + offsets, bias_tile.to(head_bias.dtype.element_ty), mask=exist)
    return normed


@triton.jit
def store_outputs(y, y_tile, number, n, P, N: tl.constexpr, WHOLE_TILES: tl.constexpr, BM: tl.constexpr):
    """Store y_tile (BM, BN), outputs n (BN,) of tile `number`, in y (P, N)."""
    first, p = number.to(tl.int64) * BM, tl.arange(0, BM)
    exist = below(p, None if WHOLE_TILES else (P - first).to(tl.int32))  # (BM,)
    tl.store(y + first * N + p[:, None] * N + n[None, :], y_tile.to(y.dtype.element_ty),
             mask=exist[:, None] & below(n, None if WHOLE_TILES else N)[None, :])


@triton.jit
def norm_project_kernel(x, norm_weight, norm_bias, weight, head_weight, hidden_bias, y, head_bias, P, PLANE,
                        H, eps, N: tl.constexpr, HEADS: tl.constexpr, WHOLE_TILES: tl.constexpr,
                        STAY: tl.constexpr, C: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr):
    """One program: LayerNorm of BM positions, and all N + H outputs of them.

        y = LayerNorm(x) weight^T                           or, given hidden_bias,
        y = relu(LayerNorm(x) weight^T + hidden_bias)
        head_bias = LayerNorm(x) head_weight^T              stored with the heads in front

    Axis 0: tiles of BM positions, the last one first. With STAY: as many programs as the GPU has processors,
    each of which makes every so many-th tile.

        x (P, C); norm_weight, norm_bias (C,); weight (N, C), where N is 0 only for its dtype; head_weight
        (H, C) or None; hidden_bias (N,) or None; y (P, N); head_bias (B, H, PLANE)

    WHOLE_TILES: P is a multiple of BM, no tile has positions of two samples, and N is a multiple of BN; then
    nothing is masked. STAY: weight is read once a program and stays in shared memory, while the positions of
    its next tile are on their way; N must then be a multiple of BN.
    """
    c, n, h = tl.arange(0, C), tl.arange(0, BN), tl.arange(0, max(HEADS, 1))
    dtype: tl.constexpr = weight.dtype.element_ty
    heads_tile = None
    if HEADS > 0:
        heads_tile = tl.load(head_weight + h[:, None] * C + c[None, :], mask=h[:, None] < H,
                             other=0.0)  # (HEADS, C)
    if STAY:
        # All weights, before the first positions: N / BN tiles (C, BN), and their hidden biases (BN,)
        weight_tiles, hidden_bias_tiles, tiles = (), (), tl.cdiv(P, BM)
        for i in tl.static_range(N // BN):
            weight_tiles += (tl.trans(load_rows(weight, i * BN + n, None, C)),)
            if hidden_bias is not None:
                hidden_bias_tiles += (tl.load(hidden_bias + i * BN + n).to(tl.float32),)
        for ago in range(tl.program_id(0), tiles, tl.num_programs(0)):
            number = tiles - 1 - ago  # from the end, as from_the_end() does
            normed = normed_tile(x, norm_weight, norm_bias, heads_tile, head_bias, number, P, PLANE, H, eps,
                                 dtype, WHOLE_TILES, C, BM)  # (BM, C)
            for i in tl.static_range(N // BN):
                y_tile = tl.dot(normed, weight_tiles[i])  # (BM, BN)
                if hidden_bias is not None:
                    y_tile = relu(y_tile + hidden_bias_tiles[i][None, :])
                store_outputs(y, y_tile, number, i * BN + n, P, N, WHOLE_TILES, BM)
    else:
        number = from_the_end(0)
        normed = normed_tile(x, norm_weight, norm_bias, heads_tile, head_bias, number, P, PLANE, H, eps,
                             dtype, WHOLE_TILES, C, BM)  # (BM, C)
        # A chunk of BN outputs after the other; their weights come from the cache
        for n0 in range(0, N, BN):
            n, width = n0 + tl.arange(0, BN), None if WHOLE_TILES else N
            if hidden_bias is not None:
                hidden_bias_tile = tl.load(hidden_bias + n, mask=below(n, width), other=0.0)  # (BN,)
                hidden_bias_tile = hidden_bias_tile.to(tl.float32)
            weight_tile = load_rows(weight, n, width, C)  # (BN, C)
            y_tile = tl.dot(normed, tl.trans(weight_tile))  # (BM, BN)
            if hidden_bias is not None:
                y_tile = relu(y_tile + hidden_bias_tile[None, :])
            store_outputs(y, y_tile, number, n, P, N, WHOLE_TILES, BM)


# --------------------------------------------------------------------------------------------------------
# Its derivative
# --------------------------------------------------------------------------------------------------------


@triton.jit
def norm_project_backward_kernel(dy, dbias, x, norm_weight, norm_bias, weight, head_weight, handed_on, dx,
                                 normed_out, partial_sums, P, PLANE, H, eps, N: tl.constexpr,
                                 HEADS: tl.constexpr, HANDED_ON: tl.constexpr, TOTAL: tl.constexpr,
                                 WHOLE_TILES: tl.constexpr, C: tl.constexpr, BM: tl.constexpr,
                                 BN: tl.constexpr):
    """One program: dx of BM positions, and their share of the parameters' gradients. Axis 0: tiles of BM.

        dnormed = dy weight + dbias head_weight;    dx = dnormed through LayerNorm [+ handed_on]
        dnorm_weight = sum of dnormed x_hat;  dnorm_bias = sum of dnormed;  dhead_weight = dbias^T normed

        x, dx (P, C); handed_on (P, C), where HANDED_ON the gradient of x from its other readers, such as the
        residual; dy (P, N); dbias (B, H, PLANE), of
        head_bias; norm_weight, norm_bias (C,); weight (N, C); head_weight (H, C); normed_out (P, C), for the
        library's dweight; partial_sums (programs, 2 + H + TOTAL, C) of the second line, then of handed_on
    """
    first, p, c = tl.program_id(0).to(tl.int64) * BM, tl.arange(0, BM), tl.arange(0, C)
    remaining = None if WHOLE_TILES else (P - first).to(tl.int32)
    width = None if WHOLE_TILES else N
    dtype: tl.constexpr = weight.dtype.element_ty
    x_tile = load_rows(x + first * C, p, remaining, C)  # (BM, C), on its way while dy is multiplied

    # dnormed = dbias head_weight + dy weight
    dnormed = tl.zeros((BM, C), tl.float32)
    if HEADS > 0:
        h = tl.arange(0, HEADS)
        offsets, exist = head_offsets(tl.program_id(0), h, P, PLANE, H, WHOLE_TILES, BM)
        dbias_tile = tl.load(dbias + offsets, mask=exist, other=0.0).to(dtype)  # (BM, HEADS)
        of_head = h[:, None] * C + c[None, :]
        heads_tile = tl.load(head_weight + of_head, mask=h[:, None] < H, other=0.0)  # (HEADS, C)
        dnormed = tl.dot(dbias_tile, heads_tile, dnormed)
    if N > 0:
        dy += first * N
        for n0 in range(0, N, BN):
            n = n0 + tl.arange(0, BN)
            dy_tile = tl.load(dy + p[:, None] * N + n[None, :], other=0.0,
                              mask=below(p, remaining)[:, None] & below(n, width)[None, :])  # (BM, BN)
            dnormed = tl.dot(dy_tile, load_rows(weight, n, width, C), dnormed)

    # normed = LayerNorm(x), recomputed
    normed, x_hat, rstd = layer_norm(x_tile, norm_weight, norm_bias, eps, C)  # (BM, C) twice, (BM,)
    normed = normed.to(dtype)
    if N > 0:
        store_rows(normed_out + first * C, p, remaining, normed, C)

    # This program's partial sums
    partial_sums += tl.program_id(0).to(tl.int64) * (2 + H + TOTAL) * C
    if HEADS > 0:
        dhead_weight = tl.dot(tl.trans(dbias_tile), normed)  # (HEADS, C)
        tl.store(partial_sums + 2 * C + of_head, dhead_weight, mask=h[:, None] < H)
    store_sums(partial_sums, c, dnormed * x_hat, dtype, BM)
    store_sums(partial_sums + C, c, dnormed, dtype, BM)

    # dx, with what only has to be added
    dx_tile = layer_norm_backward(dnormed, x_hat, rstd, tl.load(norm_weight + c).to(tl.float32), C)  # (BM, C)
    if HANDED_ON:
        handed_on_tile = load_rows(handed_on + first * C, p, remaining, C).to(tl.float32)  # (BM, C)
        if TOTAL > 0:
            store_sums(partial_sums + (2 + H) * C, c, handed_on_tile, dtype, BM)
        dx_tile += handed_on_tile
    store_rows(dx + first * C, p, remaining, dx_tile, C)


# --------------------------------------------------------------------------------------------------------
# The output projection
# --------------------------------------------------------------------------------------------------------


@triton.jit
def factors(drop, p, P, X, Y, drop_stride_b, drop_stride_x, drop_stride_y, C: tl.constexpr,
            LINES: tl.constexpr = 0):
    """Dropout's factors of positions p (BM,) of this program, float32: (BM, C), or (1, C) where they share
    one. drop is (B, X, Y, C), broadcast, so that a stride may be 0; its channels lie side by side.

    LINES: a line is the Y positions of one (b, x). A tile is LINES whole lines, or for 1 perhaps a part of
    one: then only its first position is divided by X and Y. 0: neither, so every position is divided.
    """
    if LINES > 0:
        BM: tl.constexpr = p.shape[0]
        first, i = tl.program_id(0) * BM, tl.arange(0, BM)
        line, y = first // Y, first % Y
        drop += ((line // X).to(tl.int64) * drop_stride_b + (line % X).to(tl.int64) * drop_stride_x
                 + y.to(tl.int64) * drop_stride_y)
        if LINES == 1 and drop_stride_y == 0:  # all of the tile share one row of factors
            tile = vector(drop, C)  # (1, C)
        else:
            offsets = i // (BM // LINES) * drop_stride_x + i % (BM // LINES) * drop_stride_y  # (BM,)
            tile = tl.load(drop + offsets[:, None] + tl.arange(0, C)[None, :]).to(tl.float32)  # (BM, C)
    else:
        line, y = p.to(tl.int32) // Y, p.to(tl.int32) % Y  # (BM,) each
        offsets = ((line // X).to(tl.int64) * drop_stride_b + (line % X).to(tl.int64) * drop_stride_x
                   + y.to(tl.int64) * drop_stride_y)
        offsets = offsets[:, None] + tl.arange(0, C)[None, :]
        tile = tl.load(drop + offsets, mask=p[:, None] < P, other=0.0).to(tl.float32)  # (BM, C)
    return tile


@triton.jit
def output_project_kernel(og, weight, bias, onto, drop, out, P, X, Y, drop_stride_b, drop_stride_x,
                          drop_stride_y: tl.constexpr, scale, K: tl.constexpr, ONTO: tl.constexpr,
                          DROP: tl.constexpr, LINES: tl.constexpr, C: tl.constexpr, BM: tl.constexpr,
                          BK: tl.constexpr):
    """One program: all C outputs of BM positions. Axis 0: tiles of BM positions.

        out = [onto +] [drop *] (og weight^T + scale bias)

        og (P, K); weight (C, K); bias (C,); onto, out (P, C); drop (B, X, Y, C) with strides of its own

    LINES as in factors(); where it is not 0, P is a multiple of BM. drop_stride_y is a constant, since code
    for factors that a whole tile shares is another.
    """
    first, p, c = tl.program_id(0).to(tl.int64) * BM, tl.arange(0, BM), tl.arange(0, C)
    remaining = None if LINES > 0 else (P - first).to(tl.int32)
    og += first * K

    # og weight^T, begun with the bias
    acc = tl.broadcast_to(vector(bias, C) * scale, (BM, C))
    for k0 in range(0, K, BK):
        k = k0 + tl.arange(0, BK)
        og_tile = tl.load(og + p[:, None] * K + k[None, :], mask=below(p, remaining)[:, None],
                          other=0.0)  # (BM, BK)
        weight_tile = tl.load(weight + c[:, None] * K + k[None, :])  # (C, BK)
        acc = tl.dot(og_tile, tl.trans(weight_tile), acc)

    # Dropout and residual, before anything is rounded
    if DROP:
        acc *= factors(drop, first + p, P, X, Y, drop_stride_b, drop_stride_x, drop_stride_y, C, LINES)
    if ONTO:
        acc += load_rows(onto + first * C, p, remaining, C).to(tl.float32)
    store_rows(out + first * C, p, remaining, acc, C)
