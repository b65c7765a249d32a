"""The update of one node under secure aggregation, by a server that lies and its colluders.

``tests/helpers/secure_game.py`` has the attacks: other stories for other nodes, other thresholds, keys, weights and
ranks, retries and further rounds with fewer nodes. What the server holds is solved for the vector of one honest node.
"""

import functools
from collections.abc import Iterator

import numpy as np

from tests.helpers.secure_game import Game, Play, compute_bound, list_attacks, list_lies


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
