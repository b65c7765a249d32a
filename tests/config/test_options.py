"""Types and ranges of the options of methods."""

from __future__ import annotations

from helpers.valid_config import refused


def test_method_options_have_types_and_ranges() -> None:
    refused({"method.r": "four"}, "method.r", "four", "integer")
    refused({"method.r": 0}, "method.r", 0, "a finite number above 0")
    refused({"method.tau": 2.5}, "method.tau", 2.5, "integer")
    refused({"method.lora_alpha": -1}, "method.lora_alpha", -1.0, "a finite number above 0")
    refused({"method.use_rslora": "maybe"}, "method.use_rslora", "maybe", "boolean")
    method = {"name": "ffa-lora", "init_A": "random"}
    refused({"method": method}, "method.init_A", "random", "'kaiming', 'gaussian' or 'orthonormal'")
