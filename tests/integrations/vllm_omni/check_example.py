"""The example runs, and its own check of its result holds."""

from __future__ import annotations

import sys

import pytest

from examples import omni_split


@pytest.mark.parametrize("backend", ["torch_cuda", "jax_gpu"])
def test_the_example_runs(
    backend: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["omni_split", "--backend", backend])
    omni_split.main()
    out = capsys.readouterr().out
    assert "'LBNHC' disagrees with the layout that the control plane resolved, 'BLNHC'" in out
    assert "BLNHC: 4 paged calls" in out
