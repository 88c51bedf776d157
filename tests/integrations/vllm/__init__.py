"""pagestride beside the real vLLM: ``check_*.py`` run in the environments of
``tools/conformance.py``, one for each version, and are not collected anywhere else."""
