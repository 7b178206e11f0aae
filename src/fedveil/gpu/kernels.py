"""The kernels of windows, products, convolutions and probes, in Triton. A program works for one stack member."""

# mypy: ignore-errors
import triton
import triton.language as tl

from fedveil.gpu.norm_kernels import apply, curve, normalise, slope  # noqa: F401


@triton.jit
def spread(
    x, out, places, channels, height, width, rows, columns, sn, sb, sc, sy, sx,
    KH: tl.constexpr, KW: tl.constexpr, SH: tl.constexpr, SW: tl.constexpr, PH: tl.constexpr, PW: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """out[n, (c, i, j), (b, r, q)] = x[n, b, c, r·SH + i - PH, q·SW + j - PW], 0 outside; s* are the strides of x.

    A program does BLOCK places of one channel, and so it does in `fold`.
    """
    channel = tl.program_id(1).to(tl.int64)
    blocks = tl.cdiv(places, BLOCK)
    member = (tl.program_id(0) // blocks).to(tl.int64)
    place = tl.program_id(0) % blocks * BLOCK + tl.arange(0, BLOCK)
    there = place < places
    column, row = place % columns, (place // columns) % rows
    top, left = row * SH - PH, column * SW - PW
    picture = x + member * sn + channel * sc + (place // (rows * columns)).to(tl.int64) * sb
    target = out + (member * channels + channel) * (KH * KW) * places + place
    for i in tl.static_range(KH):
        for j in tl.static_range(KW):
            y, z = top + i, left + j
            inside = there & (y >= 0) & (y < height) & (z >= 0) & (z < width)
            tl.store(target, tl.load(picture + y * sy + z * sx, mask=inside, other=0.0), mask=there)
            target += places


@triton.jit
def fold(
    parts, out, places, channels, height, width, rows, columns, across,
    KH: tl.constexpr, KW: tl.constexpr, SH: tl.constexpr, SW: tl.constexpr, PH: tl.constexpr, PW: tl.constexpr,
    BLOCK: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """out[n, b, c, y, z] = Σ parts[n, (c, i, j), (b, r, q)] over all with r·SH + i - PH = y and q·SW + j - PW = z."""
    channel = tl.program_id(1).to(tl.int64)
    blocks = tl.cdiv(places, BLOCK)
    member = (tl.program_id(0) // blocks).to(tl.int64)
    place = tl.program_id(0) % blocks * BLOCK + tl.arange(0, BLOCK)
    there = place < places
    z, y = place % width, (place // width) % height
    picture = place // (height * width)
    source = parts + (member * channels + channel) * (KH * KW) * across + picture * (rows * columns)
    total = tl.zeros((BLOCK,), tl.float64 if WIDE else tl.float32)
    for i in tl.static_range(KH):
        for j in tl.static_range(KW):
            down, over = y + PH - i, z + PW - j
            row, column = down // SH, over // SW
            inside = there & (down >= 0) & (over >= 0) & (row < rows) & (column < columns)
            inside = inside & (row * SH == down) & (column * SW == over)
            total += tl.load(source + row * columns + column, mask=inside, other=0.0).to(total.dtype)
            source += across
    target = out + ((member * (places // (height * width)) + picture) * channels + channel) * (height * width)
    tl.store(target + y * width + z, total.to(out.dtype.element_ty), mask=there)


@triton.jit
def outer(
    y, x, out, o, i, n, pieces, ym, yo, yn, xm, xi, xn,
    PIECE: tl.constexpr, BLOCK_O: tl.constexpr, BLOCK_I: tl.constexpr, BLOCK: tl.constexpr, TENSOR_CORES: tl.constexpr,
):  # fmt: skip
    """out[m, p, o, i] = Σ y[m, o, k] x[m, i, k] over the k of piece p; y* and x* are the strides."""
    member, piece = (tl.program_id(0) // pieces).to(tl.int64), tl.program_id(0) % pieces
    row = (tl.program_id(1) * BLOCK_O + tl.arange(0, BLOCK_O)[:, None]).to(tl.int64)
    column = (tl.program_id(2) * BLOCK_I + tl.arange(0, BLOCK_I)).to(tl.int64)
    total = tl.zeros((BLOCK_O, BLOCK_I), tl.float32)
    for start in range(0, PIECE, BLOCK):
        k = (piece * PIECE + start + tl.arange(0, BLOCK)).to(tl.int64)
        left = tl.load(y + member * ym + row * yo + k[None, :] * yn, mask=(row < o) & (k < n)[None, :], other=0.0)
        right = x + member * xm + column[None, :] * xi + k[:, None] * xn
        right = tl.load(right, mask=(column < i)[None, :] & (k < n)[:, None], other=0.0)
        total = tl.dot(left, right, total, input_precision="tf32" if TENSOR_CORES else "ieee")
    target = out + ((member * pieces + piece) * o + row) * i + column[None, :]
    tl.store(target, total, mask=(row < o) & (column < i)[None, :])


@triton.jit
def convolve(
    x, weight, bias, out, stack, places, sg, sk, sb, wg, wk, wo, wi, bg, bk, bo,
    SC: tl.constexpr, SY: tl.constexpr, SX: tl.constexpr,
    CHANNELS: tl.constexpr, OUT: tl.constexpr, HEIGHT: tl.constexpr, WIDTH: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    KH: tl.constexpr, KW: tl.constexpr, SH: tl.constexpr, SW: tl.constexpr, PH: tl.constexpr, PW: tl.constexpr,
    BLOCK: tl.constexpr, BLOCK_O: tl.constexpr, BLOCK_I: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """out[n, b, o, r, q] = Σ weight[n, o, (i, j, c)] x[n, b, c, r·SH + i - PH, q·SW + j - PW] + bias[n, o].

    n = (g, k) with k < `stack`; s*, w* and b* are the strides of x, weight and bias. A program does BLOCK places of
    BLOCK_O channels; neighbours do the other channels of the same places.
    """
    pieces = tl.cdiv(OUT, BLOCK_O)
    block, blocks = tl.program_id(0) // pieces, tl.cdiv(places, BLOCK)
    member = (block // blocks).to(tl.int64)
    g, k = member // stack, member % stack
    place = block % blocks * BLOCK + tl.arange(0, BLOCK)
    o = tl.program_id(0) % pieces * BLOCK_O + tl.arange(0, BLOCK_O)
    picture = (place // (ROWS * COLUMNS)).to(tl.int64)
    there, mine = (place < places)[None, :], (o < OUT)[:, None]
    top, left = place // COLUMNS % ROWS * SH - PH, place % COLUMNS * SW - PW
    pixels = x + g * sg + k * sk + (picture * sb + top * SY + left * SX)[None, :]
    matrix = weight + g * wg + k * wk + (o * wo)[:, None]
    total = tl.zeros((BLOCK_O, BLOCK), tl.float32)
    step = tl.arange(0, BLOCK_I)
    for start in range(0, KH * KW * CHANNELS, BLOCK_I):
        entry = start + step
        if CHANNELS % BLOCK_I == 0:  # one place of the window: what is outside the picture is so for all its channels
            within, ours = there, mine
            i, j = start // CHANNELS // KW, start // CHANNELS % KW
            source = pixels + (start % CHANNELS * SC + i * SY + j * SX) + step.to(tl.int64)[:, None] * SC
        else:
            within, ours = there & (entry < KH * KW * CHANNELS)[:, None], mine & (entry < KH * KW * CHANNELS)[None, :]
            i, j = (entry // CHANNELS // KW)[:, None], (entry // CHANNELS % KW)[:, None]
            source = pixels + ((entry % CHANNELS).to(tl.int64)[:, None] * SC + i * SY + j * SX)
        y, z = top[None, :] + i, left[None, :] + j
        inside = within & (y >= 0) & (y < HEIGHT) & (z >= 0) & (z < WIDTH)
        pixel = tl.load(source, mask=inside, other=0.0)
        factor = tl.load(matrix + (entry * wi)[None, :], mask=ours, other=0.0)
        total = tl.dot(factor, pixel, total, input_precision=PRECISION)
    if bias is not None:
        total += tl.load(bias + g * bg + k * bk + o * bo, mask=o < OUT, other=0.0).to(tl.float32)[:, None]
    target = out + member * places * OUT + (picture * (OUT * ROWS * COLUMNS) + place % (ROWS * COLUMNS))[None, :]
    tl.store(target + (o * (ROWS * COLUMNS))[:, None], total.to(out.dtype.element_ty), mask=there & mine)


@triton.jit
def correlate(
    y, x, out, places, pieces, ym, yb, xm, xb,
    YC: tl.constexpr, YY: tl.constexpr, YX: tl.constexpr, XC: tl.constexpr, XY: tl.constexpr, XX: tl.constexpr,
    CHANNELS: tl.constexpr, OUT: tl.constexpr, HEIGHT: tl.constexpr, WIDTH: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    KH: tl.constexpr, KW: tl.constexpr, SH: tl.constexpr, SW: tl.constexpr, PH: tl.constexpr, PW: tl.constexpr,
    PIECE: tl.constexpr, BLOCK: tl.constexpr, BLOCK_O: tl.constexpr, BLOCK_I: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """out[n, p, o, (i, j, c)] = Σ y[n, b, o, r, q] x[n, b, c, r·SH + i - PH, q·SW + j - PW] over piece p of the places.

    A place is (b, r, q); y* and x* are the strides. A program does BLOCK_O channels of y and BLOCK_I entries of the
    window.
    """
    member, piece = (tl.program_id(0) // pieces).to(tl.int64), tl.program_id(0) % pieces
    o = tl.program_id(1) * BLOCK_O + tl.arange(0, BLOCK_O)
    first, step = tl.program_id(2) * BLOCK_I, tl.arange(0, BLOCK_I)
    entry = first + step
    mine, ours = (o < OUT)[:, None], (entry < KH * KW * CHANNELS)[None, :]
    if CHANNELS % BLOCK_I == 0:  # one place of the window: what is outside the picture is so for all its channels
        i, j, c = first // CHANNELS // KW, first // CHANNELS % KW, (first % CHANNELS + step)[None, :]
    else:
        i, j, c = (entry // CHANNELS // KW)[None, :], (entry // CHANNELS % KW)[None, :], (entry % CHANNELS)[None, :]
    channel = c.to(tl.int64) * XC
    total = tl.zeros((BLOCK_O, BLOCK_I), tl.float32)
    for start in range(0, tl.minimum(PIECE, places - piece * PIECE), BLOCK):
        place = piece * PIECE + start + tl.arange(0, BLOCK)
        there, picture = place < places, (place // (ROWS * COLUMNS)).to(tl.int64)
        row, column = place // COLUMNS % ROWS, place % COLUMNS
        source = y + member * ym + (picture * yb + row * YY + column * YX)[None, :] + (o.to(tl.int64) * YC)[:, None]
        left = tl.load(source, mask=mine & there[None, :], other=0.0)
        down, over = (row * SH - PH)[:, None] + i, (column * SW - PW)[:, None] + j
        inside = there[:, None] & (down >= 0) & (down < HEIGHT) & (over >= 0) & (over < WIDTH)
        source = x + member * xm + (picture * xb)[:, None] + (down * XY + over * XX) + channel
        right = tl.load(source, mask=inside & ours, other=0.0)
        total = tl.dot(left, right, total, input_precision=PRECISION)
    target = out + ((member * pieces + piece) * OUT + o[:, None]) * (KH * KW * CHANNELS) + entry[None, :]
    tl.store(target, total, mask=mine & ours)


@triton.jit
def gaussians(keys, out, size, per, first, count, BLOCK: tl.constexpr):
    """out[n, k] = direction first + k of keys[n], as `Directions` draws it: all cosines, then all sines."""
    row, place = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    key, number = tl.load(keys + row // count), first + row % count
    word = (key + (number * per + place + 1) * -7046029254386353131).to(tl.uint64, bitcast=True)  # GAMMA
    word = (word ^ (word >> 30)) * 0xBF58476D1CE4E5B9
    word = (word ^ (word >> 27)) * 0x94D049BB133111EB
    word = word ^ (word >> 31)
    radius = ((word >> 40) + 1).to(tl.float32) * 5.9604644775390625e-08  # 2 ** -24
    angle = (word & 0xFFFFFF).to(tl.float32) * (5.9604644775390625e-08 * 6.283185307179586)
    radius = tl.sqrt(-2 * tl.log(radius))
    target = out + row * size + place
    tl.store(target, radius * tl.cos(angle), mask=place < per)
    tl.store(target + per, radius * tl.sin(angle), mask=per + place < size)
