"""Distributed Muon for PyTorch: each matrix is orthogonalized once in the whole job."""

from dmuon.clip import clip_grad_norm_
from dmuon.integrations.adoption import adopt_state
from dmuon.newton_schulz import orthogonalize
from dmuon.optimizer import Muon
from dmuon.routing.rules import Split, param_groups

__all__ = ["Muon", "Split", "adopt_state", "clip_grad_norm_", "orthogonalize", "param_groups"]
__version__ = "0.1.0"
