"""Distributed Muon for PyTorch: each matrix is orthogonalized once in the whole job."""

from dmuon.algorithms import lr_scale
from dmuon.clip import clip_grad_norm_
from dmuon.integrations.adoption import adopt_state
from dmuon.newton_schulz import orthogonalize
from dmuon.optimizer import Muon
from dmuon.plan.report import Report
from dmuon.routing import Split, param_groups
from dmuon.step.bucket import StepStats

__all__ = [
    "Muon",
    "Report",
    "Split",
    "StepStats",
    "adopt_state",
    "clip_grad_norm_",
    "lr_scale",
    "orthogonalize",
    "param_groups",
]
__version__ = "0.1.0"
