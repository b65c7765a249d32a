"""The log of a node on its terminal: an invitation's texts neither command it nor forge lines."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Iterator
from io import StringIO
from pathlib import Path

import pytest

from fedspan import __version__
from fedspan.deployment.console import ConsoleFormatter
from fedspan.deployment.handshake import Invitation
from fedspan.deployment.node import NodeService
from fedspan.federation.protocol import Envelope
from helpers.node_service import node

ESCAPES = "\x1b]0;title\x07\x1b[2J\u202e"
FORGED = "00:00:00 round 1: train done"


@pytest.fixture
def log() -> Iterator[StringIO]:
    stream = StringIO()
    handler = logging.StreamHandler(stream)
    handler.setFormatter(ConsoleFormatter())
    logger, level = logging.getLogger("fedspan"), logging.getLogger("fedspan").level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    yield stream
    logger.removeHandler(handler)
    logger.setLevel(level)


def lines(log: StringIO) -> list[str]:
    text = log.getvalue()
    assert not set(text) & {"\x1b", "\x07", "\u202e", "\r"}, text
    return text.splitlines()


@pytest.mark.parametrize(
    "config",
    [
        {ESCAPES: 1},
        {"training": {f"{ESCAPES}\n{FORGED}": 1}},
        {"model": {"name": f"{ESCAPES}\n{FORGED}"}},
        {"model": {"name": "builtin:all-minilm-l6-v2", "adapter": f"{ESCAPES}\n{FORGED}"}},
        {"method": {"name": f"{ESCAPES}\n{FORGED}"}},
    ],
)
def test_the_config_of_an_invitation_is_shown_as_text(
    config: dict[str, object], log: StringIO, tiny_folder: Path, tmp_path: Path
) -> None:
    invitation = Invitation(run="run", version=__version__, config=json.dumps(config))
    NodeService(node(tiny_folder, tmp_path)).answer(invitation.to_envelope())
    (line,) = lines(log)
    assert re.fullmatch(r"\d\d:\d\d:\d\d the invitation to run is refused: `.+", line)


@pytest.mark.parametrize("field", ["run", "version"])
def test_a_run_with_an_unprintable_name_is_no_invitation(field: str, tiny_folder: Path, tmp_path: Path) -> None:
    header = {"task": "invite", "run": "run", "version": __version__, "config": "{}", field: f"{ESCAPES}\n{FORGED}"}
    with pytest.raises(ValueError, match="invisible characters") as caught:
        NodeService(node(tiny_folder, tmp_path)).answer(Envelope(json.dumps(header)))
    assert "\x1b" not in str(caught.value)


def test_a_message_is_one_line_whatever_it_quotes(log: StringIO) -> None:
    try:
        raise ValueError(f"{ESCAPES}\n{FORGED}")
    except ValueError:
        logging.getLogger("fedspan.x").exception("failed: %s", f"{ESCAPES}\r\n{FORGED}")
    first, *rest = lines(log)
    assert first.endswith(f"\\r\\n{FORGED}")
    assert f"  {FORGED}" in rest
    assert all(line.startswith("  ") for line in rest)
