"""A runner that draws handwritten digits with a real diffusion transformer over the paged cache.

It is both a product demonstration and the end-to-end test: every attention call of the model
goes through an engine's ``forward_paged``.
"""
