"""Ours and vLLM's layouts, specs, tensors, groups and configs: each made from the other.

Nothing is lost in silence. What one side cannot say is refused by name, and what vLLM makes
of our values is compared with them before it is handed out.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING, Field, fields
from typing import Any, Final, TypeVar, overload

import vllm
from vllm.v1 import kv_cache_interface
from vllm.v1.attention.backend import MultipleOf as VllmMultipleOf
from vllm.v1.kv_cache_layout import KVCacheLayout as VllmLayout

from backends.torch_cuda.dtypes import torch_dtype
from layout_core.dtypes import DType
from layout_core.errors import UnsupportedError
from layout_core.foreign import as_config, as_group, as_spec, as_tensor
from layout_core.layouts import KVCacheLayout
from layout_core.quant import KVQuantMode
from layout_core.specs import SPEC_CLASSES, KVCacheSpec, MultipleOf, UniformTypeKVCacheSpecs
from layout_core.tensors import KVCacheConfig, KVCacheGroupSpec, KVCacheTensor

_THEIRS: Final[Any] = kv_cache_interface

T = TypeVar("T")


# vLLM's to ours.


def from_vllm(value: Any) -> Any:
    """Our object with the content of vLLM's; lists are copied.

    Unlike the functions of the core, which read a subclass without overrides as its base, this
    takes vLLM's own spec classes alone: the class of another would be lost on the way back.

    Args:
        value: a layout, spec, tensor, group or config of vLLM's.

    Raises:
        UnsupportedError: an object of another class, a spec class that is not known here, or a
            field that is set and not known here; names it.
        SpecError, UnknownDTypeError: what our own checks refuse.
    """
    if isinstance(value, VllmLayout):
        return KVCacheLayout.parse(value)
    if isinstance(value, _THEIRS.KVCacheSpec):
        check_class(value, "spec")
        return as_spec(value)
    if isinstance(value, _THEIRS.KVCacheTensor):
        return as_tensor(value)
    if isinstance(value, _THEIRS.KVCacheGroupSpec):
        check_class(value.kv_cache_spec, "group.kv_cache_spec")
        return as_group(value)
    if isinstance(value, _THEIRS.KVCacheConfig):
        for index, group in enumerate(value.kv_cache_groups):
            check_class(group.kv_cache_spec, f"config.kv_cache_groups[{index}].kv_cache_spec")
        return as_config(value)
    raise UnsupportedError(
        "value: expected vLLM's KVCacheLayout, KVCacheConfig, KVCacheGroupSpec, KVCacheTensor or "
        f"a spec, got {type(value).__module__}.{type(value).__qualname__}"
    )


def check_class(spec: Any, where: str) -> None:
    """Raise unless a spec, or every spec in a wrapper, is of a class of vLLM's known by name.

    Raises:
        UnsupportedError: names the class and where it stands.
    """
    kind = type(spec)
    if kind is not getattr(_THEIRS, kind.__name__, None) or kind.__name__ not in SPEC_CLASSES:
        raise UnsupportedError(
            f"{where}: expected one of vLLM's {', '.join(SPEC_CLASSES)}, got "
            f"{kind.__module__}.{kind.__qualname__}"
        )
    if isinstance(spec, _THEIRS.UniformTypeKVCacheSpecs):
        for name, layer in spec.kv_cache_specs.items():
            check_class(layer, f"{where} of layer {name!r}")


# Ours to vLLM's.


@overload
def to_vllm(value: KVCacheLayout) -> VllmLayout: ...
@overload
def to_vllm(value: KVCacheSpec) -> kv_cache_interface.KVCacheSpec: ...
@overload
def to_vllm(value: KVCacheTensor) -> kv_cache_interface.KVCacheTensor: ...
@overload
def to_vllm(value: KVCacheGroupSpec) -> kv_cache_interface.KVCacheGroupSpec: ...
@overload
def to_vllm(value: KVCacheConfig) -> kv_cache_interface.KVCacheConfig: ...
def to_vllm(value: Any) -> Any:
    """vLLM's object with the content of ours; lists are copied.

    A field that the installed version lacks may stand at its default; ``dcp_sharded`` may also
    be ``True`` there, which is what the version does. A config's layout gets its canonical
    name.

    Args:
        value: a layout, spec, tensor, group or config of ours.

    Raises:
        UnsupportedError: an object of another class, or a field that the installed version
            lacks, or changes, and that is set; names the field, its value and the version.
    """
    if isinstance(value, KVCacheLayout):
        return VllmLayout[value.name]
    if isinstance(value, KVCacheSpec):
        return _spec(value, "spec")
    if isinstance(value, KVCacheTensor):
        return _build(_THEIRS.KVCacheTensor, value, {"layers": list(value.layers)}, "tensor")
    if isinstance(value, KVCacheGroupSpec):
        return _group(value, "group")
    if isinstance(value, KVCacheConfig):
        return _config(value)
    raise UnsupportedError(
        "value: expected a KVCacheLayout, KVCacheConfig, KVCacheGroupSpec, KVCacheTensor or a "
        f"spec of layout_core, got {type(value).__module__}.{type(value).__qualname__}"
    )


def _spec(spec: KVCacheSpec, where: str) -> Any:
    name = type(spec).__name__
    cls = getattr(_THEIRS, name, None)
    if cls is None or name not in SPEC_CLASSES:
        raise UnsupportedError(f"{where}: vLLM {vllm.__version__} has no {name}")
    changed: dict[str, Any] = {}
    if isinstance(spec, UniformTypeKVCacheSpecs):
        changed["kv_cache_specs"] = {
            layer: _spec(inner, f"{where} of layer {layer!r}")
            for layer, inner in spec.kv_cache_specs.items()
        }
    return _build(cls, spec, changed, where)


def _group(group: KVCacheGroupSpec, where: str) -> Any:
    changed = {
        "layer_names": list(group.layer_names),
        "kv_cache_spec": _spec(group.kv_cache_spec, f"{where}.kv_cache_spec"),
    }
    return _build(_THEIRS.KVCacheGroupSpec, group, changed, where)


def _config(config: KVCacheConfig) -> Any:
    changed: dict[str, Any] = {
        "kv_cache_tensors": [to_vllm(tensor) for tensor in config.kv_cache_tensors],
        "kv_cache_groups": [
            _group(group, f"config.kv_cache_groups[{index}]")
            for index, group in enumerate(config.kv_cache_groups)
        ],
    }
    if config.kv_cache_layout is not None:
        changed["kv_cache_layout"] = KVCacheLayout.parse(config.kv_cache_layout).name
    return _build(_THEIRS.KVCacheConfig, config, changed, "config")


def _build(cls: type[T], ours: Any, changed: Mapping[str, Any], where: str) -> T:
    """An object of vLLM's from the fields of ours, compared with them once it is made.

    Args:
        changed: fields whose values were converted already.
    """
    known = {item.name for item in fields(cls) if item.init}  # type: ignore[arg-type]
    values: dict[str, Any] = {}
    for item in fields(ours):
        value = changed[item.name] if item.name in changed else getattr(ours, item.name)
        if item.name in known:
            if item.name == "dcp_sharded" and value is None:
                continue  # ours says: the version's own rule
            values[item.name] = _value(value, f"{where}.{item.name}")
        elif not _says_nothing(item, value):
            raise UnsupportedError(
                f"{where}.{item.name}: vLLM {vllm.__version__} has no such field, expected "
                f"{None if item.default is MISSING else item.default!r}, got {value!r}"
            )
    made = cls(**values)
    for name, value in values.items():
        got = getattr(made, name)
        if not _same(got, value):
            raise UnsupportedError(
                f"{where}.{name}: vLLM {vllm.__version__} turns {value!r} into {got!r}"
            )
    return made


def _says_nothing(item: Field[Any], value: Any) -> bool:
    """Whether a field that a version lacks asks for nothing that the version does not do."""
    if item.name == "dcp_sharded":
        return value is not False
    return bool(value == item.default)


def _value(value: Any, where: str) -> Any:
    if isinstance(value, DType):
        return torch_dtype(value)
    if isinstance(value, KVQuantMode):
        modes = _THEIRS.KVQuantMode
        if value.name not in modes.__members__:
            raise UnsupportedError(
                f"{where}: vLLM {vllm.__version__} has no mode {value.name}, expected one of "
                f"{', '.join(modes.__members__)}"
            )
        return modes[value.name]
    if isinstance(value, MultipleOf):
        multiple: Any = VllmMultipleOf
        return multiple(value.base)
    return value


def _same(got: Any, value: Any) -> bool:
    if isinstance(value, VllmMultipleOf):  # before 0.32 it is equal to itself alone
        return isinstance(got, VllmMultipleOf) and got.base == value.base
    return bool(got == value)
