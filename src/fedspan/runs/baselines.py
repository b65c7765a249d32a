"""What a federation is compared with: every client alone, and all examples in one place, with as many passes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from fedspan.config import MethodConfig, RunConfig
from fedspan.core.method import RegisteredMethod
from fedspan.core.values import Client
from fedspan.engines.evaluation import Evaluator
from fedspan.engines.federation import Federation, Member, Progress
from fedspan.engines.loop import LoopEngine
from fedspan.runs.build import Prepared, with_extras
from fedspan.runs.listener import Listener
from fedspan.runs.scores import final_scores

__all__ = ["BASELINES", "alone", "pooled", "train_baseline"]


def pooled(prepared: Prepared) -> Prepared:
    """The same run with all clients' training examples on one client: centralised training, moments kept.

    The clients' validation parts, pooled too, choose the epoch.
    """
    members = prepared.federation.members.values()
    changed, method = _with_method(prepared, "fedit")
    train = np.concatenate([member.train for member in members])
    client = Client("all", method.r, method.scaling(None), len(train), 1.0)
    member = Member(
        client,
        train,
        np.concatenate([member.validation for member in members]),
        np.concatenate([member.test for member in members]),
    )
    return _variant(prepared, changed, method, [member], changed.centralised_lr)


def alone(prepared: Prepared) -> Prepared:
    """The same run without a federation: every client trains LoRA on its own examples, moments kept."""
    changed, method = _with_method(prepared, "local-only")
    members = [
        replace(member, client=replace(member.client, rank=method.r, scaling=method.scaling(None)))
        for member in prepared.federation.members.values()
    ]
    return _variant(prepared, changed, method, members, None)


def _with_method(prepared: Prepared, name: str) -> tuple[RunConfig, RegisteredMethod]:
    """The run's config with another method of the same rank and scaling and its own way with the head; that method."""
    config = prepared.config
    options = {key: value for key, value in config.method.options.items() if key in ("r", "lora_alpha", "use_rslora")}
    model = config.model.model_copy(update={"extras": None})
    changed = config.model_copy(update={"method": MethodConfig(name=name, **options), "model": model})
    return changed, changed.build_method(prepared.engine.adapted.spec)


def _variant(
    prepared: Prepared, config: RunConfig, method: RegisteredMethod, members: list[Member], lr: float | None
) -> Prepared:
    """A baseline on the same model and data: everybody takes part in every round, and keeps the moments."""
    settings = replace(prepared.engine.settings, keep_optimizer=True)
    if lr is not None:
        settings = replace(settings, optimizer=replace(settings.optimizer, lr=lr))
    engine = LoopEngine(prepared.engine.adapted, prepared.engine.task, settings, prepared.engine.seed)
    rounds = replace(config.round_settings(), cohort=None)
    federation = Federation(with_extras(config, method), engine, members, prepared.train, rounds)
    evaluator = Evaluator(federation, config.evaluation.batch_size)
    return replace(prepared, config=config, engine=engine, federation=federation, evaluator=evaluator)


BASELINES = {"local": alone, "centralised": pooled}


def train_baseline(prepared: Prepared, name: str, listener: Listener) -> dict[str, Any]:
    """Train a baseline for as many epochs as the federation has rounds; the best epoch by validation counts.

    Args:
        prepared: the federation's run.
        name: ``local`` or ``centralised``.
        listener: told of every epoch.

    Returns:
        ``best_round``, ``scores`` and ``by_client``, as in a ``RunReport``.
    """
    variant = BASELINES[name](prepared)
    federation, evaluator = variant.federation, variant.evaluator
    listener.baseline_started(name, federation.settings.rounds)
    progress = federation.begin()
    best: tuple[float, int, Progress] | None = None
    while progress.state.round < federation.settings.rounds:
        result = federation.play(progress)
        progress = result.progress
        validation, _ = evaluator.clients(progress)
        score = progress.state.round if validation is None else validation.pooled["accuracy"]
        if best is None or score > best[0]:
            best = (float(score), progress.state.round, progress)
        listener.baseline_round(name, progress.state.round, result.loss)
    assert best is not None  # there is at least one round
    scores, by_client = final_scores(variant, best[2])
    return {"best_round": best[1], "scores": scores, "by_client": by_client}
