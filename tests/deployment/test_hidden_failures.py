"""A server chooses a model that overflows on some examples: under noise, a node does not tell whether it has them."""

from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from fedspan.deployment.node import NodeService
from fedspan.deployment.usage import Release, UsageBook
from fedspan.federation.progress import TooFewReplies
from fedspan.federation.protocol import decode_reply
from fedspan.federation.serialization import decode
from helpers.node_service import Direct, node, serve, served, values


def train_overflowing(folder: Path, service: NodeService, **privacy: Any) -> Direct:
    """Order a node to train a model whose head overflows on its examples, and return what connects it to the server."""
    run, transport = served(folder, service, **privacy)
    progress = run.federation.begin()
    tensors = {
        name: torch.full_like(value, 3e38) if name.startswith("extras/") and value.ndim == 2 else value
        for name, value in progress.state.tensors.items()
    }
    with suppress(TooFewReplies):  # such numbers are too large for an honest server
        run.federation.run_round(replace(progress, state=replace(progress.state, tensors=tensors)))
    return transport


@pytest.mark.parametrize("mechanism", ["local", "dp-sgd"])
def test_a_loss_that_is_not_finite_is_hidden_by_noise(mechanism: str, tiny_folder: Path, tmp_path: Path) -> None:
    pytest.importorskip("opacus", reason="the extra fedspan[privacy] is not installed")
    service = NodeService(node(tiny_folder, tmp_path))
    privacy = {"mechanism": mechanism, "clip": 1.0, "noise": 4.0, "randomness": "secret"}
    sent = train_overflowing(tiny_folder, service, privacy=privacy).sent
    reply = decode_reply(service.answer(sent[-1]))  # once more
    assert reply.failed is None
    assert reply.parts == ()
    assert all(bool(value.isfinite().all()) for value in decode(reply.body).tensors.values())


def test_without_noise_the_failure_is_reported(
    tiny_folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    train_overflowing(tiny_folder, NodeService(node(tiny_folder, tmp_path)))
    assert "the loss of client" in caplog.text


@pytest.mark.parametrize("mechanism", ["local", "dp-sgd"])
def test_noise_does_not_tell_how_many_examples_have_the_labels_that_a_server_names(
    mechanism: str, tiny_folder: Path, tmp_path: Path
) -> None:
    pytest.importorskip("opacus", reason="the extra fedspan[privacy] is not installed")
    releases, privacy = set[tuple[Release, ...]](), {"mechanism": mechanism, "epsilon": 4.0, "clip": 1.0}
    for number, labels in enumerate((["admin", "billing", "lab", "symptom"], ["lab", "x", "y", "z"], list("wxyz"))):
        service = NodeService(node(tiny_folder, tmp_path / str(number), limits={"train_examples": 16, "min_batch": 8}))
        config = values(tiny_folder, privacy={**privacy, "randomness": "secret"}, training={"batch_size": 8})
        run, transport = serve({**config, "data": {"labels": labels}}, service)
        run.federation.run_round(run.federation.begin())
        reply = decode_reply(service.answer(transport.sent[-1]))
        assert reply.failed is None
        releases.add(UsageBook(service.node).get_account().releases)
    assert len(releases) == 1
