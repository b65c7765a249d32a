"""The load with a few nodes, what it makes of the memory after each round, and the layers of a profile."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("flwr", reason="the extra fedspan[flower] is not installed")

from evidence.regression import load
from evidence.regression.layers import find_layer, read_layers


def test_few_rounds_are_judged_by_the_growth_per_node_and_round() -> None:
    measured = [310.5, 315.9, 312.9, 317.2, 318.7, 314.4, 316.8, 318.5]  # 200 nodes, on a machine with 2 cores
    assert load.compare_memory(measured, 200) == ("316, 318", "+2.6 kB", True)
    steps = [200.0, 250.0, *(250.0 + 200 * step * load.BODY / load.MIB for step in range(1, 4))]
    sizes, growth, flat = load.compare_memory(steps, 200)
    assert (sizes, growth, flat) == ("250, 259", "+16.4 kB", False)  # one message of each node is kept in each round
    assert load.compare_memory([200.0, 250.0, 250.0, 290.0, 250.0, 250.0, 250.0], 200)[2]  # one out of line


def test_many_rounds_are_judged_from_the_tenth_on() -> None:
    early = [100.0 + 10 * number for number in range(10)]
    assert load.compare_memory([*early, *[199.0] * 10], 3) == ("190, 199", "+4.7%", True)
    assert load.compare_memory([*early, *[200.0] * 10], 3)[1:] == ("+5.3%", False)


@pytest.mark.parametrize("rounds", [1, 2, 3, 4])
def test_too_few_rounds_are_not_judged(rounds: int) -> None:
    assert load.compare_memory([100.0, 200.0, 300.0, 400.0][:rounds], 3)[1:] == ("", None)


def test_a_stack_is_of_the_layer_of_its_innermost_frame_that_has_one(tmp_path: Path) -> None:
    flower, door = ["/lib/flwr/state.py", "store", 3], ["/src/fedspan/door.py", "serve", 5]
    assert find_layer([["/lib/json/encoder.py", "encode", 1], door, flower]) == "fedspan's door"
    assert find_layer([["/lib/sqlalchemy/sql/elements.py", "compile", 1], flower, door]) == "SQLAlchemy"
    assert find_layer([["/lib/python3/asyncio/sslproto.py", "read", 1], door]) == "TLS"
    assert find_layer([["/lib/json/encoder.py", "encode", 1]]) == "other"
    assert find_layer([["/lib/python3/selectors.py", "select", 1], door]) is None
    calling = tmp_path / "sqlalchemy" / "default.py"
    calling.parent.mkdir()
    calling.write_text("def do_execute(cursor):\n    cursor.execute(statement)\n")
    assert find_layer([[str(calling), "do_execute", 2], flower]) == "SQLite"
    assert find_layer([[str(calling), "do_execute", 1], flower]) == "SQLAlchemy"
    (tmp_path / "stacks.json").write_text(json.dumps([[2.0, [flower]], [1.0, [door]], [0.5, [flower, door]]]))
    found = read_layers(tmp_path)
    assert {layer: spent for layer, spent in found.items() if spent} == {
        "Flower's own code": 2.5,
        "fedspan's door": 1.0,
    }


@pytest.mark.slow
def test_the_page_has_all_tables(tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    sizes = ["--load", "2", "5", "--processes", "1", "--megabytes", "0", "--profiled", "2"]
    command = [sys.executable, "-m", "evidence.regression.load", *sizes, "--page", str(tmp_path / "page.md")]
    subprocess.run(command, env=environment, capture_output=True, text=True, timeout=500)
    page = (tmp_path / "page.md").read_text()  # memory is judged, too, and two nodes are few for that
    assert "| 2 | 5 | 0 of 10 |" in page
    assert "| 2 | 2 and 5 |" in page
    assert "--load 2 5 --megabytes 0 --profiled 2`" in page
    shares = page.partition("## Where the SuperLink's time goes")[2]
    assert "| SQLAlchemy | " in shares
    assert "| SQLAlchemy | 0% |" not in shares
