"""What spawned processes run in the tests of carrying: a worker's side."""

from __future__ import annotations

from multiprocessing.connection import Connection

from layout_core import CacheConfig, ModelConfig, RunConfig, resolve_layout, serve_adoption


def echo(pipe: Connection) -> None:
    """Receive a config, send it back with the plan that it resolves to."""
    config = pipe.recv()
    pipe.send((config, resolve_layout(config)))


def adopt(rank: int, pinned: str | None, text: str, pipe: Connection) -> None:
    """Adopt a layout, then send the bytes of the plan, which stands for the allocation."""
    run = RunConfig(ModelConfig(64), CacheConfig(kv_cache_layout=pinned))
    config = serve_adoption(rank, run, text, pipe.send)
    pipe.send(resolve_layout(config).size_bytes)
