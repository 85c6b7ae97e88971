"""Peak memory of tensors that are made while a function runs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class _PeakMode(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.live: dict[int, tuple[StorageWeakRef, int]] = {}
        self.known: set[int] = set()
        self.peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for leaf in tree_leaves((args, kwargs)):
            if isinstance(leaf, torch.Tensor):
                key = leaf.untyped_storage()._cdata
                if key not in self.live:
                    self.known.add(key)
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor):
                storage = leaf.untyped_storage()
                if storage._cdata not in self.known:
                    self.live[storage._cdata] = (StorageWeakRef(storage), storage.nbytes())
        self.live = {key: item for key, item in self.live.items() if not item[0].expired()}
        self.peak = max(self.peak, sum(size for _, size in self.live.values()))
        return result


def peak_bytes(work: Callable[[], Any]) -> int:
    """Largest number of bytes held at once by tensors that `work` makes."""
    with _PeakMode() as mode:
        work()
    return mode.peak
