"""Attention kernels over the pool; ``select`` says which runs."""
