"""Flower's simulation engine (Ray) with FedAvg and the ordinary client of its fine-tuning examples.

python peers_flower.py PLAN --actors 2 --threads 1
"""

from __future__ import annotations

import argparse
from typing import Any

from flwr.app import ArrayRecord, ConfigRecord, Context, MetricRecord, RecordDict
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg
from flwr.simulation import run_simulation
from peers_answers import Answers
from peers_common import Plan
from peers_flower_client import app


def sum_replies(records: list[RecordDict], weight: str) -> MetricRecord:
    """Of the replies: the mean loss over examples, their number, the seconds within local training."""
    metrics = [record["metrics"] for record in records]
    examples = sum(entry[weight] for entry in metrics)
    return MetricRecord(
        {
            "loss": sum(entry["loss"] * entry[weight] for entry in metrics) / examples,
            "examples": examples,
            "seconds": sum(entry["seconds"] for entry in metrics),
            "replies": len(metrics),
        }
    )


def serve(grid: Grid, plan: Plan, answers: Answers, args: argparse.Namespace) -> None:
    """A round whenever the driver asks."""
    nodes = len(plan.clients)
    strategy = FedAvg(
        fraction_evaluate=0.0,
        min_train_nodes=nodes,  # or the first round starts before all clients have connected
        min_available_nodes=nodes,
        train_metrics_aggr_fn=sum_replies,
    )
    arrays = ArrayRecord(plan.start)

    def run_round(round: int) -> dict[str, float]:
        nonlocal arrays
        config = {
            "plan": args.plan,
            "dtype": args.dtype,
            "attention": args.attention,
            "threads": args.threads,
            "round": round,
        }
        result = strategy.start(grid, arrays, num_rounds=1, train_config=ConfigRecord(config))
        arrays = result.arrays
        metrics: Any = result.train_metrics_clientapp[1]
        if metrics["replies"] != nodes:
            raise RuntimeError(f"{metrics['replies']} of {nodes} clients replied")
        return {
            "loss": metrics["loss"],
            "examples": metrics["examples"],
            "training": metrics["seconds"] / args.actors,
        }

    answers.serve(run_round, len(plan.settings["checked"]))


def main() -> None:
    """Serve the driver."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("plan")
    parser.add_argument("--actors", type=int, default=2)
    parser.add_argument("--threads", type=int, default=1, help="of each actor")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--attention", default="eager")
    args = parser.parse_args()
    answers, plan = Answers(), Plan(args.plan)
    server = ServerApp()

    @server.main()
    def run(grid: Grid, context: Context) -> None:
        serve(grid, plan, answers, args)

    run_simulation(
        server,
        app,
        len(plan.clients),
        backend_config={
            "client_resources": {"num_cpus": args.threads, "num_gpus": 0.0},
            "init_args": {"address": "local", "num_cpus": args.actors * args.threads, "include_dashboard": False},
        },
    )


if __name__ == "__main__":
    main()
