"""Optimizer state: made, kept beside weights, saved and loaded."""
