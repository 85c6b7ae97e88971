"""Many matrices at once: those of one shape, up to transposition, share batched products."""

from collections import defaultdict
from collections.abc import Sequence

import torch
from torch import Tensor

from dmuon.orthogonalize.coefficients import Coefficients
from dmuon.orthogonalize.engine import orthogonalize

MAX_BATCH_BYTES = 256 * 2**20


def orthogonalize_all(
    matrices: Sequence[Tensor],
    *,
    coefficients: Coefficients,
    eps: float = 1e-7,
    dtype: torch.dtype | None = None,
    backend: str = "auto",
    max_batch_bytes: int = MAX_BATCH_BYTES,
) -> list[Tensor]:
    """Return `orthogonalize(matrix)` for each matrix, in order, in few batched calls.

    Args:
        matrices: Any shapes (M, N), dtypes and devices. Not modified.
        coefficients: One `(a, b, c)` per step.
        eps: As in `orthogonalize`.
        dtype: As in `orthogonalize`.
        backend: As in `orthogonalize`.
        max_batch_bytes: Bound on one stack's inputs; a larger matrix goes alone. The peak extra
            memory is about four times as much.
    """
    groups: dict[tuple[tuple[int, ...], torch.dtype, torch.device], list[int]] = defaultdict(list)
    for index, matrix in enumerate(matrices):
        groups[tuple(sorted(matrix.shape)), matrix.dtype, matrix.device].append(index)
    results: dict[int, Tensor] = {}
    for (shape, kind, _), indices in groups.items():
        # A float32 copy is made of every stack for its norms.
        matrix_bytes = max(1, shape[0] * shape[1] * max(4, kind.itemsize))
        capacity = max(1, max_batch_bytes // matrix_bytes)
        for start in range(0, len(indices), capacity):
            chunk = indices[start : start + capacity]
            stack = torch.stack([_wide(matrices[index]) for index in chunk])
            found = orthogonalize(
                stack, coefficients=coefficients, eps=eps, dtype=dtype, backend=backend
            )
            for index, wide in zip(chunk, found.unbind(), strict=True):
                results[index] = wide.mT if _is_tall(matrices[index]) else wide
    return [results[index] for index in range(len(matrices))]


def _is_tall(matrix: Tensor) -> bool:
    return matrix.shape[0] > matrix.shape[1]


def _wide(matrix: Tensor) -> Tensor:
    return matrix.mT if _is_tall(matrix) else matrix
