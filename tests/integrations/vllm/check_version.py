"""Which vLLM is served."""

from __future__ import annotations

import pytest

from integrations.vllm.version import check_version, release_of
from layout_core import UnsupportedError


def test_the_installed_version_is_served() -> None:
    check_version()


@pytest.mark.parametrize("version", ["0.29.0", "0.30.1+cpu", "0.31.0rc1", "0.32.0+cu130"])
def test_served_versions(version: str) -> None:
    check_version(version)


@pytest.mark.parametrize("version", ["0.28.1", "0.33.0", "1.0.0", "0.3.0"])
def test_other_versions_are_refused_by_name(version: str) -> None:
    with pytest.raises(UnsupportedError, match=rf"serves vLLM 0\.29 to 0\.32, got {version}"):
        check_version(version)


def test_a_version_without_a_number() -> None:
    with pytest.raises(UnsupportedError, match="expected a release number, got 'dev'"):
        release_of("dev")
