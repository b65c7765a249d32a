"""tests/tools/reply_path.py: what counts as the reply of a round, and what does not, however much it looks like one."""

import importlib
import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from reply_recorder import Recorder, ReplyForms, read_files

from fedspan.core.values import Contribution, Job, Message, Reduced, Trained
from fedspan.federation import serialization
from fedspan.federation.protocol import Envelope, Order, Reply
from helpers.scripts import ROOT

BEGUN = {"A": torch.randn(4, 8, generator=torch.Generator().manual_seed(1)), "frozen": torch.arange(24.0)}
TRAINED = {"A": BEGUN["A"] + 0.5, "frozen": BEGUN["frozen"].clone()}
REPLY = serialization.encode(Message({"A": TRAINED["A"]}))
ORDER = serialization.encode(Message(BEGUN))


class Recording:
    """A recorder that has seen a training."""

    def __init__(self, folder: Path) -> None:
        for name in ("out", "forms"):
            (folder / name).mkdir(exist_ok=True)
        self.folder = folder
        self.recorder = Recorder("/src/", folder / "out", ReplyForms(folder / "forms"))

    def train(self) -> None:
        job = Job(parametrization={}, tensors=BEGUN, trainable=())
        self.recorder.classify("loop.py", [job], None)
        self.recorder.classify("loop.py", [job], Trained(TRAINED))

    def counts(self, given: Any, result: Any = None) -> bool:
        self.recorder.classify("file.py", [given], result)
        return "file.py" in read_files(self.folder / "out", ReplyForms(self.folder / "forms"))


@pytest.mark.parametrize(
    "value",
    [
        Reply("train", 0, 0, "a", body=REPLY),
        Envelope('{"task": "train"}', REPLY),
        {"messages": [(1, Envelope("{}", REPLY))]},
        b"POST /send HTTP/1.1\r\n\r\n" + REPLY,
        bytearray(REPLY),
        memoryview(REPLY),
        Contribution(sum={"A": TRAINED["A"]}),
        torch.stack([TRAINED["A"].clone()]),
        TRAINED["A"].numpy(),
    ],
    ids=lambda value: type(value).__name__,
)
def test_what_training_returned_counts_in_any_form(tmp_path: Path, value: Any) -> None:
    recording = Recording(tmp_path)
    recording.train()
    assert recording.counts(value)


@pytest.mark.parametrize(
    "value",
    [
        Order("train", 0, 0, 0.1, "a", None, ORDER),
        Envelope('{"task": "train"}', ORDER),
        json.dumps({"event": "answered", "sha256": "0" * 64, "note": "x" * 999}).encode(),
        Reply("train", 0, 0, "a", failed="not finite"),
        TRAINED["frozen"],
        {"batch": torch.ones(64)},
        None,
    ],
    ids=lambda value: type(value).__name__,
)
def test_orders_logs_and_what_did_not_train_do_not(tmp_path: Path, value: Any) -> None:
    recording = Recording(tmp_path)
    recording.train()
    assert not recording.counts(value)


def test_another_process_recognizes_an_enciphered_reply(tmp_path: Path) -> None:
    node, server = Recording(tmp_path), Recording(tmp_path)
    node.train()
    enciphered, other = (bytes(byte ^ key for byte in data) for data, key in ((REPLY, 7), (ORDER, 7)))
    node.recorder.classify("messages.py", [REPLY, b"salt"], enciphered)
    node.recorder.classify("messages.py", [ORDER, b"salt"], other)
    assert not server.counts([b"object " + other])
    assert server.counts([b"object " + enciphered])


def test_what_replies_are_reduced_to_counts_where_they_are_but_not_as_an_order(tmp_path: Path) -> None:
    server, node = Recording(tmp_path), Recording(tmp_path)
    mean = {"A": TRAINED["A"] / 3}
    server.recorder.classify("reduction.py", [], Reduced(mean, count=3))
    order = serialization.encode(Message(mean))
    assert not server.counts(Order("evaluate", 1, 0, 0.1, "a", None, order))
    assert not node.counts(mean)
    assert server.counts(b"a checkpoint" + mean["A"].numpy().tobytes())


def test_the_last_step_of_a_training_counts(tmp_path: Path) -> None:
    recording = Recording(tmp_path)
    assert not recording.counts([TRAINED["A"]])
    recording.train()
    assert recording.counts(None)


def test_a_function_is_recorded_by_its_arguments_and_its_result(tmp_path: Path) -> None:
    recording = Recording(tmp_path)
    recording.train()
    source = "def takes(self, value):\n    pass\n\ndef returns():\n    return REPLY\n"
    for call, expected in (("takes(REPLY, 1)", False), ("takes(1, REPLY)", True), ("returns()", True)):
        names: dict[str, Any] = {"REPLY": REPLY}
        exec(compile(source, f"/src/{call}.py", "exec"), names)
        sys.setprofile(recording.recorder.record)
        try:
            exec(call, names)
        finally:
            sys.setprofile(None)
        files = read_files(tmp_path / "out", ReplyForms(tmp_path / "forms"))
        assert (f"{call}.py" in files) is expected


@pytest.mark.slow
def test_a_simulated_reply_passes_the_round_and_the_adapter() -> None:
    files = set(importlib.import_module("reply_path").trace(ROOT, False))
    assert {"training/loop.py", "clients/host.py", "federation/round.py", "runs/trained_models.py"} <= files
    assert "logs.py" not in files
