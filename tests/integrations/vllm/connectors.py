"""KV connectors that demand a layout, for vLLM's own factory to find by module path."""

from __future__ import annotations

from typing import Any


class Connector:
    """What the factory looks at: the constructor's third argument."""

    demand: object = None

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        raise AssertionError("the layout is asked of the class")

    @classmethod
    def get_required_kvcache_layout(cls, vllm_config: Any) -> object:
        assert vllm_config.cache_config is not None
        return cls.demand


class AnyLayout(Connector):
    pass


class HeadMajor(Connector):
    demand = "HND"  # vLLM's older name of LBHNC


class BlockMajor(Connector):
    demand = "BLHNC"


class Nonsense(Connector):
    demand = "ZIGZAG"
