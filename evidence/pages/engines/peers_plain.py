"""Centralized fine-tuning: PEFT and a PyTorch loop over everybody's examples.

python peers_plain.py PLAN --dtype float32 --order shuffled
"""

from __future__ import annotations

import argparse

import torch
from peers_answers import Answers
from peers_common import Plan, build_model, load_start, train


def main() -> None:
    """Serve the driver."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("plan")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--order", choices=("shuffled", "bucketed"), default="shuffled")
    parser.add_argument("--attention", default="eager")
    args = parser.parse_args()
    answers, plan = Answers(), Plan(args.plan)
    torch.set_num_threads(plan.settings["threads"])
    model = build_model(plan, getattr(torch, args.dtype), args.attention)
    # What the first client of the federation trains in the first round: the same numbers, if all is the same.
    total, count = train(model, plan, plan.batches(0, 0))
    first = total / count
    load_start(model, plan)
    everybody = [index for client in plan.clients for index in client]

    def run_round(round: int) -> dict[str, float]:
        epochs = plan.settings["bucketed"]
        bucketed = args.order == "bucketed"
        batches = epochs[round % len(epochs)] if bucketed else plan.shuffled(everybody, round)
        total, count = train(model, plan, batches)
        return {"loss": total / count, "examples": count}

    answers.serve(run_round, 1, lambda: {"first": first})


if __name__ == "__main__":
    main()
