"""pagestride for the runners that people have: vLLM, vLLM-Omni, diffusers.

The only place that imports them. Each module needs its package, and says so where it is missing.
"""
