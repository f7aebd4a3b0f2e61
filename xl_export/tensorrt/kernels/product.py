"""Products with weights for ONNX Runtime's `cuda` provider, with the work around them in the same launch.

    y = activation(norm(x) · Wᵀ + bias) + norm(residual)

`product_of_few_rows` computes all of it for at most ROWS rows, and reads the weights once. Each program has
some columns of y. For more rows cuBLAS multiplies, and `product_end` does what comes behind, with the norm
that reads y next. The node in `runtimes/sessions/ort_gpu/product.hpp` has the contract and launches them.
Sums are in float32, in an order that depends only on the sizes.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def product_of_few_rows(
    x,
    matrix,
    bias,
    residual,
    norm_weight,
    norm_bias,
    residual_weight,
    residual_bias,
    y,
    rows,
    K,
    N,
    has_bias,
    has_residual,
    normed,
    residual_normed,
    relu,
    epsilon,
    ROWS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Columns of y [rows, N] from x [rows, K] and the matrix [N, K]; the grid is (ceil(N / BLOCK_N),).

    The flags say which of the optional tensors exist. Every program computes the mean and the variance of the
    rows itself: they are few, and in the cache. It reads the first weights before that, and each further tile
    one tile ahead, since they come from farther away.
    """
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    # With all three dimensions from the start, weights stay in the registers that they are loaded to.
    row = n[None, :, None]
    k = tl.arange(0, BLOCK_K)[None, None, :]
    weights = matrix + row.to(tl.int64) * K + k
    tile = tl.load(weights, mask=(row < N) & (k < K), other=0.0)
    at = tl.arange(0, BLOCK_K)
    numbers = _columns(x, at, K, rows, ROWS)
    mean, scale = _statistics(x, K, K * normed, rows, epsilon, ROWS, BLOCK_K)
    second_mean, second_scale = _statistics(residual, N, N * residual_normed, rows, epsilon, ROWS, BLOCK_K)
    sums = tl.zeros([ROWS, BLOCK_N, BLOCK_K], tl.float32)
    for k0 in range(0, K, BLOCK_K):
        after = k0 + BLOCK_K
        next_tile = tl.load(weights + after, mask=(row < N) & (after + k < K), other=0.0)
        next_numbers = _columns(x, after + at, K, rows, ROWS)
        factors = _normed(numbers, mean, scale, norm_weight, norm_bias, k0 + at, K, normed)
        sums += factors[:, None, :] * tile.to(tl.float32)
        tile = next_tile
        numbers = next_numbers
    result = tl.sum(sums, axis=2)
    result += tl.load(bias + n, mask=(n < N) & (has_bias != 0), other=0.0).to(tl.float32)[None, :]
    result = tl.where(relu != 0, tl.maximum(result, 0.0), result)
    numbers = _columns(residual, n, N * has_residual, rows, ROWS)
    result += _normed(
        numbers, second_mean, second_scale, residual_weight, residual_bias, n, N, residual_normed
    )
    r = tl.arange(0, ROWS)[:, None]
    tl.store(
        y + r * N + n[None, :],
        result.to(y.dtype.element_ty),
        mask=(r < rows) & (n < N)[None, :],
    )


@triton.jit
def _statistics(x, K, stop, rows, epsilon, ROWS: tl.constexpr, BLOCK_K: tl.constexpr):
    """Mean and 1 / standard deviation [ROWS] of rows of K numbers.

    stop: K. If it is 0 they are 0 and 1, with which the norm does nothing.
    """
    k = tl.arange(0, BLOCK_K)
    total = tl.zeros([ROWS, BLOCK_K], tl.float32)
    for k0 in range(0, stop, BLOCK_K):
        total += _columns(x, k0 + k, K, rows, ROWS)
    mean = tl.sum(total, axis=1) / K
    total = tl.zeros([ROWS, BLOCK_K], tl.float32)
    for k0 in range(0, stop, BLOCK_K):
        away = _columns(x, k0 + k, K, rows, ROWS) - mean[:, None]
        total += tl.where((k0 + k < K)[None, :], away * away, 0.0)
    variance = tl.where(stop > 0, tl.sum(total, axis=1) / K + epsilon, 1.0)
    return mean, tl.rsqrt(variance)


@triton.jit
def _columns(x, at, K, rows, ROWS: tl.constexpr):
    """Columns of the rows, in float32 [ROWS, …]; 0 beyond the last."""
    r = tl.arange(0, ROWS)[:, None]
    mask = (r < rows) & (at < K)[None, :]
    return tl.load(x + r * K + at[None, :], mask=mask, other=0.0).to(tl.float32)


@triton.jit
def _normed(numbers, mean, scale, weight, bias, at, K, normed):
    """The columns after the norm of their rows; unchanged if it does nothing."""
    exists = (at < K) & (normed != 0)
    factor = tl.load(weight + at, mask=exists, other=1.0).to(tl.float32)
    added = tl.load(bias + at, mask=exists, other=0.0).to(tl.float32)
    return (numbers - mean[:, None]) * scale[:, None] * factor[None, :] + added[None, :]


@triton.jit
def product_end(
    y,
    bias,
    residual,
    norm_weight,
    norm_bias,
    normed_y,
    N,
    has_bias,
    has_residual,
    normed,
    relu,
    epsilon,
    BLOCK: tl.constexpr,
):
    """y [rows, N] = activation(y + bias) + residual in place, and normed_y = norm(y); the grid is (rows,)."""
    row = tl.program_id(0).to(tl.int64) * N
    y += row
    residual += row
    normed_y += row
    lane = tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.float32)
    for n0 in range(0, N * normed, BLOCK):
        total += _ended(y, bias, residual, n0 + lane, N, has_bias, has_residual, relu)
    mean = tl.sum(total, axis=0) / N
    total = tl.zeros([BLOCK], tl.float32)
    for n0 in range(0, N * normed, BLOCK):
        away = _ended(y, bias, residual, n0 + lane, N, has_bias, has_residual, relu) - mean
        total += tl.where(n0 + lane < N, away * away, 0.0)
    scale = tl.rsqrt(tl.sum(total, axis=0) / N + epsilon)
    for n0 in range(0, N, BLOCK):
        n = n0 + lane
        result = _ended(y, bias, residual, n, N, has_bias, has_residual, relu)
        exists = (n < N) & (normed != 0)
        factor = tl.load(norm_weight + n, mask=exists, other=0.0).to(tl.float32)
        added = tl.load(norm_bias + n, mask=exists, other=0.0).to(tl.float32)
        after_norm = (result - mean) * scale * factor + added
        tl.store(normed_y + n, after_norm.to(y.dtype.element_ty), mask=exists)
        tl.store(y + n, result.to(y.dtype.element_ty), mask=n < N)


@triton.jit
def _ended(y, bias, residual, n, N, has_bias, has_residual, relu):
    """Columns of a product with what is behind it, in float32; 0 beyond the last column."""
    result = tl.load(y + n, mask=n < N, other=0.0).to(tl.float32)
    result += tl.load(bias + n, mask=(n < N) & (has_bias != 0), other=0.0).to(tl.float32)
    result = tl.where(relu != 0, tl.maximum(result, 0.0), result)
    return result + tl.load(residual + n, mask=(n < N) & (has_residual != 0), other=0.0).to(tl.float32)
