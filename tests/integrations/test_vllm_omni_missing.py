"""Without vLLM-Omni the integration can be imported, and says what to install when it is used."""

from __future__ import annotations

import importlib.util

import pytest

import integrations.vllm_omni as integration
from layout_core import MissingPackageError


def test_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    find = importlib.util.find_spec

    def find_none_of_them(name: str, *rest: object) -> object:
        return None if name in ("vllm", "vllm_omni") else find(name, *rest)

    monkeypatch.setattr(importlib.util, "find_spec", find_none_of_them)
    for name in ("install", "remove", "OmniTorchBackend", "resolve_diffusion_kv_cache_layout"):
        message = (
            r"integrations\.vllm_omni needs vllm, vllm_omni, which are not installed; "
            r"pip install 'pagestride\[vllm-omni\]'"
        )
        with pytest.raises(MissingPackageError, match=message):
            getattr(integration, name)


def test_an_unknown_name_is_no_missing_package() -> None:
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        integration.nothing  # noqa: B018


def test_public_names_are_listed() -> None:
    assert {"install", "remove", "attach", "OmniJaxBackend"} <= set(integration.__all__)
    assert set(integration.__all__) <= set(dir(integration))
