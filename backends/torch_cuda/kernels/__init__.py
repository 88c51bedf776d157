"""Attention kernels of the torch engine; :mod:`.select` says which serves what."""
