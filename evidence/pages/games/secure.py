"""The update of one node under secure aggregation, by a server that lies and its colluders.

``tests/helpers/secure_game.py`` has the attacks: other stories for other nodes, other thresholds, keys, weights and
ranks, retries and further rounds with fewer nodes. What the server holds is solved for the vector of one honest node.
"""

import functools
from collections.abc import Iterator

import numpy as np
import torch

from fedspan.core.values import Message
from fedspan.federation.serialization import encode
from tests.helpers.secure_game import START, Game, Play, Story, compute_bound, list_attacks, list_lies


def play_secure(clients: int, mixtures: int, seed: int) -> Iterator[tuple[int, int, int]]:
    """Run all attacks, and random mixtures of three lies in each of three sessions, up to the bound on colluders.

    Yields:
        The number of colluders, of games, and of games in which the server has the vector of a node.
    """
    rng = np.random.default_rng(seed)
    for colluders in range(compute_bound(clients) + 1):
        names = list_attacks(("a", "b", "c"), 1)
        games = [Game(clients, colluders) for _ in range(len(names) + mixtures)]
        for name, game in zip(names, games, strict=False):
            for play in list_attacks(game.honest, colluders)[name]:
                game.play(play)
        for game in games[len(names) :]:
            lies = list_lies(game.honest, colluders)
            for chosen in rng.integers(len(lies), size=(3, 3)):
                game.play(functools.reduce(lambda play, lie, lies=lies: lies[lie](play), chosen, Play()))
        yield colluders, len(games), sum(bool(game.compute_score()) for game in games)


def play_differences(clients: int, is_fixed: bool) -> int:
    """Subtract sums over nearly equal models, as those of two rounds or of a retry, and return the opened vectors.

    Args:
        clients: Number of nodes, with equal weights; none colludes.
        is_fixed: Whether the owners allow sums of all nodes only (``limits.secure_clients``).
    """
    opened = 0
    for part in ("unknown", "silent", "dropped"):
        game = Game(clients, 0, min_clients=clients if is_fixed else 3)
        left_out = Story(weight=1.0, **{part: game.honest[:1]})
        for number, story in enumerate((Story(weight=1.0), left_out)):
            model = Message({name: torch.full_like(value, number * 1e-30) for name, value in START.items()})
            game.play(Play(story), encode(model))
        opened += bool(game.compute_score())
    return opened
