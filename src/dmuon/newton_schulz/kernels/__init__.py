"""Triton kernels, one a file. Nothing here is imported without a CUDA device."""
