"""Changing inputs at random, and what may come of it: an answer, or a FedspanError of one line."""

import copy
import json
import random
from collections.abc import Callable
from typing import Any

from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st

from fedspan.errors import FedspanError

SEEDS = st.integers(0, 2**32)
"""Seeds of what is changed in an input."""
_JUNK: tuple[Any, ...] = (
    *(None, True, False, 0, 1, -1, 2**31, 2**53, 2**63, 2**64, 10**30, 0.5, 1e308, -1e-320, float("nan"), float("inf")),
    *(
        "",
        "a",
        "x" * 300,
        "\x1b[31m",
        "\ud800",
        "\0",
        "train",
        "invite",
        "fedit",
        "../../etc",
        "1e9",
        [],
        {},
        [[]],
        [0],
    ),
    *({"a": 1}, [None], ["a", "a"], {"": {}}),
)
_BYTES = (b"\0", b"\xff", b"{", b"[" * 2000, b'"', b",", b"\n", b"9" * 400, b"\xed\xa0\x80", b"null", b"&a *a", b"...")


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


def mangled(data: bytes, draws: random.Random) -> bytes:
    """Some bytes changed, dropped, doubled or put in."""
    made = bytearray(data)
    for _ in range(draws.choice((1, 1, 2, 5))):
        at, kind = draws.randrange(len(made) + 1), draws.random()
        if kind < 0.35 and made:
            made[min(at, len(made) - 1)] ^= 1 << draws.randrange(8)
        elif kind < 0.55:
            del made[at : at + draws.choice((1, 1, 8, 100))]
        elif kind < 0.8:
            made[at:at] = draws.choice(_BYTES)
        else:
            start = draws.randrange(len(made) + 1)
            made[at:at] = made[start : start + 40]
    return bytes(made)


def changed(value: Any, draws: random.Random) -> Any:
    """A JSON value with something else at a few places in it."""
    value = json.loads(json.dumps(value))
    for _ in range(draws.choice((1, 1, 1, 2, 3))):
        places = list_places(value)
        if not places:
            return _junk(draws)
        container, key = draws.choice(places)
        kind = draws.random()
        if kind < 0.2:
            del container[key]
        elif kind < 0.35 and isinstance(container, dict):
            container[draws.choice(("", "extra", "task", "format", "x" * 300))] = _junk(draws)
        elif kind < 0.45 and isinstance(container, list):
            repeated = container[key]
            small = not isinstance(repeated, dict | list) or len(dumped(repeated)) < 200
            container.extend([repeated] * draws.choice((1, 3, 500 if small else 5)))
        elif kind < 0.5:
            nested = _junk(draws)
            for _ in range(draws.choice((3, 60, 3000))):
                nested = [nested]
            container[key] = nested
        else:
            container[key] = _junk(draws)
    return value


def _junk(draws: random.Random) -> Any:
    return copy.deepcopy(draws.choice(_JUNK))


def list_places(value: Any) -> list[tuple[Any, Any]]:
    """Every container in a value with each of its keys, to a depth of 30."""
    found: list[tuple[Any, Any]] = []
    level = [value]
    for _ in range(30):
        below: list[Any] = []
        for one in level:
            items = one.items() if isinstance(one, dict) else enumerate(one) if isinstance(one, list) else ()
            for key, inside in list(items)[:300]:
                found.append((one, key))
                below.append(inside)
        level = below
    return found


def dumped(value: Any) -> bytes:
    """JSON as a careless editor would leave it: NaN, half characters and all."""
    try:
        return json.dumps(value).encode(errors="surrogatepass")
    except RecursionError:
        return b"[" * 3000
