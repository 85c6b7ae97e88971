"""Orthogonalisation of matrices by Newton-Schulz iterations."""

from dmuon.orthogonalize.coefficients import Coefficients, resolve_coefficients
from dmuon.orthogonalize.engine import orthogonalize

__all__ = ["Coefficients", "orthogonalize", "resolve_coefficients"]
