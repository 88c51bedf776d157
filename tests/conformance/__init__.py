"""Comparison of the layout core and the block manager with the real vLLM.

Not part of the plain test run: ``python -m tests.conformance`` runs in an environment that has
vLLM (``tools/conformance.py`` makes one for each version), and a missing vLLM is a failure
there. Only ``test_bookkeeping.py`` is collected by pytest; it needs no vLLM.
"""
