"""Adapters to trainers that cannot take the optimizer as it is; each imports its own library."""
