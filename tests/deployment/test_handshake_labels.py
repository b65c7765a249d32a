"""The handshake answers the same whatever labels a server names, so it does not tell which of them a node has."""

from pathlib import Path
from typing import Any

import pytest

from fedspan.deployment.node import NodeService
from fedspan.deployment.usage import UsageBook
from fedspan.federation.progress import TooFewReplies
from helpers import tiny
from helpers.node_service import introduced, node, serve, values

LIMITS = {"approve": "auto", "min_batch": 1, "train_examples": 8, "evaluation_epsilon": None, "evaluation_examples": 1}
OTHERS = ["one that no example has", "another"]


def answer(tiny_folder: Path, folder: Path, labels: list[str], **data: Any) -> dict[str, Any]:
    """What a new node replies to a run with these labels, but for the digest of the model, which the server knows."""
    given = {"train": str(tiny_folder / "corpus.csv"), **data}
    service = NodeService(node(tiny_folder, folder, limits=LIMITS, data=given))
    config = values(tiny_folder)
    config["data"] = {"labels": labels}
    return introduced(service, config).model_dump(exclude={"base"})


@pytest.mark.parametrize("data", [{}, {"invalid": "skip"}, {"keep_only": True}])
def test_a_handshake_does_not_depend_on_labels(data: dict[str, Any], tiny_folder: Path, tmp_path: Path) -> None:
    known = answer(tiny_folder, tmp_path / "known", list(tiny.LABELS), **data)
    assert known["refused"] is None
    for number, labels in enumerate((list(tiny.LABELS)[:2], [tiny.LABELS[0], OTHERS[0]], OTHERS)):
        assert answer(tiny_folder, tmp_path / str(number), labels, **data) == known


def test_examples_with_other_labels_are_left_out_and_the_owner_learns_it(
    tiny_folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = values(tiny_folder)
    config["data"] = {"labels": [tiny.LABELS[0], OTHERS[0]]}
    service = NodeService(node(tiny_folder, tmp_path, limits=LIMITS))
    run, _ = serve(config, service)
    assert not run.federation.run_round(run.federation.begin()).failures
    (warning,) = [message for message in caplog.messages if "are left out" in message]
    assert "training examples have labels that run does not have" in warning
    validation, test = run.evaluator.evaluate_clients(run.federation.begin())
    assert validation is not None
    assert test is not None


def test_a_node_without_the_labels_refuses_to_train_at_the_price_of_a_round(tiny_folder: Path, tmp_path: Path) -> None:
    config = values(tiny_folder)
    config["data"] = {"labels": OTHERS}
    limits = {**LIMITS, "evaluation_epsilon": 1000.0}
    run, _ = serve(config, NodeService(node(tiny_folder, tmp_path, limits=limits)))
    with pytest.raises(TooFewReplies, match=r"fewer training examples with labels of the run"):
        run.federation.run_round(run.federation.begin())
    assert UsageBook(node(tiny_folder, tmp_path, limits=limits)).get_account().rounds >= 1
    validation, _ = run.evaluator.evaluate_clients(run.federation.begin())
    assert validation is not None, "a missing part would tell that the node lacks the labels"
    assert validation.pooled["accuracy"] < 0.01, "every example counts as wrong"
    known, _ = serve(values(tiny_folder), NodeService(node(tiny_folder, tmp_path / "known", limits=limits)))
    scores, _ = known.evaluator.evaluate_clients(known.federation.begin())
    assert scores is not None
    assert set(scores.pooled) == set(validation.pooled)
    assert scores.pooled["examples"] == validation.pooled["examples"]
