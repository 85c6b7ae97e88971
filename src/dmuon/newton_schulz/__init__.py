"""Orthogonalisation of matrices by Newton-Schulz iterations."""

from dmuon.newton_schulz.coefficients import resolve_coefficients
from dmuon.newton_schulz.engine import orthogonalize
from dmuon.newton_schulz.quintic import Coefficients

__all__ = ["Coefficients", "orthogonalize", "resolve_coefficients"]
