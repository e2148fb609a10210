"""Providers that run on CUDA, each a family of compiled kernels."""
