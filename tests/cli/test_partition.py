"""``fedspan partition``."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

from click.testing import Result

import fedspan
from helpers import tiny
from helpers.command_line import done

Call = Callable[..., Result]
Write = Callable[..., Path]


def test_partition(call: Call, write: Write, tmp_path: Path) -> None:
    config, png = write(), tmp_path / "p.png"
    shown = done(call("partition", config, "--png", png))
    content = json.loads(done(call("partition", config, "--json")))
    assert png.read_bytes().startswith(b"\x89PNG")
    assert content["labels"] == list(tiny.LABELS)
    assert [client["id"] for client in content["clients"]] == sorted(tiny.SITES)
    for client in content["clients"]:
        line = next(line for line in shown.splitlines() if line.startswith(client["id"]))
        assert f"{client['train']}+{client['validation']}+{client['test']}" in line
        assert [0 if cell == "." else int(cell) for cell in line.split()[2:]] == client["counts"]
        assert sum(client["counts"]) == client["train"] + client["validation"] + client["test"]
    assert max(map(len, shown.replace(str(png), "").splitlines())) <= 80


def test_partition_with_many_labels(call: Call, tmp_path: Path) -> None:
    demo = Path(fedspan.__file__).parent / "demo.yaml"
    twenty = done(call("partition", demo, "--set", "data.train=builtin:patient-messages"))
    assert "20 waiting_list" in twenty
    rows = [f"text {number},a_label_with_a_long_name_{number % 77:02}" for number in range(770)]
    (tmp_path / "many.csv").write_text("text,label\n" + "\n".join(rows))
    many = done(call("partition", demo, "--set", f"data.train={tmp_path / 'many.csv'}"))
    assert "most frequent" in many
    assert max(map(len, (twenty + many).splitlines())) <= 80
