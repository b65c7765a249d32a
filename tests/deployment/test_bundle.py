"""The folder that a data owner gets: every file fits the others, the server and the commands that it names."""

from __future__ import annotations

import hashlib
import re
import ssl
import tomllib
from pathlib import Path

import pytest
import yaml
from click.testing import CliRunner

from fedspan import __version__
from fedspan.config.node import load_node
from fedspan.deployment.bundle import FILES, write_bundle
from fedspan.deployment.deploy import check_node
from fedspan.errors import FedspanError
from fedspan.transports.flower.server import prepare_folder
from helpers.command_line import get_program

ROOT = Path(__file__).resolve().parents[2]
DEPLOY, TEMPLATES = ROOT / "deploy", ROOT / "src" / "fedspan" / "deployment" / "templates"
IDS = ["clinic-a", "Klinik Süd: 100%", "- {a: b}", 'quote " and $dollar']


def call(*arguments: str) -> str:
    result = CliRunner().invoke(get_program(), list(arguments))
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
    assert f"'fedspan-{__version__}-py3-none-any.whl[flower,secagg,privacy,demo]'" in readme
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
    assert set(installed.split(",")) == {"flower", "secagg", "privacy", "demo"} | extras
    assert set(installed.split(",")) <= project["optional-dependencies"].keys()


@pytest.mark.parametrize("id", ["", "two\nlines", "\x1b[31m"])
def test_an_id_that_is_no_text_is_refused(id: str, authority: Path, tmp_path: Path) -> None:
    with pytest.raises(FedspanError, match="--bundle"):
        write_bundle(tmp_path / "bundles", id, "fl.example.org:9092", authority)


def test_a_bundle_is_not_replaced(authority: Path, tmp_path: Path) -> None:
    write_bundle(tmp_path / "bundles", "clinic-a", "fl.example.org:9092", authority)
    with pytest.raises(FedspanError, match="exists"):
        write_bundle(tmp_path / "bundles", "clinic-a", "fl.example.org:9092", authority)


def test_a_server_writes_bundles_and_a_data_owner_checks_its_own(tmp_path: Path) -> None:
    pytest.importorskip("flwr", reason="needs fedspan[flower]")
    folder = tmp_path / "server"
    said = call("server", "--folder", str(folder), "--name", "localhost", "--port", "1", "--bundle", "clinic-a")
    bundle = folder / "bundles" / "clinic-a"
    assert str(bundle) in said
    assert hashlib.sha256((folder / "ca.crt").read_bytes()).hexdigest() in said
    assert "fedspan admit node.key.pub --as clinic-a --server" in said
    (bundle / "data" / "train.csv").write_text("text,label\n")
    call("join", "--new-key", str(bundle / "node.key"))
    with pytest.raises(FedspanError, match=r"no connection to localhost:1 \(Connection refused\)"):
        check_node(bundle / "node.yaml")
    (bundle / "data" / "train.csv").unlink()
    with pytest.raises(FedspanError, match=r"data\.train"):
        check_node(bundle / "node.yaml")


def test_a_bundle_has_the_port_of_the_server_and_changes_nothing(tmp_path: Path) -> None:
    pytest.importorskip("flwr", reason="needs fedspan[flower]")
    prepare_folder(tmp_path, 443, ["localhost"], insecure=False)
    before = (tmp_path / "server.json").read_bytes()
    call("server", "--folder", str(tmp_path), "--name", "localhost", "--bundle", "clinic-a")
    assert (tmp_path / "server.json").read_bytes() == before
    assert load_node(tmp_path / "bundles" / "clinic-a" / "node.yaml").server == "localhost:443"


def test_a_bundle_without_a_name_has_the_first_of_the_server_s_certificate(tmp_path: Path) -> None:
    pytest.importorskip("flwr", reason="needs fedspan[flower]")
    prepare_folder(tmp_path, 443, ["fl.example.org", "10.0.0.1"], insecure=False)
    call("server", "--folder", str(tmp_path), "--bundle", "clinic-a")
    assert load_node(tmp_path / "bundles" / "clinic-a" / "node.yaml").server == "fl.example.org:443"


def test_a_bundle_has_an_ipv6_address_in_brackets_and_renewed_certificates(tmp_path: Path) -> None:
    pytest.importorskip("flwr", reason="needs fedspan[flower]")
    from fedspan.transports.flower.keys import renew_authority

    prepare_folder(tmp_path, 443, ["2001:db8::1"], insecure=False)
    renewed = renew_authority(tmp_path, []).read_bytes()
    said = call("server", "--folder", str(tmp_path), "--bundle", "clinic-a")
    assert load_node(tmp_path / "bundles" / "clinic-a" / "node.yaml").server == "[2001:db8::1]:443"
    assert (tmp_path / "bundles" / "clinic-a" / "ca.crt").read_bytes() == renewed
    assert renewed.endswith((tmp_path / "ca.crt").read_bytes()[-200:]), "those in use are accepted, too"
    assert hashlib.sha256(renewed).hexdigest() in said


def test_a_check_passes_and_says_what_it_saw(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("flwr", reason="needs fedspan[flower]")
    monkeypatch.setattr("fedspan.transports.flower.reachability.check_server", lambda address, authority: "reached")
    folder = tmp_path / "server"
    call("server", "--folder", str(folder), "--name", "localhost", "--bundle", "clinic-a")
    bundle = folder / "bundles" / "clinic-a"
    call("join", "--new-key", str(bundle / "node.key"))
    (bundle / "data" / "train.csv").write_text("text,label\n")
    said = call("join", str(bundle / "node.yaml"), "--check")
    assert "node clinic-a" in said
    assert "data/train.csv" in said
    assert "server: reached" in said
    (bundle / "node.key").chmod(0o644)
    with pytest.raises(FedspanError, match="others can read the key"):
        check_node(bundle / "node.yaml")


@pytest.mark.parametrize(
    ("data", "said"),
    [
        ({"train": "{site}/train.csv"}, "1 files match"),
        ({"train": ["a/train.csv"]}, "a/train.csv"),
        ({"train": "banking77"}, "loaded as a named data set"),
        ({}, "fedspan.join(file, trainer=...)"),
    ],
)
def test_a_check_knows_all_kinds_of_data(
    data: dict[str, object], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("flwr", reason="needs fedspan[flower]")
    monkeypatch.setattr("fedspan.transports.flower.reachability.check_server", lambda address, authority: "reached")
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "train.csv").write_text("text,label\n")
    (tmp_path / "node.yaml").write_text(yaml.safe_dump({"id": "a", "server": "localhost:1", "data": data}))
    monkeypatch.chdir(tmp_path)
    assert said in "\n".join(check_node("node.yaml", insecure=True))


def test_bundles_need_a_name_and_tls(tmp_path: Path) -> None:
    pytest.importorskip("flwr", reason="needs fedspan[flower]")
    for more, message in ((["--insecure", "--name", "localhost"], "without TLS"), ([], "--name")):
        result = CliRunner().invoke(get_program(), ["server", "--folder", str(tmp_path / "s"), "--bundle", "a", *more])
        assert result.exit_code == 2
        assert message in result.output


def test_a_bundle_s_certificate_is_that_of_the_server(tmp_path: Path) -> None:
    pytest.importorskip("flwr", reason="needs fedspan[flower]")
    link = prepare_folder(tmp_path, 9092, ["localhost"], insecure=False)
    assert link.authority is not None
    bundle = write_bundle(tmp_path / "bundles", "clinic-a", "localhost:9092", link.authority)
    ssl.create_default_context(cafile=str(bundle / "ca.crt"))
