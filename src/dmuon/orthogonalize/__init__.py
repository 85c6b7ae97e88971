"""Orthogonalisation of matrices by Newton-Schulz iterations."""

from dmuon.orthogonalize.batches import orthogonalize_all
from dmuon.orthogonalize.coefficients import Coefficients, resolve_coefficients
from dmuon.orthogonalize.engine import orthogonalize

__all__ = ["Coefficients", "orthogonalize", "orthogonalize_all", "resolve_coefficients"]
