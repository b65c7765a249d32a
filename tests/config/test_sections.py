"""Settings built from a config."""

from __future__ import annotations

from dataclasses import replace

from fedspan.config import parse_config
from fedspan.core.noise import derive_seed_key
from fedspan.core.values import OptimizerSpec
from fedspan.federation.settings import RoundSettings
from fedspan.training.jobs import Privacy, TrainingSettings
from helpers.valid_config import VALID


def test_settings_carry_every_field_of_the_config() -> None:
    """Values that differ from all defaults, so that none can be forgotten or mistaken for another."""
    training = {
        **{"optimizer": "sgd", "lr": 0.3, "schedule": "cosine", "warmup_rounds": 2, "momentum": 0.8, "eps": 1e-5},
        **{"min_lr": 0.1, "cycle_rounds": 9},
        **{"betas": [0.7, 0.95], "weight_decay": 0.02, "batch_size": 5, "gradient_accumulation_steps": 3},
        **{"local_epochs": 4, "local_steps": 7, "max_grad_norm": 0.5, "optimizer_state": "keep", "lora_dropout": 0.1},
        "group_by_length": False,
    }
    privacy = {"mechanism": "dp-sgd", "clip": 0.5, "noise": 2.0, "epsilon": 3.0, "delta": 1e-6, "accountant": "prv"}
    own = {"clip_ratio": 1.25, "max_norm": 3.0, "max_weight_ratio": 7.0}
    federation = {**VALID["federation"], "trim": 0.2, **own}
    config = parse_config({**VALID, "training": training, "privacy": privacy, "federation": federation})
    alone = {"logit_adjustment", "head_updates", "label_smoothing", "class_weights"}  # dp-sgd refuses them
    on_nodes = {"checkpoint_steps", "checkpoint_minutes"}  # of the process that trains, not of the training
    assert set(training) | alone | on_nodes == set(type(config.training).model_fields)
    optimizer = OptimizerSpec(name="sgd", lr=0.3, momentum=0.8, betas=(0.7, 0.95), eps=1e-5, weight_decay=0.02)
    private = Privacy("dp-sgd", 0.5, 2.0, 3.0, 1e-6, "prv", 6, derive_seed_key(3))
    expected = TrainingSettings(optimizer, "cosine", 2, 0.1, 9, 5, 3, 4, 7, 0.5, True, 0.1, False, privacy=private)
    default = TrainingSettings(OptimizerSpec())
    assert config.build_training_settings() == expected
    fields = set(TrainingSettings.__dataclass_fields__)
    assert {name for name in fields if getattr(expected, name) != getattr(default, name)} == fields - alone
    changed = {"logit_adjustment": 0.5, "head_updates": "own-classes"}
    adjusted = parse_config({**VALID, "training": changed}).build_training_settings()
    assert {name: getattr(adjusted, name) for name in changed} == changed
    weighted = {"label_smoothing": 0.1, "class_weights": {"a": 2.0}}
    assert {*changed, *weighted} == alone
    built = parse_config({**VALID, "training": weighted}).build_training_settings()
    assert (built.label_smoothing, built.class_weights) == (0.1, (("a", 2.0),))
    assert (default.logit_adjustment, default.head_updates) == (0.0, "all")
    assert config.build_round_settings() == RoundSettings(6, 2, 3, "mean", 0.2, 1.25, 3.0, 7.0, private)
    secret = config.build_round_settings(bytes(32)).privacy
    assert secret == replace(private, key=bytes(32), secret=True) == config.build_training_settings(bytes(32)).privacy
    assert (config.evaluation.every, config.evaluation.batch_size) == (2, 8)
