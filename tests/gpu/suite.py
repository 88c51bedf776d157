"""Pytest with the torch engine's kernels on a CUDA device, in place of the CPU's.

python -m tests.gpu.suite [--every N --from K] tests/engines/test_suite_steps.py ...
"""

from __future__ import annotations

import sys

KERNELS = (("torch_cuda", "triton"), ("torch_cuda", "gather"), ("torch_cuda", "sdpa"))


def main(arguments: list[str]) -> int:
    import pytest

    from tests.engines import suite
    from tests.engines.interpreted import slice_of

    plugin, rest = slice_of(arguments)
    suite.ENGINE_KERNELS = KERNELS  # before the test modules read it
    fixed = ["--engine-device", "cuda", "--floors", "never", "-p", "no:cacheprovider"]
    return int(pytest.main([*fixed, *rest], plugins=[plugin]))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
