"""Triton kernels that both engines launch, driven by strides that are data.

Nothing here knows torch or JAX. :mod:`~backends.triton_kernels.plans` turns shapes into
:class:`~backends.triton_kernels.launch.Launch` descriptions, which an engine fills with its
arrays; :mod:`~backends.triton_kernels.tiles` and :mod:`~backends.triton_kernels.configs` are
plain Python and import no Triton.
"""
