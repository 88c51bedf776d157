"""Prefix keys: equal keys mean equal K/V, in every process."""

from __future__ import annotations

import subprocess
import sys
from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from block_manager import PrefixCacheError, PrefixDomain, PrefixFeature, prefix_keys
from block_manager.prefix_keys import frame, group_key, token_words

TOKENS = tuple(range(100, 116))
PLAIN = PrefixDomain()


def test_one_key_for_each_full_block() -> None:
    keys = prefix_keys(TOKENS[:15], 4, PLAIN)
    assert len(keys) == 3
    assert {len(key) for key in keys} == {32}
    assert keys == prefix_keys(TOKENS, 4, PLAIN, num_tokens=15)
    assert keys == prefix_keys(list(TOKENS), 4, PLAIN)[:3]


def test_keys_are_chained() -> None:
    other = (99, *TOKENS[1:])
    assert not set(prefix_keys(TOKENS, 4, PLAIN)) & set(prefix_keys(other, 4, PLAIN))


DOMAINS = {
    "plain": PLAIN,
    "namespace": PrefixDomain("model-b"),
    "lora": PrefixDomain(lora_id="style"),
    "lora by number": PrefixDomain(lora_id=1),
    "lora scale": PrefixDomain(lora_id="style", lora_scale=0.5),
    "salt": PrefixDomain(salt="tenant"),
    "salt that looks like the lora": PrefixDomain(salt="style"),
    "branch": PrefixDomain(cfg_branch="negative"),
    "branch by number": PrefixDomain(cfg_branch=1),
    "branch 0": PrefixDomain(cfg_branch=0),
    "empty salt": PrefixDomain(salt=""),
}


def test_every_domain_has_keys_of_its_own() -> None:
    # W5: vllm#44706
    found = {name: set(prefix_keys(TOKENS, 4, domain)) for name, domain in DOMAINS.items()}
    for a, b in combinations(found, 2):
        assert not found[a] & found[b], (a, b)


def test_image_content_and_spans_change_the_keys_from_their_first_block_on() -> None:
    # W5: the same placeholder tokens stand for another image, or attend otherwise
    one = prefix_keys(TOKENS, 4, PLAIN, features=[PrefixFeature("sha:one", 5, 4)])
    two = prefix_keys(TOKENS, 4, PLAIN, features=[PrefixFeature("sha:two", 5, 4)])
    assert one[0] == two[0]
    assert not set(one[1:]) & set(two[1:])
    spans = prefix_keys(TOKENS, 4, PLAIN, spans=[(5, 9)])
    wider = prefix_keys(TOKENS, 4, PLAIN, spans=[(5, 10)])
    assert spans[0] == wider[0]
    assert not set(spans[1:]) & set(wider[1:])
    assert prefix_keys(TOKENS, 4, PLAIN, spans=[]) != prefix_keys(TOKENS, 4, PLAIN)


def test_a_block_in_a_span_is_keyed_by_the_whole_span() -> None:
    # tokens 4 to 9 see each other: block 1 holds other K/V where token 9 or its image differs
    spans, other = [(4, 10)], (*TOKENS[:9], 7, *TOKENS[10:])
    one, two = (prefix_keys(t, 4, PLAIN, spans=spans) for t in (TOKENS, other))
    assert one[0] == two[0]
    assert one[1] != two[1]
    assert prefix_keys(TOKENS, 4, PLAIN)[1] == prefix_keys(other, 4, PLAIN)[1]
    a, b = (
        prefix_keys(TOKENS, 4, PLAIN, spans=spans, features=[PrefixFeature(name, 8, 2)])
        for name in ("sha:one", "sha:two")
    )
    assert a[0] == b[0]
    assert a[1] != b[1]
    with pytest.raises(PrefixCacheError, match=r"spans: \[4, 10\) ends past the 8 tokens given"):
        prefix_keys(TOKENS[:8], 4, PLAIN, spans=spans)
    assert len(prefix_keys(TOKENS[:8], 4, PLAIN, spans=[(8, 12)])) == 2


def test_a_moved_image_changes_the_keys() -> None:
    here = prefix_keys(TOKENS, 4, PLAIN, features=[PrefixFeature("sha", 4, 4)])
    there = prefix_keys(TOKENS, 4, PLAIN, features=[PrefixFeature("sha", 5, 3)])
    assert here[1] != there[1]


_alike = st.tuples(  # few tokens and images, so that two rows often share a beginning
    st.lists(st.integers(0, 1), min_size=8, max_size=8),
    st.lists(st.tuples(st.integers(0, 7), st.sampled_from("ab")), max_size=3).map(
        lambda found: [PrefixFeature(name, at, 1) for at, name in sorted(dict(found).items())]
    ),
)


@given(_alike, _alike, st.integers(1, 4))
def test_keys_are_equal_exactly_where_everything_up_to_them_is(
    one: tuple[list[int], list[PrefixFeature]],
    two: tuple[list[int], list[PrefixFeature]],
    size: int,
) -> None:
    # also with blocks that features touch and blocks that none does, one after another
    a, b = (prefix_keys(tokens, size, PLAIN, features=images) for tokens, images in (one, two))
    for index, (left, right) in enumerate(zip(a, b)):
        end = (index + 1) * size
        (x, y), (u, v) = (
            (tokens[:end], [image for image in images if image.offset < end])
            for tokens, images in (one, two)
        )
        assert (left == right) == (x == u and y == v)
    assert len({*a, *b}) == len(a) + len(b) - sum(map(bytes.__eq__, a, b))


def test_groups_have_keys_of_their_own() -> None:
    key = prefix_keys(TOKENS, 4, PLAIN)[0]
    assert len({group_key(key, group) for group in range(4)}) == 4


_values = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(allow_nan=False),
    st.text(max_size=4),
    st.binary(max_size=4),
)


def _typed(values: list[object]) -> list[tuple[str, str]]:
    return [(type(value).__name__, repr(value)) for value in values]


@given(st.lists(_values, max_size=5), st.lists(_values, max_size=5))
def test_framing_is_injective(a: list[object], b: list[object]) -> None:
    assert (frame(a) == frame(b)) == (_typed(a) == _typed(b))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("a", "b"),
    [(("ab", "c"), ("a", "bc")), ((1,), (True,)), (("1",), (1,)), ((None,), ("",)), ((), (None,))],
)
def test_framing_of_classic_collisions(a: tuple[str, ...], b: tuple[str, ...]) -> None:
    assert frame(a) != frame(b)


GOLDEN = "1220220dd9659407fef75b281933c5acc53d1c53d5b43c54b0bbc42e9fb9b0b2"


def test_keys_are_the_same_in_every_process_and_version() -> None:
    domain = PrefixDomain("golden", lora_id="a", lora_scale=0.5, salt="s", cfg_branch=1)
    features = [PrefixFeature("img", 2, 3)]
    keys = prefix_keys(TOKENS, 4, domain, features=features, spans=[(2, 5)])
    assert keys[-1].hex() == GOLDEN
    code = (
        "from block_manager import *\n"
        "d = PrefixDomain('golden', lora_id='a', lora_scale=0.5, salt='s', cfg_branch=1)\n"
        f"print(prefix_keys({TOKENS}, 4, d, features=[PrefixFeature('img', 2, 3)], "
        "spans=[(2, 5)])[-1].hex())"
    )
    for seed in ("0", "1"):
        out = subprocess.run(
            [sys.executable, "-c", code],
            capture_output=True,
            text=True,
            check=True,
            env={"PYTHONHASHSEED": seed, "PYTHONPATH": ":".join(sys.path)},
        )
        assert out.stdout.strip() == GOLDEN


@given(st.lists(st.integers(-(2**63), 2**63 - 1), max_size=20))
def test_tokens_are_packed_as_signed_little_endian_words(tokens: list[int]) -> None:
    expected = b"".join(token.to_bytes(8, "little", signed=True) for token in tokens)
    assert token_words(tokens) == expected


@pytest.mark.parametrize(
    ("tokens", "kwargs", "message"),
    [
        ((1, 2.5), {}, r"token_ids\[1\]: expected an int of at most 64 bits, got 2.5"),
        ((1, 2**63), {}, r"token_ids\[1\]: expected an int of at most 64 bits"),
        ((1, 2), {"num_tokens": 3}, "num_tokens: expected at most the 2 of token_ids, got 3"),
        (
            TOKENS,
            {"features": [PrefixFeature("b", 4, 4), PrefixFeature("a", 6, 1)]},
            r"features\[1\]: 'a' starts at 6, inside or before one that ends at 8",
        ),
    ],
)
def test_what_cannot_be_keyed_raises(
    tokens: tuple[int, ...], kwargs: dict[str, object], message: str
) -> None:
    with pytest.raises(PrefixCacheError, match=message):
        prefix_keys(tokens, 4, PLAIN, **kwargs)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"namespace": ""}, "namespace: expected a non-empty string"),
        ({"lora_scale": float("nan")}, "lora_scale: expected a finite number, got nan"),
        ({"salt": 3}, "salt: expected None, str, got 3"),
        ({"cfg_branch": 1.0}, "cfg_branch: expected None, str or int, got 1.0"),
    ],
)
def test_a_malformed_domain_raises(kwargs: dict[str, object], message: str) -> None:
    with pytest.raises(PrefixCacheError, match=message):
        PrefixDomain(**kwargs)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("identifier", "offset", "length"), [("", 0, 1), ("x", -1, 1), ("x", 0, 0)]
)
def test_a_malformed_feature_raises(identifier: str, offset: int, length: int) -> None:
    with pytest.raises(PrefixCacheError, match="feature"):
        PrefixFeature(identifier, offset, length)
