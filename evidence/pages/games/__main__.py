"""Games of privacy: what the operator of a server learns from nodes within the limits of their files.

    python -m evidence.pages.games --data PATH/banking77/train.csv --out FOLDER --game membership texts

Each score is what the attacker finds above what a guess from public texts finds, in points, over seeds.
"""

import argparse
import itertools
import json
from collections.abc import Callable, Mapping
from functools import cache, partial
from pathlib import Path

import numpy as np
import torch

from evidence.pages.games.costs import play_costs
from evidence.pages.games.handshake import measure_invitations, play_handshake
from evidence.pages.games.harness import PROTECTIONS, format_score, prepare_nodes, read_rows
from evidence.pages.games.head_statistics import play_statistics
from evidence.pages.games.heads import HEAD_PROTECTIONS, Heads, prepare_heads
from evidence.pages.games.membership import play_audit, play_membership
from evidence.pages.games.metrics import play_metrics
from evidence.pages.games.secure import play_differences, play_secure
from evidence.pages.games.texts import ORDERS, play_texts
from evidence.pages.games.updates import play_step
from fedspan.config.node import NodeLimits
from fedspan.files import write_atomic
from fedspan.tasks.task import get_labels

NODE = 1000
"""Examples of a node."""


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


def measure(args: argparse.Namespace, subject: str, play: Callable[[int], Mapping[str, float]]) -> None:
    """Play for each seed, unless its scores are stored, and print them: points, but for epsilon and seconds."""
    path = args.out / "scores.json"
    stored = json.loads(path.read_text()) if path.exists() else {}
    by_seed = stored.setdefault(subject, {})
    for seed in map(str, args.seeds):
        if seed not in by_seed:
            by_seed[seed] = play(int(seed))
            write_atomic(path, json.dumps(stored, indent=1).encode())
    for name in by_seed[str(args.seeds[0])]:
        scale = 1.0 if name in ("epsilon", "seconds") else 100.0
        scores = [by_seed[str(seed)][name] for seed in args.seeds]
        print(f"{subject}: {name} {format_score(scores, scale)}", flush=True)


def run_step(args: argparse.Namespace) -> None:
    """Candidate texts and labels from one step."""
    for protection in args.protections or PROTECTIONS:
        measure(
            args, f"step, {protection}", lambda seed, by=protection: play_step(read_rows(args.data, seed), by, seed)
        )


def run_texts(args: argparse.Namespace) -> None:
    """Texts word for word."""
    for protection in args.protections or PROTECTIONS:

        def play(seed: int, by: str = protection) -> Mapping[str, float]:
            return play_texts(read_rows(args.data, seed), by, seed, args.orders)

        measure(args, f"texts, {args.orders} orders, {protection}", play)


def build_heads(args: argparse.Namespace, protection: str) -> Callable[[], Heads]:
    """Return a function that prepares, once, nodes with the examples of training and test files."""
    rows = [*read_rows(args.data, 0), *read_rows(args.data.with_name("test.csv"), 0)]
    of_three = rows[: len(rows) // 3 * 3]
    return cache(lambda: prepare_heads(of_three, protection, args.out / "features.safetensors"))


def run_membership(args: argparse.Namespace) -> None:
    """Members from the model that one node, or five together, trained in the rounds of the head."""
    for protection in args.protections or HEAD_PROTECTIONS:
        heads = build_heads(args, protection)

        def play(seed: int, heads: Callable[[], Heads] = heads, by: str = protection) -> Mapping[str, float]:
            return play_membership(heads(), by, args.models, seed)

        measure(args, f"membership, {args.models} models, {protection}", play)


def run_audit(args: argparse.Namespace) -> None:
    """Members from one step of DP-SGD that an active server ordered, and what they show about epsilon."""
    measure(args, "audit of one step, dp-sgd", lambda seed: play_audit(read_rows(args.data, seed)[: 2 * NODE], seed))


def run_statistics(args: argparse.Namespace) -> None:
    """Members from the statistics of a head, which an owner opted in to."""
    heads = build_heads(args, "plain")
    measure(args, "statistics, exact", lambda seed: play_statistics(heads(), 4 * NODE, NODE, seed))


def run_secure(args: argparse.Namespace) -> None:
    """The update of one node under secure aggregation."""
    for clients in args.clients:
        for colluders, games, opened in play_secure(clients, args.mixtures, 0):
            print(f"{clients} nodes, {colluders} colluders: {opened} of {games} games", flush=True)
        for is_fixed in (False, True):
            opened, nodes = play_differences(clients, is_fixed), "all nodes only" if is_fixed else "3 nodes or more"
            print(f"{clients} nodes, sums of {nodes} over nearly equal models: {opened} of 3 games", flush=True)


def run_handshake(args: argparse.Namespace) -> None:
    """Labels from the answers to invitations, and the seconds that expensive ones take."""
    measure(args, "handshake", lambda seed: play_handshake(read_rows(args.data, seed), seed))
    for kind, seconds, is_refused in measure_invitations(read_rows(args.data, 0)):
        print(f"{kind}: {seconds:.1f} s{', refused' if is_refused else ''}", flush=True)


def run_costs(args: argparse.Namespace) -> None:
    """Accuracy and seconds of honest nodes."""
    for protection in args.protections or PROTECTIONS:
        heads = build_heads(args, protection)
        for case in itertools.product(args.nodes, args.examples):
            name = "costs, {}, {} nodes of {}".format(protection, *case)
            measure(args, name, partial(play_costs, heads, protection, *case))


GAMES: Mapping[str, Callable[[argparse.Namespace], None]] = {
    "metrics": run_metrics,
    "step": run_step,
    "texts": run_texts,
    "membership": run_membership,
    "audit": run_audit,
    "statistics": run_statistics,
    "secure": run_secure,
    "handshake": run_handshake,
    "costs": run_costs,
}


def main() -> None:
    """Play the games and print the scores."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="Banking77's train.csv")
    parser.add_argument("--out", type=Path, required=True, help="folder of stored scores and features")
    parser.add_argument("--game", nargs="+", choices=GAMES, default=list(GAMES))
    parser.add_argument("--seeds", type=int, nargs="+", default=list(range(5)))
    limits = NodeLimits()
    parser.add_argument("--evaluations", type=int, nargs="+", default=[limits.run_evaluations, limits.evaluations])
    parser.add_argument(
        "--epsilons", type=float, nargs="+", default=[1e-9, limits.evaluation_epsilon, 1.0], help="1e-9 is a guess"
    )
    parser.add_argument("--protections", nargs="+", choices=PROTECTIONS, help="default: all of the game")
    parser.add_argument("--orders", type=int, default=ORDERS, help="orders of the game texts")
    parser.add_argument("--models", type=int, default=32, help="models of the attacker of membership")
    parser.add_argument("--clients", type=int, nargs="+", default=[3, 5, 11], help="nodes of secure aggregation")
    parser.add_argument("--nodes", type=int, nargs="+", default=[3, 5, 10], help="honest nodes of costs")
    parser.add_argument("--examples", type=int, nargs="+", default=[50, 200, 1000], help="examples of each")
    parser.add_argument("--mixtures", type=int, default=10, help="random games of secure aggregation")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    for game in args.game:
        GAMES[game](args)


if __name__ == "__main__":
    main()
