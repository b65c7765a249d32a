"""FedAvg as its paper says."""

from __future__ import annotations

from pathlib import Path

import torch

from fedspan.core.tensors import join_tensor_name
from fedspan.runs.setup import Prepared
from helpers import tiny
from helpers.plain_training import batches, loop
from helpers.watched_rounds import method_config

SGD = {"optimizer": "sgd", "lr": 0.1, "weight_decay": 0.0}


def test_fedavg_is_full_fine_tuning_of_the_target_weights(tiny_folder: Path, prepared: Prepared) -> None:
    """Against a loop over models loaded again with ``torch.optim.SGD``, averaged by examples: 1e-6."""
    made = tiny.variant(prepared, method_config(tiny_folder, "fedavg", training=SGD, federation={"rounds": 1}))
    begin = made.federation.begin()
    result = made.federation.run_round(begin)
    ours = {f"{layer.name}.weight": join_tensor_name(layer.name, "W") for layer in made.engine.adapted.spec.layers}
    ours |= {path: f"extras/{path}" for path in made.engine.adapted.extras}
    examples = {id: len(made.federation.clients[id].train) for id in result.cohort}
    means = {path: torch.zeros((), dtype=torch.float64) for path in ours}
    for id in result.cohort:
        model = tiny.fresh_classifier(tiny_folder / "bert")
        parameters = {path: value for path, value in model.named_parameters() if path in ours}
        with torch.no_grad():
            for path in made.engine.adapted.extras:
                parameters[path].copy_(made.engine.adapted.get_extra(path))
        loop(model, torch.optim.SGD(parameters.values(), lr=0.1), batches(made, id, 0))
        for path, value in parameters.items():
            means[path] = means[path] + examples[id] / sum(examples.values()) * value.detach().double()
    for path, mean in means.items():
        found, started = result.progress.state.tensors[ours[path]].double(), begin.state.tensors[ours[path]].double()
        assert float((found - mean).abs().max()) < 1e-6
        assert float((mean - started).abs().max()) > 1e-4
