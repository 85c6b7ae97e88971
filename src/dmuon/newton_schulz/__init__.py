"""Orthogonalization of matrices by Newton-Schulz iterations."""

from dmuon.newton_schulz.ambient import exact_arithmetic
from dmuon.newton_schulz.backend import Backend
from dmuon.newton_schulz.coefficients import resolve_coefficients
from dmuon.newton_schulz.method import Method
from dmuon.newton_schulz.polar import orthogonalize, orthogonalize_stack
from dmuon.newton_schulz.polynomial import Coefficients

__all__ = [
    "Backend",
    "Coefficients",
    "Method",
    "exact_arithmetic",
    "orthogonalize",
    "orthogonalize_stack",
    "resolve_coefficients",
]
