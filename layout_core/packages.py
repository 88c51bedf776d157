"""Packages that an engine needs: found without importing them, and named where they are missing."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence

from layout_core.errors import MissingPackageError


def check_installed(who: str, packages: Sequence[str], extra: str) -> None:
    """Raise unless packages can be imported; none is imported.

    Args:
        who: for the message: what needs them.
        packages: top-level names.
        extra: the extra of this project that installs them.

    Raises:
        MissingPackageError: names what is missing and the command that installs it.
    """
    missing = [package for package in packages if importlib.util.find_spec(package) is None]
    if missing:
        raise MissingPackageError(
            f"{who} needs {', '.join(missing)}, which {'is' if len(missing) == 1 else 'are'} not "
            f"installed; pip install 'pagestride[{extra}]'"
        )
