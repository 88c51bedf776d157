"""JAX's persistent compilation cache: a warm process compiles nothing.

The cache belongs to JAX and to the whole process, so nothing here turns it on unasked.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
from jax.experimental.compilation_cache import compilation_cache


def use_compilation_cache(folder: Path | str) -> None:
    """Keep every compiled program of this process in ``folder``, and take from there what is.

    Call it before the first program is compiled; the folder is made. It holds machine code for
    this JAX and this machine: whoever can write there decides what runs here.

    Raises:
        OSError: the folder cannot be made.
    """
    path = Path(folder).expanduser()
    path.mkdir(parents=True, exist_ok=True)
    options: dict[str, Any] = {
        "jax_compilation_cache_dir": str(path),
        # a denoise loop is a few programs, small ones among them; all of them are wanted
        "jax_persistent_cache_min_compile_time_secs": 0.0,
        "jax_persistent_cache_min_entry_size_bytes": -1,
    }
    for name, value in options.items():
        jax.config.update(name, value)  # type: ignore[no-untyped-call]
    compilation_cache.reset_cache()  # a process that compiled before has settled on none
