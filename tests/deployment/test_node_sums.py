"""What a node's owner allows of secure sums, and what the node's folder remembers of them."""

import json
import shutil
from pathlib import Path

import pytest

pytest.importorskip("cryptography", reason="the extra fedspan[secagg] is not installed")
pytest.importorskip("Crypto", reason="the extra fedspan[secagg] is not installed")

from fedspan.deployment.node_folder import STATE
from fedspan.deployment.usage import BOOK
from fedspan.errors import FedspanError
from fedspan.federation.protocol import serial
from fedspan.federation.secagg.messages import KeysOrder, SharesOrder, decode_request
from helpers.secure_nodes import CLINICS, served


def test_a_round_that_the_server_lost_is_repeated_with_the_same_nodes(tiny_folder: Path, tmp_path: Path) -> None:
    """The second time, the nodes are restarted, and have revealed shares in a sum of the model."""
    run, transport = served(tiny_folder, tmp_path)
    begin = run.federation.begin()
    once = run.federation.run_round(begin)
    transport.make.cache_clear()
    again = run.federation.run_round(begin)
    assert not once.failures
    assert not again.failures
    assert once.loss == again.loss
    assert len(list(tmp_path.glob("*/sums/*/*.json"))) == 3
    books = list(tmp_path.glob(f"*/{BOOK}"))
    assert len(books) == 3
    for path in books:  # keys and shares of two sums
        (account,) = json.loads(path.read_text())["accounts"].values()
        assert [use["exchanges"] for use in account["runs"].values()] == [4]
    assert {
        asked.agreement.threshold for asked in map(decode_request, transport.sent) if isinstance(asked, SharesOrder)
    } == {3}
    for path in tmp_path.glob("*/sums/*/*.json"):  # as if the sum had been of other nodes
        path.write_text(path.read_text().replace(CLINICS[2], "clinic-d"))
    with pytest.raises(FedspanError, match="in a sum of this model with other clients or other facts"):
        run.federation.run_round(begin)
    for path in tmp_path.glob("*/sums"):
        shutil.rmtree(path)
    assert not run.federation.run_round(begin).failures


def test_the_number_of_a_session_is_not_used_again_when_the_state_of_its_run_is_removed(
    tiny_folder: Path, tmp_path: Path
) -> None:
    """The server may know keys of the old session: those of clients that dropped out of its sum."""
    run, transport = served(tiny_folder, tmp_path)
    run.federation.run_round(run.federation.begin())
    states = sorted(tmp_path.glob(f"*/*/{STATE}"))
    assert len(states) == 3
    for path in states:  # as ``remove_old_states`` does
        shutil.rmtree(path)
    transport.make.cache_clear()
    asked = next(asked for asked in map(decode_request, transport.sent) if isinstance(asked, KeysOrder))
    repeated = asked.model_copy(update={"serial": serial()}).to_envelope()
    assert "a number above" in transport.make(asked.to).answer(repeated).header


def test_three_nodes_do_not_withstand_two_colluders(tiny_folder: Path, tmp_path: Path) -> None:
    run, transport = served(tiny_folder, tmp_path, colluders=2)
    with pytest.raises(FedspanError, match=r"a sum of 3 clients is too small\. Expected at least 4 clients"):
        run.federation.run_round(run.federation.begin())
    assert not any('"task":"train"' in reply.header for reply in transport.came)
