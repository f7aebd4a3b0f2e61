"""The relative shift of a tile of position scores, in registers.

A product of queries with rows of the position table has a column for each distance. Attention needs a column
for each key. The key of column j meets query i in column j - i of the product, so row i moves to the right by
i columns. A gather through shared memory does that too, but it makes all warps wait for each other many times
for every tile of keys. Here no warp waits, and each number passes one shuffle among four threads.

What a tensor core leaves in registers makes that possible. Row i = 16 w + 8 a + g belongs to warp w, and to
the four threads of its g (0 to 7). Thread c of these four holds columns 8 n + 2 c + b, for both b and each n.
Eight columns with one n are a group. The move by i columns has three steps:

- 16 w columns are whole groups, twice as many for each bit of w: a warp takes groups that came earlier.
- 8 a columns are the group before. The compiler knows a for each register, so this step costs nothing.
- g columns need another register of another of the four threads: one shuffle, after the sender has chosen the
  register, and the group before where the way wraps around at the end of a group.

Tensors have the axes [a, w, g, c, b] here. Triton's layout for a gather deals warps to the last axis that has
room for them. With this order of axes that layout is the product's own, so nothing is moved in between.
A test counts the barriers in what the compiler makes of it.
"""

# ruff: noqa: RUF005 (Triton's language has no starred expressions)

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def skewed(scores, earlier, FIRST: tl.constexpr):
    """The scores [T, J] by key, and the groups that the next tile needs.

    scores: by distance; their columns continue the previous tile. T is 16, 32, 64 or 128, and J is 16,
    32, 64 or 128. earlier: the groups that the tile before has left. FIRST: there is none before; then the
    result is meaningless, and the groups are what T columns leave.
    """
    T: tl.constexpr = scores.shape[0]
    W: tl.constexpr = T // 16
    w = tl.arange(0, W)[None, :, None, None, None]
    groups = _groups(scores)
    if FIRST:
        none = (groups[0], groups[0])
        earlier = (none, none, none + none, none + none + none + none)
    two = earlier[1]
    four = earlier[2]
    eight = earlier[3]
    if W > 1:
        groups, two = _late(groups, two, (w & 1) != 0)
    if W > 2:
        groups, four = _late(groups, four, (w & 2) != 0)
    if W > 4:
        groups, eight = _late(groups, eight, (w & 4) != 0)
    by_key = _tile(_turned(earlier[0] + groups))
    return by_key, (_last(groups, 2), two, four, eight)


@triton.jit
def _late(groups, before, chosen):
    """The groups, shifted back by the number of groups in `before` where `chosen`; and the next `before`."""
    line = before + groups
    late = ()
    for n in tl.static_range(len(groups)):
        late = late + (tl.where(chosen, line[n], line[n + len(before)]),)
    return late, _last(line, len(before))


@triton.jit
def _turned(groups):
    """The groups from the third on, with row 8 a + g of each warp moved to the right by 8 a + g columns."""
    W: tl.constexpr = groups[0].shape[1]
    a = tl.arange(0, 2)[:, None, None, None, None]
    g = tl.arange(0, 8)[None, None, :, None]
    c = tl.arange(0, 4)[None, None, None, :]
    odd = (g & 1) != 0
    # Columns with b = 1 come from g // 2 threads before, columns with b = 0 from one more if g is odd.
    ways = (g + 1) // 2, g // 2
    anywhere = tl.zeros([2, W, 8, 4], tl.int32)
    senders = (c - ways[0]) & 3 | anywhere, (c - ways[1]) & 3 | anywhere
    sent = ()
    for n in tl.static_range(1, len(groups)):
        left, right = tl.split(tl.where(a != 0, groups[n - 1], groups[n]))
        sent = sent + ((tl.where(odd, right, left), tl.where(odd, left, right)),)
    turned = ()
    for n in tl.static_range(1, len(sent)):
        left = tl.gather(tl.where(c + ways[0] >= 4, sent[n - 1][0], sent[n][0]), senders[0], axis=3)
        right = tl.gather(tl.where(c + ways[1] >= 4, sent[n - 1][1], sent[n][1]), senders[1], axis=3)
        turned = turned + (tl.join(left, right),)
    return turned


@triton.jit
def _groups(scores):
    """The groups of a tile [T, J], from left to right."""
    W: tl.constexpr = scores.shape[0] // 16
    N: tl.constexpr = scores.shape[1] // 8
    groups = (tl.permute(tl.reshape(scores, [W, 2, 8, N, 4, 2]), (1, 0, 2, 3, 4, 5)),)
    if N > 1:
        groups = _halves(groups)
    if N > 2:
        groups = _halves(groups)
    if N > 4:
        groups = _halves(groups)
    if N > 8:
        groups = _halves(groups)
    single = ()
    for n in tl.static_range(N):
        single = single + (tl.reshape(groups[n], [2, W, 8, 4, 2]),)
    return single


@triton.jit
def _halves(pieces):
    """The left and the right half of every piece [a, w, g, n, c, b]."""
    W: tl.constexpr = pieces[0].shape[1]
    N: tl.constexpr = pieces[0].shape[3] // 2
    halves = ()
    for n in tl.static_range(len(pieces)):
        piece = tl.reshape(pieces[n], [2, W, 8, 2, N, 4, 2])
        left, right = tl.split(tl.permute(piece, (0, 1, 2, 4, 5, 6, 3)))
        halves = halves + (left, right)
    return halves


@triton.jit
def _tile(groups):
    """The tile [T, J] of these groups, from left to right."""
    W: tl.constexpr = groups[0].shape[1]
    N: tl.constexpr = len(groups)
    pieces = ()
    for n in tl.static_range(N):
        pieces = pieces + (tl.reshape(groups[n], [2, W, 8, 1, 4, 2]),)
    if N > 1:
        pieces = _pairs(pieces)
    if N > 2:
        pieces = _pairs(pieces)
    if N > 4:
        pieces = _pairs(pieces)
    if N > 8:
        pieces = _pairs(pieces)
    return tl.reshape(tl.permute(pieces[0], (1, 0, 2, 3, 4, 5)), [16 * W, 8 * N])


@triton.jit
def _pairs(pieces):
    """Every two neighbours of pieces [a, w, g, n, c, b] as one."""
    W: tl.constexpr = pieces[0].shape[1]
    N: tl.constexpr = pieces[0].shape[3] * 2
    pairs = ()
    for n in tl.static_range(0, len(pieces), 2):
        pair = tl.permute(tl.join(pieces[n], pieces[n + 1]), (0, 1, 2, 6, 3, 4, 5))
        pairs = pairs + (tl.reshape(pair, [2, W, 8, N, 4, 2]),)
    return pairs


@triton.jit
def _last(groups, count: tl.constexpr):
    """The last `count` of the groups."""
    last = ()
    for n in tl.static_range(len(groups) - count, len(groups)):
        last = last + (groups[n],)
    return last
