"""A batched GEMM with a symmetric result: the tiles on and below the diagonal, mirrored."""

# Triton has no type stubs, and reads a kernel's annotations as its own types.
# mypy: disable-error-code="import-untyped, untyped-decorator, no-untyped-def, attr-defined"
# ruff: noqa: ANN001, ANN201

import torch
import triton
import triton.language as tl
from torch import Tensor

from dmuon.newton_schulz.products import Terms


@triton.jit
def symmetric_kernel(  # noqa: PLR0913, PLR0917
    left_ptr,
    right_ptr,
    add_ptr,
    result_ptr,
    tiles,
    size,
    depth,
    right_stride_k,
    right_stride_n,
    alpha,
    beta,
    gamma,
    HAS_ADD: tl.constexpr,
    UPCAST: tl.constexpr,
    TILE: tl.constexpr,
    TILE_K: tl.constexpr,
):
    """Write one tile of `alpha * left @ right + beta * add + gamma * I` and its mirror image.

    Programs are numbered along the rows of the lower triangle of tiles. All but `right` are
    contiguous, and so is each of its matrices or its transpose. Offsets are 64-bit: a batch of
    expert weights passes 2^31 entries.
    """
    # One axis: only the first may be longer than 65535.
    tile = tl.program_id(0) % tiles
    batch = (tl.program_id(0) // tiles).to(tl.int64)
    row = ((tl.sqrt(8.0 * tile + 1.0) - 1.0) * 0.5).to(tl.int32)
    # The square root may be off by one in float32.
    row = tl.where(row * (row + 1) // 2 > tile, row - 1, row)
    row = tl.where((row + 1) * (row + 2) // 2 <= tile, row + 1, row)
    column = tile - row * (row + 1) // 2
    rows = (row * TILE + tl.arange(0, TILE)).to(tl.int64)[:, None]
    columns = (column * TILE + tl.arange(0, TILE)).to(tl.int64)[None, :]
    ks = tl.arange(0, TILE_K).to(tl.int64)
    left_ptr += batch * size * depth + rows * depth
    right_ptr += batch * size * depth + columns * right_stride_n
    total = tl.zeros((TILE, TILE), dtype=tl.float32)
    for start in range(0, depth, TILE_K):
        k = start + ks
        inside = k < depth
        left = tl.load(left_ptr + k[None, :], mask=(rows < size) & inside[None, :], other=0.0)
        right_ptrs = right_ptr + k[:, None] * right_stride_k
        right = tl.load(right_ptrs, mask=inside[:, None] & (columns < size), other=0.0)
        if UPCAST:
            left, right = left.to(tl.float32), right.to(tl.float32)
        # "ieee" matters for float32 only: TF32 would lose the accuracy float32 was asked for.
        total = tl.dot(left, right, total, input_precision="ieee")
    total *= alpha
    mask = (rows < size) & (columns < size)
    offsets = batch * size * size + rows * size + columns
    if HAS_ADD:
        total += beta * tl.load(add_ptr + offsets, mask=mask, other=0.0).to(tl.float32)
    total += tl.where(rows == columns, gamma, 0.0)
    value = total.to(result_ptr.dtype.element_ty)
    tl.store(result_ptr + offsets, value, mask=mask)
    if row != column:
        mirror = result_ptr + batch * size * size + tl.trans(columns) * size + tl.trans(rows)
        tl.store(mirror, tl.trans(value), mask=tl.trans(mask))


def tile_config(dtype: torch.dtype, size: int) -> dict[str, int]:
    """Return tile sizes, warps and stages for matrices of `size` x `size` in `dtype`."""
    if dtype == torch.float32:
        return {"TILE": 64, "TILE_K": 16, "num_warps": 8, "num_stages": 2}
    if size < 512:
        return {"TILE": 64, "TILE_K": 64, "num_warps": 4, "num_stages": 3}
    return {"TILE": 128, "TILE_K": 64, "num_warps": 8, "num_stages": 3}


def triton_product(left_BMK: Tensor, right_BKM: Tensor, terms: Terms) -> Tensor:
    """Compute the lower tiles and mirror them, accumulating in float32: a `SymmetricProduct`."""
    batch, size, depth = left_BMK.shape
    config = tile_config(left_BMK.dtype, size)
    rows = triton.cdiv(size, config["TILE"])
    tiles = rows * (rows + 1) // 2
    left_BMK = left_BMK.contiguous()
    if not right_BKM.mT.is_contiguous():
        right_BKM = right_BKM.contiguous()
    result_BMM = left_BMK.new_empty(batch, size, size)
    symmetric_kernel[(batch * tiles,)](
        left_BMK,
        right_BKM,
        left_BMK if terms.add is None else terms.add.contiguous(),
        result_BMM,
        tiles,
        size,
        depth,
        *right_BKM.stride()[1:],
        terms.alpha,
        terms.beta,
        terms.gamma,
        HAS_ADD=terms.add is not None,
        # The interpreter would multiply the bits of bfloat16 as integers.
        UPCAST=triton.knobs.runtime.interpret and left_BMK.dtype == torch.bfloat16,
        **config,
    )
    return result_BMM
