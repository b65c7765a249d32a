"""Changing inputs at random, and what may come of it: an answer, or a FedspanError of one line."""

import copy
import json
from collections.abc import Callable
from typing import Any

from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st

from fedspan.errors import FedspanError

HUGE = "an int of thousands of digits"  # stands for one, as Hypothesis cannot print such
WORDS = st.sampled_from(
    [HUGE, "", "label", "text", "a", "null", "x\ud800", "é", "\0", "{", "[a](", "1e9", "good.csv", "loss"]
)
NUMBER = st.sampled_from([-1, 0, 1, 3, 2**31, 2**63, 10**30, -0.5, 0.3, 1e308, float("inf"), float("nan")])
SCALAR = st.none() | st.booleans() | st.integers() | NUMBER | WORDS | st.text(max_size=9)
JUNK = st.recursive(
    SCALAR, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(WORDS, inner, max_size=3), max_leaves=6
)
DEEP = st.integers(50, 150).map(lambda depth: json.loads("[" * depth + "]" * depth))
CHANGE = st.tuples(st.integers(0, 10**6), st.sampled_from(["set", "drop", "add"]), JUNK | DEEP, WORDS)
CHANGES = st.lists(CHANGE, min_size=1, max_size=3)
CUTS = st.lists(
    st.tuples(
        st.integers(0, 10**6), st.integers(0, 12), st.binary(max_size=6) | st.sampled_from([b'"', b",", b"\n", b"\xff"])
    ),
    max_size=4,
)


def fuzz(cases: int) -> Callable[[Any], Any]:
    """The same cases every time, and none that is remembered."""
    return settings(
        max_examples=cases,
        deadline=None,
        phases=(Phase.explicit, Phase.generate),
        derandomize=True,
        database=None,
        suppress_health_check=list(HealthCheck),
    )


def answered(call: Callable[[], object]) -> object:
    """What comes out, or None for a FedspanError of one line; anything else fails the test."""
    try:
        return call()
    except FedspanError as error:
        refusal = error
    assert str(refusal).splitlines() == [str(refusal)]
    assert str(refusal).encode()
    assert refusal.field
    return None


def places(value: Any) -> list[tuple[Any, Any]]:
    """Every container in a value with each of its keys."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    found: list[tuple[Any, Any]] = []
    for key, inside in list(items):
        found += [(value, key), *places(inside)]
    return found


def changed(value: Any, changes: list[tuple[int, str, Any, str]]) -> Any:
    """A value with something else at a few places in it."""
    value = copy.deepcopy(value)
    for number, what, junk, name in changes:
        junk = 16**5000 if junk == HUGE else copy.deepcopy(junk)
        there = places(value)
        if not there:
            return junk
        container, key = there[number % len(there)]
        if what == "drop":
            del container[key]
        elif what == "add" and isinstance(container, dict):
            container[name] = junk
        else:
            container[key] = junk
    return value


def mangled(content: bytes, cuts: list[tuple[int, int, bytes]]) -> bytes:
    """Bytes with a few of them replaced."""
    for at, length, new in cuts:
        at %= len(content) + 1
        content = content[:at] + new + content[at + length :]
    return content


def as_json(value: Any) -> bytes:
    """JSON as a careless editor would leave it: NaN, half characters and all."""
    try:
        return json.dumps(value).encode()
    except ValueError:  # an int of thousands of digits
        return b'{"a": ' + b"9" * 5000 + b"}"
