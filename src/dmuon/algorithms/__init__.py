"""The arithmetic of each algorithm; a new one is a file of its own and an entry here."""

from dmuon.algorithms.adamw import ADAMW
from dmuon.algorithms.algorithm import ROWS_DTYPE, Algorithm, Matrices, StateKind
from dmuon.algorithms.muon import MUON
from dmuon.algorithms.normuon import NORMUON
from dmuon.algorithms.scales import ADJUST_LR_FNS, AdjustLr, lr_scale

ALGORITHMS = {algorithm.name: algorithm for algorithm in (MUON, NORMUON, ADAMW)}

__all__ = [
    "ADJUST_LR_FNS",
    "ALGORITHMS",
    "ROWS_DTYPE",
    "AdjustLr",
    "Algorithm",
    "Matrices",
    "StateKind",
    "lr_scale",
]
