"""What differential privacy costs: the same federation without it, and with DP-SGD within a budget.

    pip install -e '.[privacy]'
    python examples/differential_privacy.py --epsilon 8

Two hospitals train a classifier of their patients' messages. Under DP-SGD each clips the gradient of every message and
adds noise to their sum, so that what leaves it, and the model in the end, would be nearly as probable without any one
message: by a factor of e^epsilon at most, but for a probability of delta. The noise follows from the budget, and with
so few messages it costs much. Large batches, few steps and few parameters cost least, which the settings follow.
What it shows: the section ``privacy``, what was spent by round, and the accuracy with and without, both from a head
that starts at random. Times: examples/README.md; what is protected, and what is not: docs/privacy.md.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import fedspan


class Progress(fedspan.Listener):
    """Print one line for each round."""

    def on_round_finish(self, row: Any) -> None:
        spent = f", epsilon spent {row['privacy']['epsilon']:.2f}" if "privacy" in row else ""
        print(f"  round {row['round']}: held-out accuracy {row['test']['accuracy']:.1%}{spent}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epsilon", type=float, default=8.0, help="the budget of a message")
    parser.add_argument("--delta", type=float, default=1e-4, help="well below 1 over the messages of a hospital")
    parser.add_argument(
        "--model", default="builtin:all-minilm-l6-v2", help="an encoder of BERT's kind: hub id or folder"
    )
    parser.add_argument("--layer", type=int, default=5, help="the layer to adapt; MiniLM's last one is 5")
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument(
        "--out", type=Path, help="left out: runs/differential_privacy, or runs/differential_privacy-smoke"
    )
    parser.add_argument("--smoke", action="store_true", help="a few seconds: one round on 120 texts")
    args = parser.parse_args()
    args.out = args.out or Path("runs/differential_privacy-smoke" if args.smoke else "runs/differential_privacy")

    config: dict[str, Any] = {
        "model": {
            "name": args.model,
            "target_modules": ["query", "value"],
            "layers_to_transform": args.layer,
            # As under privacy, where a head's statistics would be released without noise: both runs start alike.
            "head_init": "random",
        },
        "data": {"train": "builtin:patient-messages", **({"max_examples": 120} if args.smoke else {})},
        "partition": {"partitioner": "iid", "clients": 2},
        # Noise on both factors is multiplied in B A; FFA-LoRA freezes A, and so keeps it out of the product.
        "method": {"name": "ffa-lora", "r": 8, "lora_alpha": 16},
        "federation": {"rounds": 1 if args.smoke else args.rounds},
        # AdamW would divide the noise, too, by its size, and make every weight move alike.
        "training": {
            "optimizer": "sgd",
            "lr": 5.0,
            "momentum": 0.9,
            "max_grad_norm": 0.5,
            "batch_size": 16 if args.smoke else 160,
        },
    }
    privacy = {"mechanism": "dp-sgd", "epsilon": args.epsilon, "delta": args.delta, "clip": 0.5}

    print("without privacy")
    plain = fedspan.run(config, args.out / "plain", resume=True, listener=Progress())
    print(f"with DP-SGD, epsilon at most {args.epsilon:g}")
    private = fedspan.run({**config, "privacy": privacy}, args.out / "private", resume=True, listener=Progress())

    spent, scores = private.privacy, [report.scores["test"]["accuracy"] for report in (plain, private)]
    print(f"epsilon {spent['epsilon']:.3f} of {args.epsilon:g} spent, at delta {spent['delta']:g}")
    print(f"held-out accuracy {scores[0]:.1%} without privacy, {scores[1]:.1%} with it")
    if spent["randomness"] != "secret":
        # So that the experiment repeats. With data that matter: randomness: secret.
        print("the noise follows from the seed: who knows it can take the noise away")


if __name__ == "__main__":
    main()
