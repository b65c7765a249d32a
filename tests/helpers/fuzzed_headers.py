"""Headers with mistakes, given to what reads them."""

import random
from collections.abc import Callable, Sequence
from typing import Any

from fedspan.federation.protocol import Envelope


def fuzzed(seeds: list[str], count: int, openers: Sequence[Callable[[Envelope], Any]]) -> None:
    """Headers with pieces changed, dropped, doubled: a ValueError or a value, and nothing else."""
    rng = random.Random(0)
    alphabet = '{}[]":,0123456789eE.-+truefalsnNaIinity\\u\x00é'
    for _ in range(count):
        text = list(rng.choice(seeds))
        for _ in range(rng.randint(1, 6)):
            at = rng.randrange(len(text) + 1)
            if rng.random() < 0.4 and text:
                del text[min(at, len(text) - 1)]
            else:
                text.insert(at, rng.choice(alphabet))
        envelope = Envelope("".join(text), bytes(rng.randrange(256) for _ in range(rng.randrange(40))))
        for opened in openers:
            try:
                made = opened(envelope)
            except ValueError:
                continue
            assert made.to_envelope()
