"""Orthogonalisation of matrices by Newton-Schulz iterations."""

from dmuon.orthogonalize.batches import orthogonalize_all
from dmuon.orthogonalize.coefficients import resolve_coefficients
from dmuon.orthogonalize.engine import orthogonalize
from dmuon.orthogonalize.quintic import Coefficients

__all__ = ["Coefficients", "orthogonalize", "orthogonalize_all", "resolve_coefficients"]
