"""The arithmetic of each algorithm; a new one is a file of its own and an entry here."""

from dmuon.algorithms.adamuon import ADAMUON
from dmuon.algorithms.adamw import ADAMW
from dmuon.algorithms.algorithm import Algorithm, Matrices, StateKind
from dmuon.algorithms.hyperball import MUONH
from dmuon.algorithms.mona import MONA, MONA_LITE
from dmuon.algorithms.muon import MUON
from dmuon.algorithms.muon2 import MUON2
from dmuon.algorithms.muon_plus import MUON_PLUS, MUONEQ_PLUS
from dmuon.algorithms.muoneq import MUONEQ
from dmuon.algorithms.musec import MUSEC, SOFT_MUSEC
from dmuon.algorithms.normuon import NORMUON, NORMUON_LONG_AXIS, NORMUON_PAPER
from dmuon.algorithms.scales import ADJUST_LR_FNS, AdjustLr, lr_scale
from dmuon.algorithms.sgd import SGD
from dmuon.algorithms.signum import SIGNUM
from dmuon.algorithms.trust_ratio import TRUST_RATIO

_ALL = (
    *(MUON, NORMUON, NORMUON_PAPER, NORMUON_LONG_AXIS, MUON2, MONA, MONA_LITE, MUONEQ),
    *(MUON_PLUS, MUONEQ_PLUS, MUSEC, SOFT_MUSEC, ADAMUON, MUONH, TRUST_RATIO, ADAMW, SGD, SIGNUM),
)
ALGORITHMS = {algorithm.name: algorithm for algorithm in _ALL}

__all__ = [
    "ADJUST_LR_FNS",
    "ALGORITHMS",
    "AdjustLr",
    "Algorithm",
    "Matrices",
    "StateKind",
    "lr_scale",
]
