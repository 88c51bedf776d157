"""What a scheduler asks for: the rows of a request, their contexts, and how many rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from block_manager.legality import prefix_cache_legality
from block_manager.prefix_keys import PrefixDomain, PrefixFeature, prefix_keys, token_words
from layout_core.errors import RequestError
from layout_core.visibility import check_spans

DEFAULT_CACHE_NAMESPACE = "diffusion-primary-v1"


@dataclass(frozen=True, slots=True)
class DiffusionKVContext:
    """K/V outside a sequence: the keys of cross-attention, or of a reference image.

    Args:
        context_id: names it within its request; not empty. Rows that name the same context
            share its blocks.
        cache_role: which layers read it (see ``CacheGeometry.groups_of_role``); not empty.
        num_tokens: >= 1.
    """

    context_id: str
    cache_role: str
    num_tokens: int

    def __post_init__(self) -> None:
        for name in ("context_id", "cache_role"):
            value = getattr(self, name)
            if not isinstance(value, str) or not value:
                raise RequestError(f"context {name}: expected a non-empty string, got {value!r}")
        if type(self.num_tokens) is not int or self.num_tokens < 1:
            raise RequestError(
                f"context {self.context_id!r}: num_tokens: expected an int >= 1, "
                f"got {self.num_tokens!r}"
            )


@dataclass(frozen=True, eq=False, slots=True)
class DiffusionKVRequest:
    """One row of a request: a sequence ``[prefix | target | rest]`` of ``seq_len`` tokens.

    The prefix's K/V is computed once; the target's is rewritten at every denoise step.

    Args:
        request_id: names the row; unique among all rows of a manager, not empty.
        sequence_id: index of the row in its request (the CFG branch); >= 0.
        prefix_len: >= 0.
        target_len: >= 1; ``prefix_len + target_len <= seq_len``.
        seq_len: >= 1; the blocks reserved hold this many tokens.
        cache_token_ids: tokens of at least the prefix, or empty: then the row neither looks up
            nor publishes prefix blocks.
        mm_features: content behind placeholder tokens, sorted and disjoint, within
            ``seq_len``: :class:`PrefixFeature`, or vLLM's feature specs.
        cache_namespace: see :class:`PrefixDomain`.
        kv_contexts: contexts that the row reads, with unique ids.
        kv_transfer_params: not ``None``: the row's K/V is received from elsewhere, and is not
            readable before ``complete_transfer``.
        prompt_token_ids: carried for connectors; not read here.
        full_spans: half-open spans of full attention, sorted, disjoint, within ``seq_len``;
            ``None``: the layers' rule alone.
        lora_id, lora_scale, cache_salt, cfg_branch: see :class:`PrefixDomain`.

    Raises:
        RequestError: a field out of range, naming field, value and row.
        VisibilityError: malformed spans.
        PrefixCacheError: tokens that are no ints, a malformed domain or feature.
    """

    request_id: str
    sequence_id: int = field(kw_only=True)
    prefix_len: int = field(kw_only=True)
    target_len: int = field(kw_only=True)
    seq_len: int = field(kw_only=True)
    cache_token_ids: Sequence[int] = field(default=(), kw_only=True, repr=False)
    mm_features: Sequence[Any] = field(default=(), kw_only=True)
    cache_namespace: str = field(default=DEFAULT_CACHE_NAMESPACE, kw_only=True)
    kv_contexts: Sequence[DiffusionKVContext] = field(default=(), kw_only=True)
    kv_transfer_params: Mapping[str, Any] | None = field(default=None, kw_only=True)
    prompt_token_ids: Sequence[int] | None = field(default=None, kw_only=True, repr=False)
    full_spans: Sequence[tuple[int, int]] | None = field(default=None, kw_only=True)
    lora_id: str | int | None = field(default=None, kw_only=True)
    lora_scale: float = field(default=1.0, kw_only=True)
    cache_salt: str | None = field(default=None, kw_only=True)
    cfg_branch: str | int | None = field(default=None, kw_only=True)
    domain: PrefixDomain = field(init=False, repr=False)
    _words: bytes = field(init=False, repr=False)
    _keys: dict[int, list[bytes]] = field(init=False, repr=False, default_factory=dict)

    def __post_init__(self) -> None:
        if not isinstance(self.request_id, str) or not self.request_id:
            raise RequestError(f"request_id: expected a non-empty string, got {self.request_id!r}")
        where = f"row {self.request_id!r}"
        for name, least in (
            ("sequence_id", 0),
            ("prefix_len", 0),
            ("target_len", 1),
            ("seq_len", 1),
        ):
            value = getattr(self, name)
            if type(value) is not int or value < least:
                raise RequestError(f"{where}: {name}: expected an int >= {least}, got {value!r}")
        if self.prefix_len + self.target_len > self.seq_len:
            raise RequestError(
                f"{where}: prefix_len + target_len: expected at most seq_len {self.seq_len}, got "
                f"{self.prefix_len} + {self.target_len}"
            )
        tokens = self.cache_token_ids
        if not isinstance(tokens, tuple):
            tokens = tuple(tokens)
        if tokens and len(tokens) < self.prefix_len:
            raise RequestError(
                f"{where}: cache_token_ids: expected at least the {self.prefix_len} tokens of the "
                f"prefix, got {len(tokens)}"
            )
        contexts = tuple(self.kv_contexts)
        seen: set[str] = set()
        for context in contexts:
            if not isinstance(context, DiffusionKVContext):
                raise RequestError(
                    f"{where}: kv_contexts: expected DiffusionKVContext values, got {context!r}"
                )
            if context.context_id in seen:
                raise RequestError(
                    f"{where}: kv_contexts: context_id {context.context_id!r} stands twice"
                )
            seen.add(context.context_id)
        features = tuple(_as_feature(each) for each in self.mm_features)
        previous = 0
        for feature in features:
            if feature.offset < previous or feature.end > self.seq_len:
                raise RequestError(
                    f"{where}: mm_features: {feature.identifier!r} at [{feature.offset}, "
                    f"{feature.end}): expected sorted, disjoint positions within {self.seq_len}"
                )
            previous = feature.end
        spans = self.full_spans
        if spans is not None:
            check_spans(spans, self.seq_len, where=f"{where}: full_spans")
            spans = tuple((a, b) for a, b in spans)
        put = object.__setattr__  # the one way to normalise a frozen dataclass
        put(self, "cache_token_ids", tokens)
        put(self, "kv_contexts", contexts)
        put(self, "mm_features", features)
        put(self, "full_spans", spans)
        put(self, "_words", token_words(tokens, where=f"{where}: cache_token_ids"))
        put(
            self,
            "domain",
            PrefixDomain(
                self.cache_namespace,
                self.lora_id,
                self.lora_scale,
                self.cache_salt,
                self.cfg_branch,
            ),
        )

    def keys(self, hash_block_size: int) -> list[bytes]:
        """Prefix keys of the full blocks of the prefix; computed once. Empty without tokens.

        Raises:
            PrefixCacheError: the row's spans let the prefix see the target (section "legality"
                of :mod:`block_manager.legality`), so its K/V is no reusable prefix.
        """
        if not self.cache_token_ids:
            return []
        keys = self._keys.get(hash_block_size)
        if keys is None:
            if self.full_spans is not None:
                prefix_cache_legality(
                    self.full_spans,
                    self.prefix_len,
                    seq_len=self.seq_len,
                    where=f"row {self.request_id!r}",
                ).require()
            keys = prefix_keys(
                self._words,
                hash_block_size,
                self.domain,
                num_tokens=self.prefix_len,
                features=self.mm_features,
                spans=self.full_spans,
            )
            self._keys[hash_block_size] = keys
        return keys


def _as_feature(feature: Any) -> PrefixFeature:
    """Ours, or vLLM's ``MultiModalFeatureSpec`` by attribute."""
    if isinstance(feature, PrefixFeature):
        return feature
    position = getattr(feature, "mm_position", None)
    if position is None or not hasattr(feature, "identifier"):
        raise RequestError(
            "mm_features: expected PrefixFeature values, or objects with identifier and "
            f"mm_position, got {feature!r}"
        )
    return PrefixFeature(feature.identifier, position.offset, position.length)


def cfg_rows(guidance_scale: float, *, branches: int = 2, cfg_parallel_size: int = 1) -> int:
    """Rows that one rank holds for one request: what sizing and admission charge.

    Guidance of at most 1 leaves the conditional branch alone, so one row. Above it there is a
    row for each branch, spread over the CFG-parallel ranks; the fullest rank counts.

    Args:
        guidance_scale: classifier-free guidance.
        branches: rows that guidance above 1 needs; >= 1.
        cfg_parallel_size: ranks that share the branches; in ``[1, branches]``.
    """
    if type(branches) is not int or branches < 1:
        raise RequestError(f"branches: expected an int >= 1, got {branches!r}")
    if type(cfg_parallel_size) is not int or not 1 <= cfg_parallel_size <= branches:
        raise RequestError(
            f"cfg_parallel_size: expected an int in [1, {branches}], got {cfg_parallel_size!r}"
        )
    if guidance_scale != guidance_scale:
        raise RequestError(f"guidance_scale: expected a number, got {guidance_scale!r}")
    if guidance_scale <= 1:
        return 1
    return -(-branches // cfg_parallel_size)
