"""Joining and submitting, models that a server can offer, a data owner's folder, and damaged files of a node."""

import hashlib
import importlib
import os
import random
import re
import ssl
import tomllib
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import yaml
from click.testing import CliRunner

from fedspan import __version__
from fedspan.clients.store import DiskClientStore, LostStateError
from fedspan.config.node import load_node
from fedspan.core.base import BaseUpdate, Increment
from fedspan.core.values import OptimizerState
from fedspan.deployment import deploy
from fedspan.deployment.bundle import FILES, write_bundle
from fedspan.deployment.deploy import check_node
from fedspan.deployment.handshake import Invitation
from fedspan.deployment.health import Heartbeat
from fedspan.deployment.last_order import LastOrder, load_last_order
from fedspan.deployment.node import load_invitation
from fedspan.errors import FedspanError
from fedspan.federation.progress import ClientState
from fedspan.training.stages import Stages
from fedspan.transports.http import node as nodes
from fedspan.transports.http.keys import renew_authority
from fedspan.transports.http.server import prepare_folder
from helpers import refusals, tiny
from helpers.command_line import get_program
from helpers.fuzzing import mangled
from helpers.node_service import values
from helpers.refusals import refused


@pytest.fixture
def links(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[Any]:
    """What a node would be served with: connection data, the function before orders, and what its heartbeats say."""
    found = list[Any]()

    def serve(link: Any, answer: Any, stop: Any, on_idle: Any, before_order: Any, get_work: Any) -> None:
        on_idle()
        works = [get_work()]
        with Stages(Heartbeat(tmp_path / "state").observe).stage("training", 3):
            works.append(get_work())
        found.append((link, before_order, works))

    monkeypatch.setattr(nodes, "serve", serve)
    monkeypatch.setattr(deploy, "Supervisor", lambda *_: SimpleNamespace(answer=None, close=lambda: None))
    return found


def write_examples(path: Path, columns: str = "text,label", count: int = 20) -> None:
    rows = (f"how do I cancel order {number},{'billing' if number % 2 else 'orders'}" for number in range(count))
    path.write_text("\n".join([columns, *rows]))


def write_node(folder: Path, **changes: Any) -> Path:
    values = {"id": "a", "server": "localhost:1", "folder": "state", "data": {"train": "data.csv"}, **changes}
    write_examples(folder / "data.csv")
    path = folder / "node.yaml"
    path.write_text(yaml.safe_dump(values))
    return path


def test_bandwidth_is_in_megabits_per_second(links: list[Any], tmp_path: Path) -> None:
    deploy.join(write_node(tmp_path, bandwidth={"up_mbit": 2, "down_mbit": 10}), insecure=True)
    deploy.join(write_node(tmp_path), insecure=True)
    limits = [(link.up, link.down) for link, *_ in links]
    assert limits == [(250_000.0, 1_250_000.0), (None, None)]


def test_a_node_receives_base_models_only_if_its_file_says_so(links: list[Any], tmp_path: Path) -> None:
    deploy.join(write_node(tmp_path), insecure=True)
    deploy.join(write_node(tmp_path, limits={"accept_base": True}), insecure=True)
    assert [before_order is not None for _, before_order, _ in links] == [False, True]


def test_a_node_s_heartbeats_say_what_its_file_says(links: list[Any], tmp_path: Path) -> None:
    deploy.join(write_node(tmp_path), insecure=True)
    assert [works for *_, works in links] == [[None, ("training", 0)]]


def test_a_node_s_folder_is_not_for_other_users(
    links: list[Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(nodes, "check_server", lambda *_: "reached")
    path = write_node(tmp_path)
    deploy.check_node(path, insecure=True)
    assert not (tmp_path / "state").exists()
    deploy.join(path, insecure=True)
    assert (tmp_path / "state").stat().st_mode & 0o777 == 0o700
    (tmp_path / "state").chmod(0o755)
    for use in (deploy.check_node, deploy.join):
        with refused("folder"):
            use(path, insecure=True)


@pytest.mark.parametrize(
    ("module", "function", "arguments"),
    [
        ("fedspan.transports.http.supervision", "supervise", ["server", "--insecure", "--folder", "server"]),
        ("fedspan.deployment.deploy", "join", ["join", "node.yaml", "--insecure"]),
        ("fedspan.deployment.deploy", "submit", ["submit", "config.yaml", "--server", "server"]),
    ],
)
def test_no_other_user_reads_what_the_commands_write(
    module: str, function: str, arguments: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def write(*_: Any, **__: Any) -> None:
        Path("written").touch()
        raise FedspanError("test", None, problem="the file is written")

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(importlib.import_module(module), function, write)
    prepare_folder(Path("server"), 9092, [], insecure=True)
    before = os.umask(0o022)
    try:
        result = CliRunner().invoke(get_program(), arguments)
        assert "the file is written" in result.output
        assert Path("written").stat().st_mode & 0o777 == 0o600
        assert os.umask(0o022) == 0o022  # of a process that calls the command's function
    finally:
        os.umask(before)


def test_the_check_of_a_node_says_where_its_models_are(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(nodes, "check_server", lambda *_: "reached")
    limits = {"models": ["clinic/encoder", "google/*", "builtin:all-minilm-l6-v2"]}
    path = write_node(tmp_path, models={"ours": str(tmp_path)}, limits=limits)
    lines = [line for line in deploy.check_node(path, insecure=True) if line.startswith("model ")]
    assert [line.partition(":")[0] for line in lines] == ["model ours", "model clinic/encoder"]
    assert lines[0].endswith(str(tmp_path))
    assert "not on this machine" in lines[1]
    path = write_node(tmp_path, data={}, limits=limits)
    assert "model clinic/encoder: the trainer has its own" in deploy.check_node(path, insecure=True)


def test_a_resumed_run_offers_the_same_base(tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A received model is used only while it is offered, and its files are part of the job that an owner approved."""
    invitations = list[Invitation]()

    class Interrupted:
        def __init__(self, link: Any, run_folder: Any, prepared: Any, invitation: Invitation, *_: Any) -> None:
            invitations.append(invitation)

        def gather(self, server: Any) -> None:
            raise KeyboardInterrupt

    monkeypatch.setattr(deploy, "Submission", Interrupted)
    monkeypatch.setattr("fedspan.transports.http.server.attach", lambda *_: nullcontext())
    link: Any = SimpleNamespace(folder=tmp_path, authority=None)
    with monkeypatch.context() as context:
        context.setattr(deploy, "find_local_base", lambda *_: None)  # of a model that cannot be offered
        with refusals.refused("--offer-base"):
            deploy.submit(values(tiny_folder), tmp_path / "plain", link, offer=True)
    for name, offer in (("offered", True), ("plain", False)):
        started = name == "plain"
        with pytest.raises(KeyboardInterrupt):
            deploy.submit(None if started else values(tiny_folder), tmp_path / name, link, resume=started, offer=offer)
        with pytest.raises(KeyboardInterrupt):
            deploy.submit(None, tmp_path / name, link, resume=True)
    first, resumed, *others = invitations
    assert first.base_files
    assert resumed == first
    assert [invitation.base_files for invitation in others] == [(), ()]


def test_a_base_that_is_no_folder_of_the_server_cannot_be_offered(tiny_folder: Path) -> None:
    config = tiny.config(tiny_folder)
    assert deploy._find_offered_base(config) == Path(config.model.name)
    for name in ("builtin:all-minilm-l6-v2", "clinic/encoder"):
        other = config.model_copy(update={"model": config.model.model_copy(update={"name": name})})
        with refusals.refused("--offer-base"):
            deploy._find_offered_base(other)


ROOT = Path(__file__).resolve().parents[2]
DEPLOY, TEMPLATES = ROOT / "deploy", ROOT / "src" / "fedspan" / "deployment" / "templates"
IDS = ["clinic-a", "Klinik Süd: 100%", "- {a: b}", 'quote " and $dollar']


def call(*arguments: str) -> str:
    result = CliRunner().invoke(get_program(), arguments)
    assert result.exit_code == 0, result.output
    return result.output


@pytest.fixture
def authority(tmp_path: Path) -> Path:
    path = tmp_path / "ca.crt"
    path.write_text("a certificate")
    return path


@pytest.mark.parametrize("id", IDS)
def test_every_file_has_the_id_and_the_address(id: str, authority: Path, tmp_path: Path) -> None:
    bundle = write_bundle(tmp_path / "bundles", id, "fl.example.org:9092", authority)
    assert {path.name for path in bundle.iterdir()} == {*FILES, "ca.crt", "data"}
    (bundle / "data" / "train.csv").write_text("text,label\n")
    node = load_node(bundle / "node.yaml")
    assert (node.id, node.server, node.limits.approve) == (id, "fl.example.org:9092", "ask")
    assert node.authority == str(bundle / "ca.crt")
    assert node.data["train"] == str(bundle / "data" / "train.csv")
    compose = yaml.safe_load((bundle / "compose.yaml").read_text())
    assert re.fullmatch(r"[a-z0-9][a-z0-9_-]*", compose["name"])
    assert compose["services"]["node"]["image"].endswith(__version__)
    readme = (bundle / "README.md").read_text()
    assert f"'fedspan-{__version__}-py3-none-any.whl[deploy,secagg,privacy,demo]'" in readme
    assert not re.search(r"\$[a-z{]", readme.replace(id, ""))


def test_the_commands_of_the_instructions_exist(authority: Path, tmp_path: Path) -> None:
    bundle = write_bundle(tmp_path / "bundles", "clinic-a", "fl.example.org:9092", authority)
    text = "".join((bundle / name).read_text() for name in FILES)
    commands = set(re.findall(r"`fedspan ([a-z]+) ", text))
    assert {"join", "approve", "audit"} <= commands
    notes = (DEPLOY / "helm" / "fedspan" / "templates" / "NOTES.txt").read_text()
    of_notes = set(re.findall(r"-- fedspan ([a-z]+) ", notes))
    assert {"server", "admit", "submit", "approve"} <= of_notes
    for command in commands | of_notes:
        call(command, "--help")


@pytest.mark.parametrize(
    ("path", "extras"),
    [
        (DEPLOY / "Dockerfile", {"web"}),
        (DEPLOY / "systemd" / "fedspan-server.service", {"web"}),
        (TEMPLATES / "README.md", set()),
        (TEMPLATES / "fedspan-node.service", set()),
    ],
    ids=lambda value: value.name if isinstance(value, Path) else "",
)
def test_images_and_units_can_load_the_default_model(path: Path, extras: set[str]) -> None:
    """Nothing can be installed later in a container with a read-only root file system."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    pattern = r"(?m)^ARG EXTRAS=(\S+)$" if path.name == "Dockerfile" else r"\.whl\[([a-z,]+)\]"
    (installed,) = re.findall(pattern, path.read_text())
    assert set(installed.split(",")) == {"deploy", "secagg", "privacy", "demo"} | extras
    assert set(installed.split(",")) <= project["optional-dependencies"].keys()


@pytest.mark.parametrize("id", ["", "two\nlines", "\x1b[31m"])
def test_an_id_that_is_no_text_is_refused(id: str, authority: Path, tmp_path: Path) -> None:
    with refusals.refused("--bundle"):
        write_bundle(tmp_path / "bundles", id, "fl.example.org:9092", authority)


def test_a_bundle_is_not_replaced(authority: Path, tmp_path: Path) -> None:
    write_bundle(tmp_path / "bundles", "clinic-a", "fl.example.org:9092", authority)
    with refusals.refused("--bundle"):
        write_bundle(tmp_path / "bundles", "clinic-a", "fl.example.org:9092", authority)


def test_a_server_writes_bundles_and_a_data_owner_checks_its_own(tmp_path: Path) -> None:
    folder = tmp_path / "server"
    said = call("server", "--folder", str(folder), "--name", "localhost", "--port", "1", "--bundle", "clinic-a")
    bundle = folder / "bundles" / "clinic-a"
    assert str(bundle) in said
    assert hashlib.sha256((folder / "ca.crt").read_bytes()).hexdigest() in said
    assert "fedspan admit node.key.pub --as clinic-a --server" in said
    write_examples(bundle / "data" / "train.csv")
    call("join", "--new-key", str(bundle / "node.key"))
    with refusals.refused("server", r"no connection to localhost:1 \(.*Connection refused\)"):
        check_node(bundle / "node.yaml")
    (bundle / "data" / "train.csv").unlink()
    with refusals.refused("data.train"):
        check_node(bundle / "node.yaml")


def test_a_bundle_has_the_port_of_the_server_and_changes_nothing(tmp_path: Path) -> None:
    prepare_folder(tmp_path, 443, ["localhost"], insecure=False)
    before = (tmp_path / "server.json").read_bytes()
    call("server", "--folder", str(tmp_path), "--name", "localhost", "--bundle", "clinic-a")
    assert (tmp_path / "server.json").read_bytes() == before
    assert load_node(tmp_path / "bundles" / "clinic-a" / "node.yaml").server == "localhost:443"


def test_a_bundle_without_a_name_has_the_first_of_the_server_s_certificate(tmp_path: Path) -> None:
    prepare_folder(tmp_path, 443, ["fl.example.org", "10.0.0.1"], insecure=False)
    call("server", "--folder", str(tmp_path), "--bundle", "clinic-a")
    assert load_node(tmp_path / "bundles" / "clinic-a" / "node.yaml").server == "fl.example.org:443"


def test_a_bundle_has_an_ipv6_address_in_brackets_and_renewed_certificates(tmp_path: Path) -> None:
    prepare_folder(tmp_path, 443, ["2001:db8::1"], insecure=False)
    renewed = renew_authority(tmp_path, []).read_bytes()
    said = call("server", "--folder", str(tmp_path), "--bundle", "clinic-a")
    assert load_node(tmp_path / "bundles" / "clinic-a" / "node.yaml").server == "[2001:db8::1]:443"
    assert (tmp_path / "bundles" / "clinic-a" / "ca.crt").read_bytes() == renewed
    assert renewed.endswith((tmp_path / "ca.crt").read_bytes()[-200:]), "those in use are accepted, too"
    assert hashlib.sha256(renewed).hexdigest() in said


def test_a_check_passes_and_says_what_it_saw(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nodes, "check_server", lambda *_: "reached")
    folder = tmp_path / "server"
    call("server", "--folder", str(folder), "--name", "localhost", "--bundle", "clinic-a")
    bundle = folder / "bundles" / "clinic-a"
    call("join", "--new-key", str(bundle / "node.key"))
    write_examples(bundle / "data" / "train.csv")
    said = call("join", str(bundle / "node.yaml"), "--check")
    assert "node clinic-a" in said
    assert "data: 20 examples, about 16 of them for training, read for sequence-classification" in said
    assert "scores: none will be sent, because about 2 examples are for validation" in said
    assert "server: reached" in said
    (bundle / "node.key").chmod(0o644)
    with refusals.refused("key", "others can read the key"):
        check_node(bundle / "node.yaml")


CSV = {"train": "a/train.csv"}


@pytest.mark.parametrize(
    ("columns", "data", "said"),
    [
        ("text,label", {"train": "{site}/train.csv"}, "20 examples, about 16 of them"),
        ("text,label", {"train": "builtin:patient-messages"}, "read for sequence-classification"),
        ("note,category", {**CSV, "text": "note", "label": "category"}, "20 examples, about 16 of them"),
        ("prompt,answer", {**CSV, "prompt": "{prompt}"}, "read for causal-lm"),
        ("text,label", {}, "fedspan.join(file, trainer=...)"),
    ],
)
def test_a_check_loads_all_data(
    columns: str, data: dict[str, object], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    check_in(tmp_path, monkeypatch, columns)
    (tmp_path / "node.yaml").write_text(yaml.safe_dump({"id": "a", "server": "localhost:1", "data": data}))
    assert said in "\n".join(check_node("node.yaml", insecure=True))


@pytest.mark.parametrize(
    ("columns", "count", "data", "field", "problem"),
    [
        (
            "text,category",
            20,
            CSV,
            "data.label",
            r"no column named 'label'.*for sequence-classification \(text: text, label: category",
        ),
        ("text,label", 20, {**CSV, "label": "kind"}, "data.label", r"no column named 'kind'"),
        ("note,label", 20, CSV, "data.text", r"no column named 'text'.*\(text: note, label: label"),
        ("text,label", 19, CSV, "data.train", r"19 examples, 15 of them .*at least 16 \(limits\.train_examples\)"),
        ("text,label", 20, {"train": "b/train.csv"}, "data.train", r"b/train\.csv"),
        ("text,label", 20, {"train": "{site}/b.csv"}, "data.train", r"no file"),
        ("text,label", 20, {**CSV, "txet": "text"}, "data.txet", r"Did you mean 'text'"),
    ],
)
def test_a_check_names_what_a_run_would_miss(
    columns: str,
    count: int,
    data: dict[str, object],
    field: str,
    problem: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    check_in(tmp_path, monkeypatch, columns, count)
    (tmp_path / "node.yaml").write_text(yaml.safe_dump({"id": "a", "server": "localhost:1", "data": data}))
    with pytest.raises(FedspanError, match=problem) as caught:
        check_node("node.yaml", insecure=True)
    assert caught.value.field == field


def check_in(folder: Path, monkeypatch: pytest.MonkeyPatch, columns: str, count: int = 20) -> None:
    """Write a file with examples, and take the server as reached."""
    monkeypatch.setattr(nodes, "check_server", lambda *_: "reached")
    (folder / "a").mkdir()
    write_examples(folder / "a" / "train.csv", columns, count)
    monkeypatch.chdir(folder)


def test_bundles_need_a_name_and_tls(tmp_path: Path) -> None:
    for more, message in ((["--insecure", "--name", "localhost"], "without TLS"), ([], "--name")):
        result = CliRunner().invoke(get_program(), ["server", "--folder", str(tmp_path / "s"), "--bundle", "a", *more])
        assert result.exit_code == 2
        assert message in result.output


def test_a_bundle_s_certificate_is_that_of_the_server(tmp_path: Path) -> None:
    link = prepare_folder(tmp_path, 9092, ["localhost"], insecure=False)
    assert link.authority is not None
    bundle = write_bundle(tmp_path / "bundles", "clinic-a", "localhost:9092", link.authority)
    ssl.create_default_context(cafile=str(bundle / "ca.crt"))


NODE = {
    "id": "clinic-a",
    "server": "fl.example.org:9092",
    "authority": "ca.crt",
    "key": "node.key",
    "data": {"train": "messages.csv", "text": "message"},
    "limits": {"methods": ["fedit"], "rounds": 50, "round_seconds": 60.0},
}


def fuzz(path: Path, good: bytes, read: Callable[[Path], object], count: int, seed: int) -> None:
    """Read mutated files, of which some are refused.

    Anything but a FedspanError is a failure, and so is a file that takes long.
    """
    rng, refused = random.Random(seed), 0
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(good)
    read(path)
    for _ in range(count):
        data = mangled(good, rng)
        path.write_bytes(data)
        try:
            read(path)
        except FedspanError:
            refused += 1
        except Exception as error:
            raise AssertionError(f"{type(error).__name__}: {error}; of {data[:4000]!r}") from error
    assert refused


def test_invitations(tmp_path: Path) -> None:
    good = Invitation(run="r", version=__version__, config='{"federation": {"rounds": 3}}')
    fuzz(tmp_path / "invitation.json", good.model_dump_json().encode(), load_invitation, 500, 1)


def test_last_orders(tmp_path: Path) -> None:
    good = LastOrder(serial=1763780000000000, digest="0" * 64, starts=1)
    fuzz(tmp_path / "serial", good.model_dump_json().encode(), load_last_order, 500, 2)


def test_node_files(tmp_path: Path) -> None:
    fuzz(tmp_path / "node.yaml", yaml.safe_dump(NODE).encode(), load_node, 100, 3)


def test_what_a_client_keeps(tmp_path: Path) -> None:
    client_store = DiskClientStore(tmp_path)
    moments = OptimizerState({"exp_avg": {"layer/A": torch.ones(2, 3)}}, {"layer/A": 4})
    base = BaseUpdate().add(Increment(0, {"layer": torch.ones(2, 2)}))
    client_store.store("a", 1, ClientState({"layer/B": torch.ones(3, 2)}, {"train": (moments, 0)}, base), frozenset())
    (path,) = tmp_path.rglob("*.safetensors")
    good = path.read_bytes()

    def read(_: Path) -> object:
        try:
            return client_store.load("a", 1)
        except LostStateError as error:
            raise error from None

    fuzz(path, good, read, 300, 4)
    # With a checksum that is right: whoever can write the file can make one.
    digest = next(good[at : at + 64] for at in range(len(good)) if _is_digest(good[at : at + 64]))
    blank = good.replace(digest, b"0" * 64, 1)
    rng = random.Random(5)
    for _ in range(300):
        data = mangled(blank, rng)
        path.write_bytes(data.replace(b"0" * 64, hashlib.sha256(data).hexdigest().encode(), 1))
        try:
            read(path)
        except FedspanError:
            continue
        except Exception as error:
            raise AssertionError(f"{type(error).__name__}: {error}; of {data[:4000]!r}") from error


def _is_digest(text: bytes) -> bool:
    return len(text) == 64 and all(byte in b"0123456789abcdef" for byte in text)


def test_key_files(tmp_path: Path) -> None:
    keys = pytest.importorskip("fedspan.transports.http.keys", reason="the extra fedspan[deploy] is not installed")
    path = tmp_path / "node.key"
    keys.make_node_key(path)
    fuzz(path, path.read_bytes(), keys.load_node_key, 300, 6)
