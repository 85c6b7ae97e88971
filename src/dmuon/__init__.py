"""Distributed Muon for PyTorch: each matrix is orthogonalized once in the whole job."""

from dmuon.optimizer import Muon
from dmuon.orthogonalize import orthogonalize
from dmuon.routing import Split, param_groups

__all__ = ["Muon", "Split", "orthogonalize", "param_groups"]
__version__ = "0.1.0"
