"""FedSA-LoRA as its paper says."""

from __future__ import annotations

import torch

from fedspan.core.tensors import join_tensor_name
from helpers.sent_factors import sent, slots
from helpers.watched_rounds import RunMethod


def test_fedsa_lora_never_sends_B_and_everybody_starts_from_the_newest_A(run_method: RunMethod) -> None:
    run = run_method("fedsa-lora")
    for round in run.rounds:
        assert all(slots(message) == {"A"} for _, _, message in sent(round))
        for id in run.federation.clients:
            job = run.prepared.evaluator.build_job(round.before, id)
            for layer in run.layers:
                B, A = join_tensor_name(layer.name, "B"), join_tensor_name(layer.name, "A")
                assert torch.equal(job.tensors[A], round.before.state.tensors[A])
                own = round.before.load_memory(id)
                assert torch.equal(job.tensors[B], torch.zeros_like(job.tensors[B]) if not own else own[B])
