"""Another library's specs and configs, read by attribute: vLLM's become ours, with no import.

Fields of later versions are carried where they stand at their default. One that is set and
is not known here could change who owns which byte, so it is refused by name.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping
from typing import Any, Final

from layout_core.errors import ConfigError, UnsupportedError
from layout_core.specs import (
    SPEC_CLASSES,
    KVCacheSpec,
    MultipleOf,
    UniformTypeKVCacheSpecs,
)
from layout_core.tensors import KVCacheConfig, KVCacheGroupSpec, KVCacheTensor

LATER_FIELDS: Final[dict[str, object]] = {
    "host_resident": False,
    "role": "default",
    "hisparse_host_num_blocks": None,
    "hisparse_host_block_stride": None,
    "hisparse_shared_host_pool": False,
}
"""Fields of vLLM's later records that change addressing or ownership, and their defaults."""


def refuse_later_fields(record: object, where: str) -> None:
    """Raise if a record sets a field that changes addressing or ownership.

    Raises:
        UnsupportedError: names the record, the field, its default and what came.
    """
    for name, default in LATER_FIELDS.items():
        value = getattr(record, name, default)
        if (getattr(value, "value", value)) != default:
            raise UnsupportedError(
                f"{where}.{name}: expected the default {default!r}, got {value!r}; it changes "
                "where blocks lie or who owns them, which is not supported"
            )


def refuse_unknown_fields(record: object, known: Collection[str], where: str) -> None:
    """Raise if another library's dataclass sets a field that has no counterpart here.

    Raises:
        UnsupportedError: names the field and its value.
    """
    if not dataclasses.is_dataclass(record):
        return
    for item in dataclasses.fields(record):
        if item.name in known:
            continue
        value = getattr(record, item.name)
        if item.default is dataclasses.MISSING or value != item.default:
            raise UnsupportedError(
                f"{where}.{item.name}: {type(record).__name__} sets it to {value!r}, and it is "
                "not known here"
            )


def as_spec(spec: object, *, where: str = "spec") -> KVCacheSpec:
    """A spec of ours from one of ours, or of a vLLM class of the same name.

    A subclass that is not known by name is taken as its nearest known base, as vLLM's own
    registry does, if it overrides nothing: then it has its base's page and its base's needs.

    Raises:
        UnsupportedError: a spec that is no attention layer's (Mamba state, raw storage), a
            subclass that overrides what its base says, or a field that is set and not known
            here.
        SpecError: fields that our check refuses.
    """
    if isinstance(spec, KVCacheSpec):
        return spec
    for base in type(spec).__mro__:
        ours = SPEC_CLASSES.get(base.__name__)
        if ours is not None:
            return _convert(spec, ours, where)
        _refuse_overrides(base, where)
    raise UnsupportedError(
        f"{where}: expected one of {', '.join(SPEC_CLASSES)}, got {type(spec).__name__}"
    )


def _refuse_overrides(cls: type, where: str) -> None:
    """Raise if a subclass of a known spec says something else than its base.

    A class that is not derived from a known spec is left to the caller.
    """
    bases = [base.__name__ for base in cls.__mro__ if base.__name__ in SPEC_CLASSES]
    own = [
        name
        for name, value in vars(cls).items()
        if not name.startswith("_")
        and (callable(value) or isinstance(value, property | classmethod | staticmethod))
    ]
    if bases and own:
        raise UnsupportedError(
            f"{where}: {cls.__name__} overrides {', '.join(sorted(own))} of {bases[0]}, so it may "
            f"need other blocks than {bases[0]} does, and it is not known here"
        )


def _convert(spec: Any, ours: type[KVCacheSpec], where: str) -> KVCacheSpec:
    known = {item.name for item in dataclasses.fields(ours)}
    refuse_unknown_fields(spec, known, where)
    values = {name: getattr(spec, name) for name in known if hasattr(spec, name)}
    if ours is UniformTypeKVCacheSpecs:
        inner: Mapping[str, object] = values["kv_cache_specs"]
        values["kv_cache_specs"] = {
            name: as_spec(layer, where=f"{where} of layer {name!r}")
            for name, layer in inner.items()
        }
    base = getattr(values.get("block_stride_alignment"), "base", None)
    if base is not None:
        values["block_stride_alignment"] = MultipleOf(base)
    return ours(**values)


def as_tensor(tensor: Any, *, where: str = "tensor") -> KVCacheTensor:
    """A tensor of ours, a copy, from one of ours or of vLLM's.

    Raises:
        UnsupportedError: a field that changes addressing or ownership, or is not known here.
    """
    _refuse_other_fields(tensor, KVCacheTensor, where)
    return KVCacheTensor(
        tensor.size, list(tensor.layers), tensor.layer_stride, tensor.block_stride, tensor.offset
    )


def as_group(group: Any, *, where: str = "group") -> KVCacheGroupSpec:
    """A group of ours, a copy, from one of ours or of vLLM's.

    Raises:
        UnsupportedError: as :func:`as_tensor`, and for its spec as :func:`as_spec`.
    """
    _refuse_other_fields(group, KVCacheGroupSpec, where)
    return KVCacheGroupSpec(
        list(group.layer_names),
        as_spec(group.kv_cache_spec, where=f"{where}.kv_cache_spec"),
        is_eagle_group=getattr(group, "is_eagle_group", False),
        enable_kv_transfer=getattr(group, "enable_kv_transfer", True),
    )


def _refuse_other_fields(record: object, ours: type[Any], where: str) -> None:
    refuse_later_fields(record, where)
    known = {item.name for item in dataclasses.fields(ours)}
    refuse_unknown_fields(record, known | set(LATER_FIELDS), where)


def as_config(config: Any) -> KVCacheConfig:
    """A config of ours from one of ours (the same object), or from vLLM's by attribute.

    Raises:
        UnsupportedError: a field that changes addressing or ownership, or is set and not known
            here, or a spec that is no attention layer's.
        ConfigError: an object that lacks what a config has.
    """
    where = "config"
    _refuse_other_fields(config, KVCacheConfig, where)
    for name in ("num_blocks", "kv_cache_tensors", "kv_cache_groups"):
        if not hasattr(config, name):
            raise ConfigError(f"{where}.{name}: {type(config).__name__} has none")
    for index, tensor in enumerate(config.kv_cache_tensors):
        refuse_later_fields(tensor, f"{where}.kv_cache_tensors[{index}]")
    for index, group in enumerate(config.kv_cache_groups):
        refuse_later_fields(group, f"{where}.kv_cache_groups[{index}]")
    if isinstance(config, KVCacheConfig):
        return config
    # For a packed group of which a pipeline stage holds no layer, vLLM lists the other stages'
    # tensors; no table of this worker ever addresses them.
    held = {name for group in config.kv_cache_groups for name in group.layer_names}
    tensors = [
        as_tensor(tensor, where=f"{where}.kv_cache_tensors[{index}]")
        for index, tensor in enumerate(config.kv_cache_tensors)
        if not held.isdisjoint(tensor.layers)
    ]
    groups = [
        as_group(group, where=f"{where}.kv_cache_groups[{index}]")
        for index, group in enumerate(config.kv_cache_groups)
    ]
    carried = {
        item.name: getattr(config, item.name)
        for item in dataclasses.fields(KVCacheConfig)
        if hasattr(config, item.name)
    }
    carried.update(kv_cache_tensors=tensors, kv_cache_groups=groups)
    return KVCacheConfig(**carried)
