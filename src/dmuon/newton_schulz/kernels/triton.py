"""A batched GEMM with a symmetric result: the tiles on and below the diagonal, mirrored."""

# Triton has no type stubs, and reads a kernel's annotations as its own types.
# mypy: disable-error-code="import-untyped, untyped-decorator, no-untyped-def, attr-defined"

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def symmetric_kernel(  # noqa: ANN201, PLR0913, PLR0917
    left_ptr,  # noqa: ANN001
    right_ptr,  # noqa: ANN001
    add_ptr,  # noqa: ANN001
    result_ptr,  # noqa: ANN001
    tiles,  # noqa: ANN001
    size,  # noqa: ANN001
    depth,  # noqa: ANN001
    left_stride_b,  # noqa: ANN001
    left_stride_m,  # noqa: ANN001
    left_stride_k,  # noqa: ANN001
    right_stride_b,  # noqa: ANN001
    right_stride_k,  # noqa: ANN001
    right_stride_n,  # noqa: ANN001
    add_stride_b,  # noqa: ANN001
    add_stride_m,  # noqa: ANN001
    add_stride_n,  # noqa: ANN001
    alpha,  # noqa: ANN001
    beta,  # noqa: ANN001
    gamma,  # noqa: ANN001
    HAS_ADD: tl.constexpr,
    UPCAST: tl.constexpr,
    TILE: tl.constexpr,
    TILE_K: tl.constexpr,
):
    """Write one tile of `alpha * left @ right + beta * add + gamma * I` and its mirror image.

    Programs are numbered along the rows of the lower triangle of tiles. The result is contiguous.
    Offsets are 64-bit: a batch of expert weights passes 2^31 entries.
    """
    # One axis: only the first may be longer than 65535.
    tile = tl.program_id(0) % tiles
    batch = (tl.program_id(0) // tiles).to(tl.int64)
    row = ((tl.sqrt(8.0 * tile + 1.0) - 1.0) * 0.5).to(tl.int32)
    # The square root may be off by one in float32.
    row = tl.where(row * (row + 1) // 2 > tile, row - 1, row)
    row = tl.where((row + 1) * (row + 2) // 2 <= tile, row + 1, row)
    column = tile - row * (row + 1) // 2

    rows = (row * TILE + tl.arange(0, TILE)).to(tl.int64)
    columns = (column * TILE + tl.arange(0, TILE)).to(tl.int64)
    ks = tl.arange(0, TILE_K).to(tl.int64)
    row_mask = rows < size
    column_mask = columns < size
    left_ptrs = left_ptr + batch * left_stride_b + rows[:, None] * left_stride_m
    right_ptrs = right_ptr + batch * right_stride_b + columns[None, :] * right_stride_n
    total = tl.zeros((TILE, TILE), dtype=tl.float32)
    for start in range(0, depth, TILE_K):
        k = start + ks
        left = tl.load(
            left_ptrs + k[None, :] * left_stride_k,
            mask=row_mask[:, None] & (k[None, :] < depth),
            other=0.0,
        )
        right = tl.load(
            right_ptrs + k[:, None] * right_stride_k,
            mask=(k[:, None] < depth) & column_mask[None, :],
            other=0.0,
        )
        if UPCAST:
            left, right = left.to(tl.float32), right.to(tl.float32)
        # "ieee" matters for float32 only: TF32 would lose the accuracy float32 was asked for.
        total = tl.dot(left, right, total, input_precision="ieee")
    total *= alpha
    mask = row_mask[:, None] & column_mask[None, :]
    if HAS_ADD:
        add_ptrs = add_ptr + batch * add_stride_b + rows[:, None] * add_stride_m
        add = tl.load(add_ptrs + columns[None, :] * add_stride_n, mask=mask, other=0.0)
        total += beta * add.to(tl.float32)
    if row == column:
        inside = tl.arange(0, TILE)
        total += tl.where(inside[:, None] == inside[None, :], gamma, 0.0)
    value = total.to(result_ptr.dtype.element_ty)
    result_ptr += batch * size * size
    tl.store(result_ptr + rows[:, None] * size + columns[None, :], value, mask=mask)
    if row != column:
        mirror = result_ptr + columns[:, None] * size + rows[None, :]
        tl.store(mirror, tl.trans(value), mask=column_mask[:, None] & row_mask[None, :])


def tile_config(dtype: torch.dtype, size: int) -> dict[str, int]:
    """Return tile sizes, warps and stages for matrices of `size` x `size` in `dtype`."""
    if dtype == torch.float32:
        return {"TILE": 64, "TILE_K": 16, "num_warps": 8, "num_stages": 2}
    if size < 512:
        return {"TILE": 64, "TILE_K": 64, "num_warps": 4, "num_stages": 3}
    return {"TILE": 128, "TILE_K": 64, "num_warps": 8, "num_stages": 3}


def triton_product(
    left_BMK: Tensor,
    right_BKM: Tensor,
    add_BMM: Tensor | None = None,
    *,
    alpha: float = 1.0,
    beta: float = 1.0,
    gamma: float = 0.0,
) -> Tensor:
    """Compute the lower tiles and mirror them, accumulating in float32: a `SymmetricProduct`."""
    batch, size, depth = left_BMK.shape
    config = tile_config(left_BMK.dtype, size)
    rows = triton.cdiv(size, config["TILE"])
    tiles = rows * (rows + 1) // 2
    result_BMM = left_BMK.new_empty(batch, size, size)
    add = left_BMK if add_BMM is None else add_BMM
    symmetric_kernel[(batch * tiles,)](
        left_BMK,
        right_BKM,
        add,
        result_BMM,
        tiles,
        size,
        depth,
        *left_BMK.stride(),
        *right_BKM.stride(),
        *add.stride(),
        alpha,
        beta,
        gamma,
        HAS_ADD=add_BMM is not None,
        # The interpreter would multiply the bits of bfloat16 as integers.
        UPCAST=triton.knobs.runtime.interpret and left_BMK.dtype == torch.bfloat16,
        **config,
    )
    return result_BMM
