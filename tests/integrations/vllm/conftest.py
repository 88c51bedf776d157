"""What the checks share. Nothing here imports vLLM before a check asks for it."""

from __future__ import annotations

from typing import Any

import pytest


@pytest.fixture(scope="session")
def real_config(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A ``VllmConfig`` that is real throughout. It is shared: a check works on a copy."""
    from diffusion_runner.model.config import DigitsConfig
    from tests.integrations.vllm.real import whole_config
    from tests.integrations.vllm.workers import BLOCK_SIZE, RANKS

    folder = tmp_path_factory.mktemp("digits")
    return whole_config(folder, DigitsConfig(), ranks=RANKS, block_size=BLOCK_SIZE)
