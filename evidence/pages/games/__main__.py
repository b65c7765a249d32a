"""Games of privacy: what the operator of a server learns from nodes within the limits of their files.

    python -m evidence.pages.games --data PATH/banking77/train.csv --game texts secure

Each score is what the attacker finds above what a guess from public texts finds, in points, over seeds.
"""

from __future__ import annotations

import argparse
import itertools
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np
import torch

from evidence.pages.games.harness import PROTECTIONS, Rows, format_score, prepare_nodes, read_rows
from evidence.pages.games.metrics import play_metrics
from evidence.pages.games.secure import play_secure
from evidence.pages.games.texts import play_texts
from evidence.pages.games.updates import play_step
from fedspan.config.node import NodeLimits
from fedspan.tasks.task import get_labels

NODE = 1000
"""Examples of the node whose metrics are released."""


def run_metrics(args: argparse.Namespace) -> None:
    """Candidates from noisy metrics."""
    rows, everything = read_rows(args.data, 0)[: 2 * NODE], np.arange(2 * NODE)
    node = prepare_nodes({}, rows, 2 * NODE, "plain", 0)
    features = node.engine.compute_features(None, node.train, everything, 64)
    labels = torch.from_numpy(get_labels(node.train, everything))
    for epsilon, evaluations in itertools.product(args.epsilons, args.evaluations):
        played = (node.task, evaluations, epsilon)
        scores = [play_metrics(features, labels, *played, seed) for seed in range(4 * len(args.seeds))]
        print(f"{evaluations} evaluations of epsilon {epsilon:g}: {format_score(scores)}", flush=True)


def run_by_protection(
    play: Callable[[Rows, str, int], Mapping[str, float]], args: argparse.Namespace, protections: Sequence[str]
) -> None:
    """Print the scores of a game over seeds, by protection."""
    for protection in protections:
        by_game = defaultdict[str, list[float]](list)
        for seed in args.seeds:
            for game, score in play(read_rows(args.data, seed), protection, seed).items():
                by_game[game].append(score)
        for game, scores in by_game.items():
            print(f"{game}, {protection}: {format_score(scores)}", flush=True)


def run_secure(args: argparse.Namespace) -> None:
    """The update of one node under secure aggregation."""
    for clients in (3, 5, 11):
        for colluders, games, opened in play_secure(clients, args.mixtures, 0):
            print(f"{clients} nodes, {colluders} colluders: {opened} of {games} games", flush=True)


GAMES: Mapping[str, Callable[[argparse.Namespace], None]] = {
    "metrics": run_metrics,
    "step": lambda args: run_by_protection(play_step, args, tuple(PROTECTIONS)),
    "texts": lambda args: run_by_protection(play_texts, args, ("plain",)),
    "secure": run_secure,
}


def main() -> None:
    """Play the games and print the scores."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="Banking77's train.csv")
    parser.add_argument("--game", nargs="+", choices=GAMES, default=list(GAMES))
    parser.add_argument("--seeds", type=int, nargs="+", default=list(range(5)))
    limits = NodeLimits()
    parser.add_argument("--evaluations", type=int, nargs="+", default=[limits.run_evaluations, limits.evaluations])
    parser.add_argument(
        "--epsilons", type=float, nargs="+", default=[1e-9, limits.evaluation_epsilon, 1.0], help="1e-9 is a guess"
    )
    parser.add_argument("--mixtures", type=int, default=10, help="random games of secure aggregation")
    args = parser.parse_args()
    for game in args.game:
        GAMES[game](args)


if __name__ == "__main__":
    main()
