"""Measured choices among the ways to orthogonalize a batch."""
