"""A KV cache config as JSON text, and back: what crosses from the control plane to a worker."""

from __future__ import annotations

import json
from dataclasses import MISSING, fields
from fractions import Fraction
from typing import Any

from layout_core.dtypes import DType
from layout_core.errors import ConfigError, UnsupportedError
from layout_core.foreign import LATER_FIELDS
from layout_core.quant import KVQuantMode
from layout_core.specs import SPEC_CLASSES, KVCacheSpec, MultipleOf, UniformTypeKVCacheSpecs
from layout_core.tensors import KVCacheConfig, KVCacheGroupSpec, KVCacheTensor


def config_to_json(config: KVCacheConfig) -> str:
    """JSON text of a config. Fields at their default are left out."""
    return json.dumps(_record(config), separators=(",", ":"))


def config_from_json(text: str) -> KVCacheConfig:
    """The config of a text that :func:`config_to_json` made.

    Raises:
        ConfigError: text that is no such config, naming the field.
        UnsupportedError: a field that changes addressing or ownership and is set.
        SpecError: a spec that its own check refuses.
    """
    try:
        data = json.loads(text)
    except json.JSONDecodeError as error:
        raise ConfigError(f"config: expected JSON text, got {text[:60]!r} ({error})") from error
    values = _fields_of(KVCacheConfig, data, "config")
    values["kv_cache_tensors"] = [
        KVCacheTensor(**_fields_of(KVCacheTensor, item, f"config.kv_cache_tensors[{index}]"))
        for index, item in enumerate(_list(values, "kv_cache_tensors"))
    ]
    groups = []
    for index, item in enumerate(_list(values, "kv_cache_groups")):
        where = f"config.kv_cache_groups[{index}]"
        group = _fields_of(KVCacheGroupSpec, item, where)
        group["kv_cache_spec"] = _spec_from(group["kv_cache_spec"], f"{where}.kv_cache_spec")
        groups.append(KVCacheGroupSpec(**group))
    values["kv_cache_groups"] = groups
    return KVCacheConfig(**values)


def _list(values: dict[str, Any], name: str) -> list[Any]:
    value = values.get(name, [])
    if not isinstance(value, list):
        raise ConfigError(f"config.{name}: expected a list, got {value!r}")
    return value


def _record(record: Any) -> dict[str, Any]:
    out: dict[str, Any] = {}
    for item in fields(record):
        value = getattr(record, item.name)
        if item.default is not MISSING and value == item.default:
            continue
        out[item.name] = _value(value)
    return out


def _value(value: Any) -> Any:
    if isinstance(value, KVCacheSpec):
        return {"kind": type(value).__name__, **_record(value)}
    if isinstance(value, KVCacheTensor | KVCacheGroupSpec):
        return _record(value)
    if isinstance(value, list):
        return [_value(item) for item in value]
    if isinstance(value, dict):
        return {key: _value(item) for key, item in value.items()}
    if isinstance(value, DType):
        return value.name
    if isinstance(value, KVQuantMode):
        return value.name
    if isinstance(value, Fraction):
        return {"fraction": [value.numerator, value.denominator]}
    if isinstance(value, MultipleOf):
        return {"multiple_of": value.base}
    return value


def _fields_of(cls: type[Any], data: Any, where: str, skip: tuple[str, ...] = ()) -> dict[str, Any]:
    """The fields of one record, with unknown names refused and required ones demanded."""
    if not isinstance(data, dict):
        raise ConfigError(f"{where}: expected a JSON object, got {data!r}")
    known = {item.name: item for item in fields(cls)}
    values: dict[str, Any] = {}
    for name, value in data.items():
        if name in known:
            values[name] = value
        elif name in LATER_FIELDS:
            if value != LATER_FIELDS[name]:
                raise UnsupportedError(
                    f"{where}.{name}: expected the default {LATER_FIELDS[name]!r}, got {value!r}; "
                    "it changes where blocks lie or who owns them, which is not supported"
                )
        elif name not in skip:
            raise ConfigError(f"{where}.{name}: unknown field, expected one of {list(known)}")
    for name, item in known.items():
        required = item.default is MISSING and item.default_factory is MISSING
        if required and name not in values:
            raise ConfigError(f"{where}.{name}: required, and missing")
    return values


def _spec_from(data: Any, where: str) -> KVCacheSpec:
    kind = data.get("kind") if isinstance(data, dict) else None
    cls = SPEC_CLASSES.get(kind) if isinstance(kind, str) else None
    if cls is None:
        raise ConfigError(f"{where}.kind: expected one of {', '.join(SPEC_CLASSES)}, got {kind!r}")
    values = _fields_of(cls, data, where, skip=("kind",))
    if cls is UniformTypeKVCacheSpecs:
        values["kv_cache_specs"] = {
            name: _spec_from(item, f"{where}.kv_cache_specs[{name!r}]")
            for name, item in values["kv_cache_specs"].items()
        }
        return cls(**values)
    tokens = values.get("tokens_per_state")
    if isinstance(tokens, dict):
        values["tokens_per_state"] = Fraction(*tokens["fraction"])
    alignment = values.get("block_stride_alignment")
    if isinstance(alignment, dict):
        values["block_stride_alignment"] = MultipleOf(alignment["multiple_of"])
    mode = values.get("kv_quant_mode")
    if mode is not None:
        if mode not in KVQuantMode.__members__:
            raise ConfigError(f"{where}.kv_quant_mode: expected a mode's name, got {mode!r}")
        values["kv_quant_mode"] = KVQuantMode[mode]
    return cls(**values)
