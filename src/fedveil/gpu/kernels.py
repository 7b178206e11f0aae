"""The kernels of windows.py, products.py, forward.py and norms.py, in Triton. A program works for one stack member."""

# mypy: ignore-errors
import triton
import triton.language as tl


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
    BLOCK: tl.constexpr, BLOCK_O: tl.constexpr, BLOCK_I: tl.constexpr,
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
        total = tl.dot(factor, pixel, total, input_precision="ieee")
    if bias is not None:
        total += tl.load(bias + g * bg + k * bk + o * bo, mask=o < OUT, other=0.0).to(tl.float32)[:, None]
    target = out + member * places * OUT + (picture * (OUT * ROWS * COLUMNS) + place % (ROWS * COLUMNS))[None, :]
    tl.store(target + (o * (ROWS * COLUMNS))[:, None], total.to(out.dtype.element_ty), mask=there & mine)


@triton.jit
def normalise(
    x, weight, bias, out, stack, pictures, groups, sg, sk, sb, wg, wk, wc, bg, bk, bc,
    SC: tl.constexpr, SP: tl.constexpr,
    CHANNELS: tl.constexpr, PLACES: tl.constexpr, EPS: tl.constexpr,
    BLOCK_C: tl.constexpr, BLOCK: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """out[n, b, c, p] = (x - mean) / √(variance + EPS) · weight[n, c] + bias[n, c], over CHANNELS channels at a time.

    n = (g, k) with k < `stack`; s*, w* and b* are the strides of x, weight and bias. A program does one group of
    channels of one picture, which is read once where its PLACES fit in a BLOCK.
    """
    group, picture = tl.program_id(0) % groups, tl.program_id(0) // groups
    member = (picture // pictures).to(tl.int64)
    g, k = member // stack, member % stack
    c, place = tl.arange(0, BLOCK_C)[:, None], tl.arange(0, BLOCK)[None, :]
    channel = (group * CHANNELS + c).to(tl.int64)
    source = x + g * sg + k * sk + (picture % pictures).to(tl.int64) * sb + channel * SC + place * SP
    target = out + (picture.to(tl.int64) * groups * CHANNELS + channel) * PLACES + place
    sums = tl.float64 if WIDE else tl.float32
    total = tl.zeros((BLOCK_C, BLOCK), sums)
    for start in range(0, PLACES, BLOCK):
        there = (c < CHANNELS) & (start + place < PLACES)
        total += tl.load(source + start * SP, mask=there, other=0.0).to(sums)
    mean = tl.sum(total) / (CHANNELS * PLACES)
    total = tl.zeros((BLOCK_C, BLOCK), sums)
    for start in range(0, PLACES, BLOCK):
        there = (c < CHANNELS) & (start + place < PLACES)
        apart = tl.where(there, tl.load(source + start * SP, mask=there, other=0.0).to(sums) - mean, 0.0)
        total += apart * apart
    scale = 1 / tl.sqrt(tl.sum(total) / (CHANNELS * PLACES) + EPS)
    factor = tl.load(weight + g * wg + k * wk + channel * wc, mask=c < CHANNELS, other=0.0).to(sums) * scale
    shift = tl.load(bias + g * bg + k * bk + channel * bc, mask=c < CHANNELS, other=0.0).to(sums)
    for start in range(0, PLACES, BLOCK):
        there = (c < CHANNELS) & (start + place < PLACES)
        result = (tl.load(source + start * SP, mask=there, other=0.0).to(sums) - mean) * factor + shift
        tl.store(target + start, result.to(out.dtype.element_ty), mask=there)


@triton.jit
def _where(pictures, groups, CHANNELS: tl.constexpr, PLACES: tl.constexpr, ACROSS: tl.constexpr,
           BLOCK_C: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    """What a program of the next three does: member, picture and channels [c, 1, 1] of one group; its tiles [1, q, 1],
    a place each or, if ACROSS is the width of a picture that is pooled, 2 × 2; its places [1, q, 1 or 4]; and which of
    the channels and of the tiles there are."""
    group, picture = tl.program_id(0) % groups, tl.program_id(0) // groups
    c, tile = tl.arange(0, BLOCK_C)[:, None, None], tl.arange(0, BLOCK)[None, :, None]
    if ACROSS:
        corner = tl.arange(0, 4)[None, None, :]
        half: tl.constexpr = ACROSS // 2
        place = (2 * (tile // half) + corner // 2) * ACROSS + 2 * (tile % half) + corner % 2
    else:
        place = tile
    channel, mine = (group * CHANNELS + c).to(tl.int64), c < CHANNELS
    there = mine & (tile < (PLACES // 4 if ACROSS else PLACES))
    return (picture // pictures).to(tl.int64), (picture % pictures).to(tl.int64), channel, mine, tile, place, there


@triton.jit
def _unit(value, offset, at, mine, there, COUNT: tl.constexpr, EPS: tl.constexpr):
    """x̂ and its scale."""
    if offset is not None:
        value += tl.where(there, tl.load(offset + at, mask=mine, other=0.0).to(value.dtype), 0.0)
    apart = tl.where(there, value - tl.sum(value) / COUNT, 0.0)
    scale = 1 / tl.sqrt(tl.sum(apart * apart) / COUNT + EPS)
    return apart * scale, scale


@triton.jit
def apply(
    x, offset, weight, bias, out, pictures, groups, xn, xb, xc, xp, on, oc, wn, wc, bn, bc,
    CHANNELS: tl.constexpr, PLACES: tl.constexpr, EPS: tl.constexpr, ACROSS: tl.constexpr,
    BLOCK_C: tl.constexpr, BLOCK: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """out[n, b, c, q] = x̂ · weight[n, c] + bias[n, c], or the mean of what is above 0 of it over tile q, where x̂ is
    x[n, b, c] + offset[n, c] normalised. The strides of all tensors but the last follow them, in their order."""
    n, b, channel, mine, tile, place, there = _where(pictures, groups, CHANNELS, PLACES, ACROSS, BLOCK_C, BLOCK)
    wide = tl.float64 if WIDE else tl.float32
    value = tl.load(x + n * xn + b * xb + channel * xc + place * xp, mask=there, other=0.0).to(wide)
    factor = tl.load(weight + n * wn + channel * wc, mask=mine, other=0.0).to(wide)
    shift = tl.load(bias + n * bn + channel * bc, mask=mine, other=0.0).to(wide)
    unit, _ = _unit(value, offset, n * on + channel * oc, mine, there, CHANNELS * PLACES, EPS)
    result = unit * factor + shift
    if ACROSS:
        result = tl.sum(tl.where(result < 0, 0.0, result), 2, keep_dims=True) / 4  # what is not a number stays so
    target = ((n * pictures + b) * groups * CHANNELS + channel) * (PLACES // 4 if ACROSS else PLACES) + tile
    tl.store(out + target, result.to(out.dtype.element_ty), mask=there)


@triton.jit
def slope(
    x, offset, weight, bias, g, by_x, sums, pictures, groups,
    xn, xb, xc, xp, on, oc, wn, wc, bn, bc, gn, gb, gc, gp, rn, rb, rc, rp,
    CHANNELS: tl.constexpr, PLACES: tl.constexpr, EPS: tl.constexpr, ACROSS: tl.constexpr,
    BLOCK_C: tl.constexpr, BLOCK: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """by_x = scale · (u - ⟨u⟩ - x̂ ⟨u x̂⟩) with u = weight · g; sums[n, :, b, c] = Σ g x̂, Σ g and Σ by_x over places."""
    n, b, channel, mine, tile, place, there = _where(pictures, groups, CHANNELS, PLACES, ACROSS, BLOCK_C, BLOCK)
    wide = tl.float64 if WIDE else tl.float32
    value = tl.load(x + n * xn + b * xb + channel * xc + place * xp, mask=there, other=0.0).to(wide)
    slope = tl.load(g + n * gn + b * gb + channel * gc + tile * gp, mask=there, other=0.0).to(wide)
    factor = tl.load(weight + n * wn + channel * wc, mask=mine, other=0.0).to(wide)
    count: tl.constexpr = CHANNELS * PLACES
    unit, scale = _unit(value, offset, n * on + channel * oc, mine, there, count, EPS)
    if ACROSS:
        shift = tl.load(bias + n * bn + channel * bc, mask=mine, other=0.0).to(wide)
        slope = tl.where(unit * factor + shift > 0, slope / 4, 0.0)
    u = factor * slope
    result = tl.where(there, scale * (u - tl.sum(u) / count - unit * (tl.sum(u * unit) / count)), 0.0)
    tl.store(by_x + n * rn + b * rb + channel * rc + place * rp, result.to(by_x.dtype.element_ty), mask=there)
    row, step = sums + (3 * n * pictures + b) * groups * CHANNELS + channel, pictures * groups * CHANNELS
    tl.store(row, _over(slope * unit), mask=mine)
    tl.store(row + step, _over(slope), mask=mine)
    tl.store(row + 2 * step, _over(result), mask=mine)


@triton.jit
def curve(
    x, offset, weight, bias, g, a, cot, by_x, by_g, sums, pictures, groups,
    xn, xb, xc, xp, on, oc, wn, wc, bn, bc, gn, gb, gc, gp, an, ab, ac, ap, cn, ck, cb, cc, rn, rb, rc, rp,
    sn, sb, sc, sp,
    CHANNELS: tl.constexpr, PLACES: tl.constexpr, EPS: tl.constexpr, ACROSS: tl.constexpr,
    BLOCK_C: tl.constexpr, BLOCK: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """The gradients by x and g, and in sums[n, :, b, c] those by weight and by offset, of what `slope` computes.

    Those by its results are a, p, q and r, the last three in cot[n, :, b, c]; r adds to a. With d = scale · (a - ⟨a⟩ -
    x̂ ⟨a x̂⟩), by_g = weight · d + p x̂ + q, the sums are Σ g d and Σ by_x, and by_x = scale · (p g - ⟨p g⟩ - x̂ ⟨p g x̂⟩) -
    scale² · (⟨u x̂⟩ a + ⟨a x̂⟩ u - ⟨u x̂⟩⟨a⟩ - ⟨a x̂⟩⟨u⟩ + (⟨a u⟩ - ⟨a⟩⟨u⟩ - 3 ⟨u x̂⟩⟨a x̂⟩) x̂).
    """
    n, b, channel, mine, tile, place, there = _where(pictures, groups, CHANNELS, PLACES, ACROSS, BLOCK_C, BLOCK)
    wide = tl.float64 if WIDE else tl.float32
    value = tl.load(x + n * xn + b * xb + channel * xc + place * xp, mask=there, other=0.0).to(wide)
    slope = tl.load(g + n * gn + b * gb + channel * gc + tile * gp, mask=there, other=0.0).to(wide)
    ahead = tl.load(a + n * an + b * ab + channel * ac + place * ap, mask=there, other=0.0).to(wide)
    factor = tl.load(weight + n * wn + channel * wc, mask=mine, other=0.0).to(wide)
    p = tl.load(cot + n * cn + b * cb + channel * cc, mask=mine, other=0.0).to(wide)
    q = tl.load(cot + n * cn + ck + b * cb + channel * cc, mask=mine, other=0.0).to(wide)
    r = tl.load(cot + n * cn + 2 * ck + b * cb + channel * cc, mask=mine, other=0.0).to(wide)
    ahead = tl.where(there, ahead + r, 0.0)
    count: tl.constexpr = CHANNELS * PLACES
    unit, scale = _unit(value, offset, n * on + channel * oc, mine, there, count, EPS)
    if ACROSS:
        shift = tl.load(bias + n * bn + channel * bc, mask=mine, other=0.0).to(wide)
        share = tl.where(unit * factor + shift > 0, 0.25, 0.0).to(wide)
        slope = slope * share
    u, tilt = factor * slope, p * slope
    u1, a1, t1 = tl.sum(u) / count, tl.sum(ahead) / count, tl.sum(tilt) / count
    ux, ax, tx = tl.sum(u * unit) / count, tl.sum(ahead * unit) / count, tl.sum(tilt * unit) / count
    au = tl.sum(ahead * u) / count
    down = scale * (ahead - a1 - unit * ax)
    bend = ux * (ahead - a1) + ax * (u - u1) + (au - a1 * u1 - 3 * ux * ax) * unit
    result = tl.where(there, scale * (tilt - t1 - unit * tx) - scale * scale * bend, 0.0)
    by_offset = _over(result)
    tl.store(by_x + n * rn + b * rb + channel * rc + place * rp, result.to(by_x.dtype.element_ty), mask=there)
    result = factor * down + p * unit + q
    if ACROSS:
        result = tl.sum(result * share, 2, keep_dims=True)
    tl.store(by_g + n * sn + b * sb + channel * sc + tile * sp, result.to(by_g.dtype.element_ty), mask=there)
    row, step = sums + (2 * n * pictures + b) * groups * CHANNELS + channel, pictures * groups * CHANNELS
    tl.store(row, _over(slope * down), mask=mine)
    tl.store(row + step, by_offset, mask=mine)


@triton.jit
def _over(value):
    """Sums over tiles and their places, [c, 1, 1]."""
    return tl.sum(tl.sum(value, 2, keep_dims=True), 1, keep_dims=True)
