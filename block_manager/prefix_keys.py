"""Keys of finished prefix blocks: chained SHA-256 hashes, tagged by everything K/V depends on.

The root of a chain is the hash of the domain (model, LoRA, salt, CFG branch). A block that
features or full spans touch ends a link: its key is the hash of the key before it, its tokens,
and all of those, a span with all that it holds, in later blocks too. The key of any other block
is the hash of the key that its link starts from and all tokens since, so that it costs one
update of a running hash. Either way it is all that the block's K/V depends on. All inputs are
framed by type and length, so that no two different inputs give one message; integers are
little-endian, so that keys are the same in every process and on every machine.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from hashlib import sha256
from struct import Struct, error, pack, unpack
from sys import byteorder

from layout_core.errors import PrefixCacheError
from layout_core.visibility import Spans

# Three kinds of message. A root's and a touched block's start with these texts, any other's with
# the 32 bytes of a key, which no one can make equal to a text. After the key come blocks of
# block_size tokens of 8 bytes: exactly one and its framed extras, or one and more without. All but
# the extras at the end have a fixed length, given the root, which frames block_size.
_ROOT = b"pagestride prefix keys, version 2"
_TOUCHED = b"pagestride prefix keys, version 2, touched block"

Framed = str | bytes | int | float | bool | None


def frame(values: Iterable[Framed]) -> bytes:
    """One message from typed values: no two different lists give the same bytes.

    Each value is a type byte, its length in bytes (4, little-endian) and its bytes. ``1``,
    ``1.0``, ``True``, ``"1"`` and ``None`` all differ.
    """
    out = bytearray()
    for value in values:
        if value is None:
            kind, data = b"n", b""
        elif isinstance(value, bool):
            kind, data = b"t", b"\1" if value else b"\0"
        elif isinstance(value, int):
            kind = b"i"
            data = value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True)
        elif isinstance(value, float):
            kind, data = b"f", pack("<d", value)
        elif isinstance(value, str):
            kind, data = b"s", value.encode()
        else:
            kind, data = b"b", bytes(value)
        out += kind + pack("<I", len(data)) + data
    return bytes(out)


@dataclass(frozen=True, slots=True)
class PrefixDomain:
    """What K/V of equal tokens may differ by. Rows of unequal domains never share a block.

    Args:
        namespace: model, revision, and whatever else the caller keeps apart; not empty.
        lora_id: adapter, or ``None``.
        lora_scale: its scale; finite.
        salt: tenant or isolation salt, or ``None``.
        cfg_branch: branch of classifier-free guidance, where the branch itself (not only its
            prompt) enters the transformer; ``None`` lets branches with equal prompts share.
    """

    namespace: str = "diffusion-primary-v1"
    lora_id: str | int | None = None
    lora_scale: float = 1.0
    salt: str | None = None
    cfg_branch: str | int | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.namespace, str) or not self.namespace:
            raise PrefixCacheError(
                f"namespace: expected a non-empty string, got {self.namespace!r}"
            )
        if not math.isfinite(self.lora_scale):
            raise PrefixCacheError(f"lora_scale: expected a finite number, got {self.lora_scale!r}")
        for name, kinds in (("lora_id", (str, int)), ("salt", (str,)), ("cfg_branch", (str, int))):
            value = getattr(self, name)
            if value is not None and type(value) not in kinds:
                names = " or ".join(kind.__name__ for kind in kinds)
                raise PrefixCacheError(f"{name}: expected None, {names}, got {value!r}")


@dataclass(frozen=True, slots=True)
class PrefixFeature:
    """Content that placeholder tokens stand for (an image): positions ``[offset, end)``.

    ``identifier`` names the content: equal content, equal identifier; not empty.
    """

    identifier: str
    offset: int
    length: int

    def __post_init__(self) -> None:
        if not isinstance(self.identifier, str) or not self.identifier:
            raise PrefixCacheError(
                f"feature.identifier: expected a non-empty string, got {self.identifier!r}"
            )
        if self.offset < 0 or self.length < 1:
            raise PrefixCacheError(
                f"feature {self.identifier!r}: expected offset >= 0 and length >= 1, got "
                f"offset={self.offset}, length={self.length}"
            )

    @property
    def end(self) -> int:
        """First position after the feature."""
        return self.offset + self.length


def token_words(token_ids: Sequence[int], *, where: str = "token_ids") -> bytes:
    """Token ids as 8 bytes each, little-endian: what keys are computed from.

    Raises:
        PrefixCacheError: a token that is no int of at most 64 bits; the first one is named.
    """
    if byteorder == "little":
        try:
            # the fast way, if none is negative; a Struct takes a tuple without copying it
            raw = Struct(f"{len(token_ids)}Q").pack(*token_ids)
        except error:
            raw = b"\xff" * 8
        if raw[7::8].isascii():  # no top bit: every id is below 2**63
            return raw
    try:
        return pack(f"<{len(token_ids)}q", *token_ids)
    except error:
        for index, token in enumerate(token_ids):
            if not isinstance(token, int) or not -(2**63) <= token < 2**63:
                raise PrefixCacheError(
                    f"{where}[{index}]: expected an int of at most 64 bits, got {token!r}"
                ) from None
        raise


def prefix_keys(
    token_ids: Sequence[int] | bytes,
    block_size: int,
    domain: PrefixDomain,
    *,
    num_tokens: int | None = None,
    features: Sequence[PrefixFeature] = (),
    spans: Spans | None = None,
) -> list[bytes]:
    """Keys of the full blocks of ``token_ids[:num_tokens]``, 32 bytes each.

    Key ``i`` stands for the whole prefix of ``(i + 1) * block_size`` tokens: two rows with
    equal key ``i`` have equal tokens, features and spans there, an equal domain, and equal
    content of every span that begins there, up to its end.

    Args:
        token_ids: tokens, or what :func:`token_words` made of them.
        block_size: tokens of one key; >= 1.
        domain: what else K/V depends on.
        num_tokens: tokens to key; all by default.
        features: sorted and disjoint.
        spans: full spans, sorted and disjoint, or ``None`` where the row has no span list. The
            tokens of a span that begins in a keyed block must be given up to its end.
    """
    if block_size < 1:
        raise PrefixCacheError(f"block_size: expected >= 1, got {block_size}")
    data = token_ids if isinstance(token_ids, bytes) else token_words(token_ids)
    count = len(data) // 8 if num_tokens is None else num_tokens
    if not 0 <= count <= len(data) // 8:
        raise PrefixCacheError(
            f"num_tokens: expected at most the {len(data) // 8} of token_ids, got {count}"
        )
    previous = 0
    for index, feature in enumerate(features):
        if feature.offset < previous:
            raise PrefixCacheError(
                f"features[{index}]: {feature.identifier!r} starts at {feature.offset}, inside or "
                f"before one that ends at {previous}; expected sorted, disjoint positions"
            )
        previous = feature.end
    key = sha256(
        _ROOT
        + frame(
            (
                block_size,
                domain.namespace,
                domain.lora_id,
                float(domain.lora_scale),
                domain.salt,
                domain.cfg_branch,
                spans is None,
            )
        )
    ).digest()
    num_blocks = count // block_size
    step = 8 * block_size
    parts = unpack(f"{step}s" * num_blocks, data[: num_blocks * step])
    extras = _block_extras(data, num_blocks, block_size, features, spans or ())
    keys: list[bytes] = []
    start = 0
    for touched in (*sorted(extras), num_blocks):
        link = sha256(key)
        append, update, digest = keys.append, link.update, link.digest
        for part in parts[start:touched]:
            update(part)
            append(digest())
        if touched < num_blocks:
            before = keys[-1] if keys else key
            key = sha256(_TOUCHED + before + parts[touched] + extras[touched]).digest()
            append(key)
        start = touched + 1
    return keys


def _block_extras(
    data: bytes,
    num_blocks: int,
    block_size: int,
    features: Sequence[PrefixFeature],
    spans: Spans,
) -> dict[int, bytes]:
    """For each block that a feature or a span touches, their framed descriptions.

    Positions in a full span see all of it, also what lies in later blocks. So the description
    of a span holds a digest of everything in it, and stands in every block that it touches.
    """
    touching: dict[int, list[Framed]] = {}

    def describe(start: int, end: int, values: tuple[Framed, ...]) -> None:
        for index in range(start // block_size, min(-(-end // block_size), num_blocks)):
            touching.setdefault(index, []).extend(values)

    for feature in features:
        describe(feature.offset, feature.end, _describe_feature(feature))
    for start, end in spans:
        if start >= num_blocks * block_size:
            break
        if end > len(data) // 8:
            raise PrefixCacheError(
                f"spans: [{start}, {end}) ends past the {len(data) // 8} tokens given, and its "
                "first tokens cannot be keyed without its last"
            )
        inside = [
            value
            for feature in features
            if feature.offset < end and feature.end > start
            for value in _describe_feature(feature)
        ]
        content = sha256(data[8 * start : 8 * end] + frame(inside)).digest()
        describe(start, end, ("span", start, end, content))
    return {index: frame(values) for index, values in touching.items()}


def _describe_feature(feature: PrefixFeature) -> tuple[Framed, ...]:
    return ("feature", feature.identifier, feature.offset, feature.length)


def group_key(key: bytes, group: int) -> bytes:
    """The key of one group's block: groups hold different bytes for equal tokens."""
    return key if group == 0 else key + group.to_bytes(4, "little")
