"""The Flower app's folder and components: what is written, refused, and passed on."""

import json
import tomllib
from collections.abc import Collection
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

pytest.importorskip("flwr", reason="the extra fedspan[flower] is not installed")

from fedspan import __version__
from fedspan.deployment import flower_client, flower_server, submission
from fedspan.deployment.flower_server import write_app
from fedspan.deployment.handshake import Introduction
from fedspan.errors import FedspanError
from fedspan.federation.protocol import Envelope
from helpers import node_service, tiny
from helpers.listeners import Notes
from helpers.refusals import refused


def write(folder: Path, values: dict[str, Any]) -> dict[str, Any]:
    (folder / "run.yaml").write_text(yaml.safe_dump(values))
    write_app(folder / "app", folder / "run.yaml", folder / "runs", ["federation.rounds=7"])
    return tomllib.loads((folder / "app" / "pyproject.toml").read_text(encoding="utf-8"))


@pytest.mark.parametrize("simulated", [False, True])
def test_an_app_has_the_config_and_no_code(simulated: bool, tiny_folder: Path, tmp_path: Path) -> None:
    values = tiny.settings(tiny_folder) if simulated else node_service.values(tiny_folder)
    written = write(tmp_path, values)
    assert [path.name for path in (tmp_path / "app").iterdir()] == ["pyproject.toml"]
    app = written["tool"]["flwr"]["app"]
    assert written["project"]["dependencies"] == []
    assert json.loads(app["config"]["config"])["federation"]["rounds"] == 7
    assert app["config"]["simulated"] is simulated
    assert app["config"]["folder"] == str(tmp_path / "runs")
    for component, module in (("serverapp", flower_server), ("clientapp", flower_client)):
        assert app["components"][component] == f"{module.__name__}:app"
    with refused("FOLDER", "an empty folder"):
        write(tmp_path, values)


def test_an_app_s_folder_may_have_any_name_that_toml_can_have(tiny_folder: Path, tmp_path: Path) -> None:
    folder = tmp_path / '\U0001f600 "\x7f'
    folder.mkdir()
    written = write(folder, tiny.settings(tiny_folder))
    assert written["tool"]["flwr"]["app"]["config"]["folder"] == str(folder / "runs")


def test_a_folder_whose_name_toml_cannot_have_is_refused(tiny_folder: Path, tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(tiny.settings(tiny_folder)))
    with refused("--out"):
        write_app(tmp_path / "app", tmp_path / "run.yaml", tmp_path / "\udcff")
    assert list((tmp_path / "app").iterdir()) == []


def test_a_simulation_finds_the_files_of_a_config_from_every_folder(
    tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tiny_folder)
    values = tiny.settings(Path())
    config = json.loads(write(tmp_path, values)["tool"]["flwr"]["app"]["config"]["config"])
    assert values["data"]["train"] == "corpus.csv"
    assert config["data"]["train"] == str(tiny_folder / "corpus.csv")
    assert config["model"]["name"] == str(tiny_folder / values["model"]["name"])


def test_data_that_are_no_section_are_named_as_in_any_config(tiny_folder: Path, tmp_path: Path) -> None:
    with refused("data", r"^`?data"):
        write(tmp_path, {**tiny.settings(tiny_folder), "data": "corpus.csv"})


@pytest.mark.parametrize(
    ("section", "change"),
    [
        ("federation", {"buffered": {"size": 1}, "clients_per_round": None}),
        ("federation", {"late_joiners": True}),
        ("simulation", {"dropout": 0.5}),
    ],
)
def test_what_flower_cannot_do_is_refused_before_anything_is_written(
    section: str, change: dict[str, Any], tiny_folder: Path, tmp_path: Path
) -> None:
    values = tiny.settings(tiny_folder) if section == "simulation" else node_service.values(tiny_folder)
    with pytest.raises(FedspanError, match=f"^`?{section}"):
        write(tmp_path, {**values, section: {**values.get(section, {}), **change}})
    assert not (tmp_path / "app").exists()


def test_a_relative_folder_is_refused() -> None:
    settings = {"config": "{}", "folder": "runs", "resume": "", "wait": 1.0, "simulated": False}
    with refused("folder", "absolute path"):
        flower_server._run(None, SimpleNamespace(run_config=settings, run_id=5))  # pyright: ignore


@pytest.mark.parametrize("simulated", [False, True])
def test_an_owner_s_host_gets_every_message_whatever_the_app_says(
    simulated: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(flower_client, "forward", lambda *arguments: arguments[1:])
    run = {"simulated": simulated, "folder": "/", "resume": ""}
    owned = SimpleNamespace(node_config={"fedspan-host": "a.sock"}, run_config=run)
    assert flower_client._answer(owned, "{}", b"body") == ("{}", b"body")  # pyright: ignore


def test_a_supernode_without_a_host_is_told_what_it_needs() -> None:
    context = SimpleNamespace(node_config={}, run_config={"simulated": False})
    with refused("fedspan-host", "--node-config"):
        flower_client._answer(context, "{}", b"")  # pyright: ignore


def gather(
    monkeypatch: pytest.MonkeyPatch,
    replies: list[tuple[int, Envelope | str]],
    begun: Collection[str] = (),
    offline: Collection[int] = (),
) -> tuple[Any, list[str]]:
    """What becomes of nodes' replies to an invitation of two clients."""
    notes, asked = Notes(), set[int]()

    def invite(grid: object, invitation: Envelope, seconds: float, undecided: set[int]) -> Any:
        for reply in replies:
            yield reply
            asked.update(undecided)

    monkeypatch.setattr(flower_server, "invite", invite)
    monkeypatch.setattr(flower_server, "compute_base_digest", lambda model: "base")
    monkeypatch.setattr(submission, "compute_extras_digest", lambda model: "")
    federation = SimpleNamespace(min_examples=0, require_tags={}, secure=None)
    config = SimpleNamespace(federation=federation, partition=SimpleNamespace(clients=2))
    prepared: Any = SimpleNamespace(model=None, config=config)
    grid: Any = SimpleNamespace(get_node_ids=lambda: {node for node, _ in replies} - set(offline))
    gathered = flower_server._gather(grid, prepared, Envelope("{}"), 1.0, notes, begun)
    return (gathered, asked), notes.notes


def introduced(id: str, **changes: Any) -> Envelope:
    facts = {"id": id, "version": __version__, "examples": 9, "base": "base", **changes}
    return Introduction(**facts).to_envelope()


def test_nodes_join_under_different_ids_and_the_others_reasons_are_noted(monkeypatch: pytest.MonkeyPatch) -> None:
    (gathered, asked), notes = gather(
        monkeypatch,
        [
            (1, introduced("a")),
            (2, "its node failed"),
            (3, introduced("a")),
            (4, introduced("c", refused="not approved", waiting=True)),
            (4, introduced("c")),
        ],
    )
    assert gathered == ({"a": 1, "c": 4}, {"a": 9, "c": 9})
    assert asked == {2, 4}
    assert notes == [
        "a participates with 9 examples (node 1)",
        "node 2 does not participate yet: its node failed",
        "a does not participate: another node has this id",
        "c does not participate yet: not approved",
        "c participates with 9 examples (node 4)",
    ]


@pytest.mark.parametrize(
    ("again", "gathered"),
    [
        (introduced("a", examples=8), ({"a": 1, "b": 2}, {"a": 8, "b": 9})),
        (introduced("c"), ({"c": 1, "b": 2}, {"c": 9, "b": 9})),
        ("its node failed", None),
    ],
    ids=["same id", "another id", "failure"],
)
def test_a_node_that_comes_back_counts_once_as_what_it_is_now(
    again: Envelope | str, gathered: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    replies: list[tuple[int, Envelope | str]] = [(1, introduced("a")), (1, again), (2, introduced("b"))]
    if gathered is None:
        with refused("nodes", r"1 of 2 nodes .*its node failed"):
            gather(monkeypatch, replies)
    else:
        assert gather(monkeypatch, replies)[0][0] == gathered


def test_a_node_that_restarts_under_another_number_replaces_the_one_that_is_gone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    replies: list[tuple[int, Envelope | str]] = [(1, introduced("a")), (3, introduced("a")), (2, introduced("b"))]
    assert gather(monkeypatch, replies, offline=[1])[0][0][0] == {"a": 3, "b": 2}


def test_a_resumed_run_needs_the_clients_with_which_it_began(monkeypatch: pytest.MonkeyPatch) -> None:
    replies: list[tuple[int, Envelope | str]] = [(node, introduced(id)) for node, id in enumerate("cab", 1)]
    (gathered, _), notes = gather(monkeypatch, replies, begun=["a", "b"])
    assert gathered[0] == {"a": 2, "b": 3}
    assert notes[0] == "c does not participate: this run began with a, b"


def test_too_few_nodes_are_an_error_with_their_reasons(monkeypatch: pytest.MonkeyPatch) -> None:
    replies = [(1, introduced("a")), (2, introduced("b", version="0.0.9")), (3, introduced("c", examples=0))]
    with refused("nodes", r"1 of 2 nodes.*b: it runs fedspan 0\.0\.9.*c: it declares no") as caught:
        gather(monkeypatch, replies)
    assert caught.value.field == "nodes"
