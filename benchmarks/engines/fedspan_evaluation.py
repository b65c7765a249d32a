"""Personal models, evaluated by the batched engine and by the loop engine in turns, in one process; one JSON line.

python fedspan_evaluation.py CONFIG.json REPETITIONS
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
from peers_answers import Answers

from fedspan.config import parse_config
from fedspan.federation.evaluation import Evaluator
from fedspan.runs.setup import prepare
from fedspan.training.loop import LoopEngine


def main() -> None:
    """Train a round, then evaluate."""
    answers = Answers()
    config = parse_config(json.loads(Path(sys.argv[1]).read_text()))
    prepared = prepare(config)
    federation, heldout = prepared.federation, prepared.test
    assert heldout is not None
    progress = federation.run_round(federation.begin()).progress
    engine = federation.engine
    loop = LoopEngine(engine.adapted, engine.task, engine.settings, engine.seed, engine.prefixes, stages=engine.stages)
    evaluators = {
        "batched": Evaluator(federation, config.evaluation.batch_size),
        "loop": Evaluator(federation, config.evaluation.batch_size, predictor=loop),
    }

    def evaluate_own(name: str) -> list[float]:
        scores = evaluators[name].evaluate_clients(progress)[1]
        assert scores is not None
        return [scores.by_client[id]["loss"] for id in federation.clients]

    def evaluate_heldout(name: str) -> list[float]:
        scores = evaluators[name].evaluate_heldout(progress, heldout)
        return [scores[id]["loss"] for id in federation.clients]

    parts: dict[str, Callable[[str], list[float]]] = {"own": evaluate_own, "held-out": evaluate_heldout}
    own = sum(len(client.test) for client in federation.clients.values())
    examples = {"own": own, "held-out": len(federation.clients) * len(heldout)}
    seconds: dict[str, dict[str, list[float]]] = {part: {name: [] for name in evaluators} for part in parts}
    gaps: dict[str, float] = {}
    for part, evaluate in parts.items():
        losses = {name: np.array(evaluate(name)) for name in evaluators}  # not timed: it verifies and fills caches
        gaps[part] = float(np.max(np.abs(losses["batched"] / losses["loop"] - 1)))
        for _ in range(int(sys.argv[2])):
            for name in evaluators:
                began = time.perf_counter()
                evaluate(name)
                seconds[part][name].append(time.perf_counter() - began)
    answers.say(examples=examples, seconds=seconds, gaps=gaps)


if __name__ == "__main__":
    main()
