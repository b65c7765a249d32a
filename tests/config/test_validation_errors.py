"""Wrong values and names, and what is said of them."""

from __future__ import annotations

from helpers.valid_config import refused


def test_values_of_another_kind_get_the_right_form() -> None:
    example = "Expected a section: names of fields with their values, for example {} for its defaults."
    refused({"federation.secure": "flora"}, "federation.secure", "flora", example)
    refused(
        {"data.labels": "lable"}, "data.labels", "lable", "Expected a valid list. A single name belongs in data.label."
    )
    refused({"data": "rows.csv"}, "data", "rows.csv", "Expected a section: names of fields with their values.")


def test_unknown_names_get_the_nearest() -> None:
    refused({"modle": {}}, "modle", {}, "no such field", "Did you mean 'model'")
    refused({"training.momentun": 1}, "training.momentun", 1, "momentum")
    refused({"data.trian": 1}, "data.trian", 1, "train")
    refused({"method.name": "fedlru"}, "method.name", "fedlru", "no method is named", "fedloru")
    refused({"method.taw": 1}, "method.taw", 1, "fedloru has no such option", "r, lora_alpha, use_rslora, tau")
    for hidden in ("spec", "seed", "claims", "options"):  # fields of the class that are no options
        refused({f"method.{hidden}": 1}, f"method.{hidden}", 1, "fedloru has no such option")


def test_wrong_values_are_named() -> None:
    refused({"task": ["regression"], "data": {"dataset": "banking77"}}, "task", ["regression"], "a valid string")
    refused({"data": {}}, "data.train", None, "no value is given. Expected a file or a hub id, or data.dataset")
    refused({"training.lr": 0}, "training.lr", 0, "above 0")
    refused({"training.lr": float("inf")}, "training.lr", float("inf"), "above 0")
    for field in ("training.weight_decay", "training.eps", "training.max_grad_norm", "centralized_lr"):
        refused({field: float("inf")}, field, float("inf"), "finite")
    refused({"model.extras_lr_scale": float("inf")}, "model.extras_lr_scale", float("inf"), "finite")
    refused({"method.lora_alpha": float("inf")}, "method.lora_alpha", float("inf"), "a finite number")
    refused({"training.optimizer": "adam"}, "training.optimizer", "adam", "'adamw' or 'sgd'")
    refused({"training.betas": [0.9]}, "training.betas.1", None, "is required")
    refused({"federation.rounds": "many"}, "federation.rounds", "many", "integer")
    refused({"federation.clients_per_round": 0}, "federation.clients_per_round", 0, "greater than or equal to 1")
    refused({"model": "bert"}, "model", "bert", "a section")
    refused({"model.extras": "shared"}, "model.extras", "shared", "'average', 'local' or 'frozen'")
    refused({"baselines": ["global"]}, "baselines.0", "global", "'local' or 'centralized'")
    refused({"seed": -1}, "seed", -1, "greater than or equal to 0")
    refused({"seed": 2**64}, "seed", 2**64, "less than 9223372036854775808")
    refused({"model.modules_to_save": [""]}, "model.modules_to_save.0", "", "at least 1 character")
    refused({"training.learning_rate": 1}, "training.learning_rate", 1, "Did you mean 'lr'")
