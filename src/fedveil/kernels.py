"""The kernels of windows.py, in Triton. A program does `BLOCK` places of one channel of one stack member."""

# mypy: ignore-errors
import triton
import triton.language as tl


@triton.jit
def spread(
    x, out, places, channels, height, width, rows, columns, sn, sb, sc, sy, sx,
    KH: tl.constexpr, KW: tl.constexpr, SH: tl.constexpr, SW: tl.constexpr, PH: tl.constexpr, PW: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """out[n, (c, i, j), (b, r, q)] = x[n, b, c, r·SH + i - PH, q·SW + j - PW], 0 outside; s* are the strides of x."""
    channel = tl.program_id(1)
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
    channel = tl.program_id(1)
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
