"""Which versions of vLLM are served."""

from __future__ import annotations

import re
from typing import Final

import vllm

from layout_core.errors import UnsupportedError

SERVED: Final = ((0, 29), (0, 32))
"""The first and the last release line that the conformance run compares with."""


def release_of(version: str) -> tuple[int, int]:
    """``(0, 29)`` of ``"0.29.0+cpu"``.

    Raises:
        UnsupportedError: text that begins with no release number.
    """
    found = re.match(r"(\d+)\.(\d+)", version)
    if found is None:
        raise UnsupportedError(f"vllm.__version__: expected a release number, got {version!r}")
    return int(found[1]), int(found[2])


def check_version(version: str | None = None) -> None:
    """Raise unless the installed vLLM is of a release line that is served.

    Raises:
        UnsupportedError: names the versions served and the one installed.
    """
    installed = vllm.__version__ if version is None else version
    first, last = SERVED
    if not first <= release_of(installed) <= last:
        raise UnsupportedError(
            f"integrations.vllm serves vLLM {'.'.join(map(str, first))} to "
            f"{'.'.join(map(str, last))}, got {installed}"
        )
