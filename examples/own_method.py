"""A federated method of your own, in thirty lines, beside FedIT on the built-in patients' messages.

    python examples/own_method.py

The method, Slow-A: A, what clients have in common, moves slowly at the server; B is averaged as usual.

    client i:  trains A_i, B_i from the global A, B
    server:    A <- keep A + (1 - keep) sum_i p_i A_i,   B <- sum_i p_i B_i
"""

from __future__ import annotations

import argparse
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, final

import fedspan
from fedspan.core.factors import create_b_factors, create_lora_job, draw_a_factors
from fedspan.core.method import Claims, Memory, RegisteredMethod, declare_decay_rate
from fedspan.core.values import Client, Job, Message, Reduced, ServerState, Weights


@final
@dataclass(frozen=True, kw_only=True)
class SlowA(RegisteredMethod):
    """Average B; let A follow its average slowly.

    Args:
        keep: Share of the old A in the new one.
    """

    claims: ClassVar[Claims] = Claims(paper="nowhere yet", exact=False)

    keep: float = declare_decay_rate(0.5)

    def init(self, weights: Weights) -> ServerState:
        return ServerState(tensors={**draw_a_factors(self, self.r), **create_b_factors(self.spec, self.r)})

    def start(self, message: Message, client: Client | None, memory: Memory, round: int) -> Job:
        return create_lora_job(self, message.tensors, client, train=("A", "B"))

    def update(self, state: ServerState, reduced: Reduced) -> ServerState:
        slow = draw_a_factors(self, self.r)  # for the names of the A tensors
        tensors = {
            name: self.keep * state.tensors[name] + (1 - self.keep) * mean if name in slow else mean
            for name, mean in reduced.mean.items()
        }
        return state.advance_round(tensors=tensors)


def read_losses(run: Path) -> list[float]:
    """The loss on the clients' validation parts before the first round and after each."""
    return [json.loads(line)["validation"]["loss"] for line in (run / "metrics.jsonl").read_text().splitlines()]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--model", default="builtin:all-minilm-l6-v2", help="an encoder of BERT's kind: hub id or folder"
    )
    parser.add_argument("--layer", type=int, default=5, help="the layer to adapt; MiniLM's last one is 5")
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--out", type=Path, help="left out: runs/own_method, or runs/own_method-smoke")
    parser.add_argument("--smoke", action="store_true", help="a few seconds: one round on 120 texts")
    args = parser.parse_args()
    args.out = args.out or Path("runs/own_method-smoke" if args.smoke else "runs/own_method")

    fedspan.register("slow-a", SlowA)
    config: dict[str, Any] = {
        "model": {
            "name": args.model,
            "target_modules": ["query", "value"],
            "layers_to_transform": args.layer,
        },
        "data": {"train": "builtin:patient-messages", **({"max_examples": 120} if args.smoke else {})},
        "partition": {"partitioner": "dirichlet", "alpha": 0.3, "clients": 10},
        "method": {"r": 8, "lora_alpha": 16, "keep": 0.5},
        "federation": {"rounds": 1 if args.smoke else args.rounds},
        # The default learning rate; the adjustment is what `fedspan init` writes, for clients with different classes.
        "training": {"logit_adjustment": 1},
    }
    report = fedspan.compare(config, args.out, ["fedit", "slow-a"], seeds=[0])
    for row in report.rows:
        if not row.bytes_up:  # the start
            continue
        print(f"{row.name}: held-out accuracy {row.mean:.1%}, {row.bytes_up / 1e6:.2f} MB up")
        losses = read_losses(args.out / f"{row.name}-seed0")
        print("  validation loss by round: " + ", ".join(f"{loss:.3f}" for loss in losses))


if __name__ == "__main__":
    main()
