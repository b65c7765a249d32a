"""Games of privacy: what the operator of a server learns from nodes within the limits of their files.

    python -m evidence.pages.games --data PATH/banking77/train.csv --game membership texts

Each score is what the attacker finds above what a guess from public texts finds, in points, over seeds.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

import numpy as np
import torch

from evidence.pages.games.costs import play_costs, time_round
from evidence.pages.games.handshake import play_handshake
from evidence.pages.games.harness import PROTECTIONS, Rows, format_score, prepare_nodes, read_rows
from evidence.pages.games.head_statistics import play_statistics
from evidence.pages.games.heads import prepare_heads
from evidence.pages.games.membership import SUMMED, play_audit, play_membership
from evidence.pages.games.metrics import play_metrics
from evidence.pages.games.secure import play_secure
from evidence.pages.games.texts import ORDERS, play_texts
from evidence.pages.games.updates import play_step
from fedspan.config.node import NodeLimits
from fedspan.tasks.task import get_labels

NODE = 1000
"""Examples of a node."""
NODE_PROTECTIONS = ("plain", "secure", "local", "dp-sgd")
"""Protections of a node's reply; under central privacy the server has it in plaintext, or their sum."""


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
    play: Callable[[Rows, str, int], Mapping[str, float]], args: argparse.Namespace, *protections: str
) -> None:
    """Print the scores of a game over seeds, by protection."""
    for protection in args.protections or protections:
        print_scores(protection, [play(read_rows(args.data, seed), protection, seed) for seed in args.seeds])


def print_scores(protection: str, scores: Sequence[Mapping[str, float]]) -> None:
    """Print scores over seeds by name: points, but for epsilon and seconds."""
    for name in scores[0]:
        scale = 1.0 if name in ("epsilon", "seconds") else 100.0
        print(f"{name}, {protection}: {format_score([score[name] for score in scores], scale)}", flush=True)


def read_all(args: argparse.Namespace) -> Rows:
    """Read the examples of training and test files, as many as three nodes may share."""
    rows = [*read_rows(args.data, 0), *read_rows(args.data.with_name("test.csv"), 0)]
    return rows[: len(rows) // 3 * 3]


def run_membership(args: argparse.Namespace) -> None:
    """Members from the model that one node, or five together, trained in the rounds of the head."""
    for protection in args.protections or SUMMED:
        heads = prepare_heads(read_all(args), protection, args.cache)
        print_scores(protection, [play_membership(heads, protection, args.models, seed) for seed in args.seeds])


def run_audit(args: argparse.Namespace) -> None:
    """Members from one step of DP-SGD that an active server ordered, and what they show about epsilon."""
    run_by_protection(lambda rows, _, seed: play_audit(rows[: 2 * NODE], args.runs, seed), args, "dp-sgd")


def run_costs(args: argparse.Namespace) -> None:
    """Accuracy and seconds of honest runs."""
    for protection in args.protections or SUMMED:
        heads = prepare_heads(read_all(args), protection, args.cache)
        for nodes, examples in itertools.product((3, 5, 10), (50, 200, NODE)):
            subject = f"{nodes} nodes of {examples}, {protection}"
            print_scores(subject, [play_costs(heads, nodes, examples, seed) for seed in args.seeds])
            print_scores(subject, [time_round(heads, nodes, examples, args.seeds[0])])


def run_statistics(args: argparse.Namespace) -> None:
    """Members from the statistics of a head, which an owner opted in to."""
    heads = prepare_heads(read_all(args), "plain", args.cache)
    scores = [play_statistics(heads.features, heads.labels, 4 * NODE, NODE, seed) for seed in args.seeds]
    print(f"members from exact statistics: {format_score(scores)}", flush=True)


def run_handshake(args: argparse.Namespace) -> None:
    """Labels of a node from its answers to invitations."""
    scores = [play_handshake(read_rows(args.data, seed), seed) for seed in args.seeds]
    print(f"labels from the handshake: {format_score(scores)}", flush=True)


def run_secure(args: argparse.Namespace) -> None:
    """The update of one node under secure aggregation."""
    for clients in args.clients:
        for colluders, games, opened in play_secure(clients, args.mixtures, 0):
            print(f"{clients} nodes, {colluders} colluders: {opened} of {games} games", flush=True)


GAMES: Mapping[str, Callable[[argparse.Namespace], None]] = {
    "metrics": run_metrics,
    "step": lambda args: run_by_protection(play_step, args, *NODE_PROTECTIONS),
    "texts": lambda args: run_by_protection(partial(play_texts, orders=args.orders), args, *NODE_PROTECTIONS),
    "membership": run_membership,
    "audit": run_audit,
    "statistics": run_statistics,
    "handshake": run_handshake,
    "secure": run_secure,
    "costs": run_costs,
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
    parser.add_argument("--protections", nargs="+", choices=PROTECTIONS, help="default: all of the game")
    parser.add_argument("--orders", type=int, default=ORDERS, help="orders of the game texts")
    parser.add_argument("--cache", type=Path, help="file of the features for membership, statistics and costs")
    parser.add_argument("--models", type=int, default=32, help="models of the attacker of membership")
    parser.add_argument("--runs", type=int, default=4, help="runs of a seed of the audit")
    parser.add_argument("--clients", type=int, nargs="+", default=[3, 5, 11], help="nodes of secure aggregation")
    parser.add_argument("--mixtures", type=int, default=10, help="random games of secure aggregation")
    args = parser.parse_args()
    for game in args.game:
        GAMES[game](args)


if __name__ == "__main__":
    main()
