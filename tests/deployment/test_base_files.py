"""Base models that a server offers: which files, and what a node receives of them, keeps and uses."""

import hashlib
import json
import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from pydantic import ValidationError

from fedspan.clients.refusals import describe_error
from fedspan.config.node import NodeConfig
from fedspan.deployment import base_files, base_offers
from fedspan.deployment.base_checks import list_shards, require_own_names, require_weights_of_config
from fedspan.deployment.base_files import BaseMissingError
from fedspan.deployment.base_offers import BaseFile
from fedspan.deployment.node import NodeService
from fedspan.errors import FedspanError
from fedspan.transports.http.client import RefusedError
from helpers import refusals, tiny
from helpers.captured_log import CapturedLog
from helpers.node_service import introduced, node, values
from helpers.refusals import refused

NAME = "clinic/encoder"
"""Name of a model that no machine has."""


def make_fetch(folder: Path, files: list[BaseFile], *, block: int = 3000, fails_at: int = -1) -> Callable[..., bytes]:
    """A server that sends blocks of files, and whose connection breaks once."""
    names, calls = {file.sha256: file.name for file in files}, [0]

    def fetch(offer: str, file: str, offset: int) -> bytes:
        assert offer == base_offers.compute_offer_digest(files)
        calls[0] += 1
        if calls[0] == fails_at:
            raise OSError("the connection was lost")
        return (folder / names[file]).read_bytes()[offset : offset + block]

    return fetch


def receive(folder: Path, fetch: Callable[..., bytes]) -> None:
    downloads = base_files.BaseDownloads(folder)
    downloads.start(fetch)
    if downloads._thread is not None:
        downloads._thread.join(20)


def make_node(folder: Path, **limits: Any) -> NodeConfig:
    values = {"id": "a", "server": "localhost:1", "folder": str(folder), "limits": {"accept_base": True, **limits}}
    return NodeConfig.model_validate(values)


def ask(node: NodeConfig, files: list[BaseFile]) -> str:
    """Ask for a model; the reason why the node waits for it, or nothing if it has it."""
    try:
        base_files.require_base(node, NAME, None, files)
    except BaseMissingError as error:
        return str(error)
    return ""


def test_a_node_receives_a_model_once_and_continues_after_a_broken_connection(model: Path, tmp_path: Path) -> None:
    made, files = make_node(tmp_path / "node"), base_offers.list_base_files(model)
    assert "0 % of 0.0 MB" in ask(made, files)
    for fails_at in (1, 2, 4):  # blocks of 2, 10240 and 4 bytes
        receive(tmp_path / "node", make_fetch(model, files, fails_at=fails_at))
        assert "% of" in ask(made, files)
    assert "80 %" in ask(made, files)
    requested = list[int]()
    fetch = make_fetch(model, files)
    receive(tmp_path / "node", lambda *request: requested.append(request[2]) or fetch(*request))
    assert requested == [9000, 0]
    assert ask(made, files) == ""
    received = base_files.find_received_base(made, files)
    assert {path.name: path.read_bytes() for path in received.iterdir()} == {
        file.name: (model / file.name).read_bytes() for file in files
    }
    receive(tmp_path / "node", pytest.fail)


def test_a_file_of_another_hash_or_size_is_not_used(model: Path, tmp_path: Path) -> None:
    made, files = make_node(tmp_path / "node"), base_offers.list_base_files(model)
    ask(made, files)
    other = tmp_path / "other"
    shutil.copytree(model, other)
    (other / "model.safetensors").write_bytes(bytes(10240))
    receive(tmp_path / "node", make_fetch(other, files))
    assert base_files.find_received_base(made, files) is None
    (other / "model.safetensors").write_bytes(bytes(20000))
    receive(tmp_path / "node", make_fetch(other, files))
    assert base_files.find_received_base(made, files) is None
    receive(tmp_path / "node", make_fetch(model, files))  # the wrong bytes are not kept
    assert base_files.find_received_base(made, files) is not None


def test_a_config_that_names_code_or_other_files_is_not_used(model: Path, tmp_path: Path) -> None:
    files = base_offers.list_base_files(model)
    for config in (b"[]", b'{"a":1,"auto_map":{}}', b'{"vocab_file":"/etc/passwd"}'):
        (model / "config.json").write_bytes(config)
        made = make_node(tmp_path / "node")
        changed = [file if file.name != "config.json" else make_file(model, "config.json") for file in files]
        ask(made, changed)
        receive(tmp_path / "node", make_fetch(model, changed))
        assert base_files.find_received_base(made, changed) is None


def make_file(folder: Path, name: str) -> BaseFile:
    content = (folder / name).read_bytes()
    return BaseFile(name=name, size=len(content), sha256=hashlib.sha256(content).hexdigest())


def test_a_received_model_is_not_used_if_it_is_damaged_or_the_node_accepts_none(model: Path, tmp_path: Path) -> None:
    """What a server reads of it has names of files, which are its own, but not where they are, which is the owner's."""
    made, files = make_node(tmp_path / "node"), base_offers.list_base_files(model)
    ask(made, files)
    receive(tmp_path / "node", make_fetch(model, files))
    received = base_files.find_received_base(made, files)
    assert received is not None
    assert [base_files.is_received(made, str(path)) for path in (received, model)] == [True, False]
    assert base_files.find_received_base(make_node(tmp_path / "node", accept_base=False), files) is None
    (received / "vocab.txt").write_text("longer than it was")
    with refusals.refused("limits.accept_base"):
        base_files.find_received_base(made, files)
    (received / "vocab.txt").unlink()
    with pytest.raises(FedspanError) as damaged:
        base_files.find_received_base(made, files)
    said = describe_error(damaged.value)
    assert "the received base model is damaged (vocab.txt: No such file or directory)" in said
    assert str(tmp_path) not in said


def test_a_request_that_was_written_again_after_the_model_arrived_is_deleted(model: Path, tmp_path: Path) -> None:
    made, files = make_node(tmp_path / "node"), base_offers.list_base_files(model)
    ask(made, files)
    (request,) = (tmp_path / "node" / "bases").glob("*.json")
    content = request.read_bytes()
    receive(tmp_path / "node", make_fetch(model, files))
    request.write_bytes(content)
    request.with_suffix(".part").mkdir()
    receive(tmp_path / "node", lambda *_: pytest.fail("fetched"))
    assert [path.name for path in (tmp_path / "node" / "bases").iterdir()] == [request.stem]


def test_an_offer_of_wrong_files_is_given_up(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made, files = make_node(tmp_path / "node"), base_offers.list_base_files(model)
    downloads, now = base_files.BaseDownloads(tmp_path / "node"), [0.0]
    monkeypatch.setattr(base_files, "time", SimpleNamespace(monotonic=lambda: now[0], time=time.time))
    fetched = list[int]()
    other = tmp_path / "other"
    shutil.copytree(model, other)
    (other / "config.json").write_text("[]")
    fetch = make_fetch(other, files)

    def run() -> int:
        """The number of blocks that are fetched when the node asks for orders."""
        fetched.clear()
        downloads.start(lambda *request: fetched.append(1) or fetch(*request))
        if downloads._thread is not None:
            downloads._thread.join(20)
        return len(fetched)

    ask(made, files)
    assert run() == 1
    assert run() == 0  # a pause of 10 s
    now[0] = 10.0
    assert run() == 1
    now[0] = 29.0
    assert run() == 0  # it has doubled
    now[0] = 30.0
    assert run() == 1
    (refused,) = (tmp_path / "node" / "bases").iterdir()
    assert refused.suffix == ".refused"
    with refusals.refused("limits.accept_base"):
        ask(made, files)
    os.utime(refused, (0, 0))
    assert "receives" in ask(made, files)


def test_a_request_is_deleted_when_its_offer_has_ended_or_no_invitation_renews_it(model: Path, tmp_path: Path) -> None:
    made, files = make_node(tmp_path / "node"), base_offers.list_base_files(model)

    def fail(*_: object) -> bytes:
        raise RefusedError(404, "not a file of a base model that is offered", {})

    ask(made, files)
    receive(tmp_path / "node", fail)
    folder = tmp_path / "node" / "bases"
    assert not list(folder.glob("*.json"))
    ask(made, files)
    receive(tmp_path / "node", make_fetch(model, files, fails_at=2))
    assert list(folder.glob("*.json"))
    for path in folder.iterdir():
        os.utime(path, (0, 0))
    receive(tmp_path / "node", lambda *_: pytest.fail("fetched"))
    assert not list(folder.iterdir())


def test_no_more_is_received_than_the_disk_has_room_for(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, files = make_node(tmp_path / "node"), base_offers.list_base_files(model)
    size, free = sum(file.size for file in files), [0]
    monkeypatch.setattr(base_files.shutil, "disk_usage", lambda _: SimpleNamespace(free=free[0]))
    free[0] = 2**30 + size - 1
    with refusals.refused("limits.accept_base"):
        ask(made, files)
    free[0] = 2**30 + size
    assert "receives" in ask(made, files)
    (model / "vocab.txt").write_text("z")
    with refusals.refused("limits.accept_base"):  # the first one needs this space
        ask(made, base_offers.list_base_files(model))
    (model / "vocab.txt").write_bytes(b"a\nb\n")
    free[0] = 2**30 - 1  # another program has used it
    receive(tmp_path / "node", make_fetch(model, files))
    free[0] = 2**40
    assert "(0 %" in ask(made, files)
    receive(tmp_path / "node", make_fetch(model, files))
    assert ask(made, files) == ""


def test_a_node_that_does_not_accept_or_need_a_model_does_not_ask_for_it(model: Path, tmp_path: Path) -> None:
    files = base_offers.list_base_files(model)
    assert ask(make_node(tmp_path / "node", accept_base=False), files) == ""
    assert ask(make_node(tmp_path / "node").model_copy(update={"models": {NAME: str(model)}}), files) == ""
    base_files.require_base(make_node(tmp_path / "node"), str(model), None, files)  # a folder of this machine
    assert ask(make_node(tmp_path / "node"), []) == ""
    assert not (tmp_path / "node").exists()


def test_a_model_that_is_larger_than_allowed_is_refused(model: Path, tmp_path: Path) -> None:
    (model / "model.safetensors").write_bytes(bytes(2**20))
    with refused("limits.base_mib"):
        base_files.require_base(make_node(tmp_path, base_mib=1), NAME, None, base_offers.list_base_files(model))


@pytest.mark.parametrize("received", [True, False])
def test_all_models_that_were_asked_for_have_a_limit_together(received: bool, model: Path, tmp_path: Path) -> None:
    (model / "model.safetensors").write_bytes(bytes(600_000))
    made, files = make_node(tmp_path / "node", base_mib=1), base_offers.list_base_files(model)
    ask(made, files)
    if received:
        receive(tmp_path / "node", make_fetch(model, files, block=2**16))
    (model / "vocab.txt").write_text("another")
    with refusals.refused("limits.base_mib"):
        ask(made, base_offers.list_base_files(model))


def test_few_models_are_asked_for_at_a_time(model: Path, tmp_path: Path) -> None:
    made = make_node(tmp_path / "node")
    for number in range(4):
        (model / "vocab.txt").write_text(str(number))
        assert "receives" in ask(made, base_offers.list_base_files(model))
    assert "receives" in ask(made, base_offers.list_base_files(model))
    (model / "vocab.txt").write_text("another")
    with refusals.refused("limits.accept_base"):
        ask(made, base_offers.list_base_files(model))


def test_a_damaged_request_is_reported(model: Path, tmp_path: Path) -> None:
    made, files = make_node(tmp_path / "node"), base_offers.list_base_files(model)
    ask(made, files)
    (wanted,) = (tmp_path / "node" / "bases").glob("*.json")
    assert base_files.read_request(wanted) == files
    for content in ("", "{}", "[1]", json.dumps([files[0].model_dump()])):
        wanted.write_text(content)
        with pytest.raises(FedspanError, match="damaged"):
            base_files.read_request(wanted)


def test_where_a_model_comes_from_is_described(model: Path, tmp_path: Path) -> None:
    assert base_files.describe_base(make_node(tmp_path), str(model)) == str(model)
    assert "received from a server" in base_files.describe_base(make_node(tmp_path), NAME)
    assert "limits.accept_base: true" in base_files.describe_base(make_node(tmp_path, accept_base=False), NAME)
    named = make_node(tmp_path).model_copy(update={"models": {"x": str(model), "y": str(model / "none")}})
    assert base_files.describe_base(named, "x") == str(model)
    assert "which is not a folder" in base_files.describe_base(named, "y")


def test_a_run_is_joined_with_the_model_that_the_server_offers(tiny_folder: Path, tmp_path: Path) -> None:
    config = values(tiny_folder)
    folder = Path(config["model"]["name"])
    files = base_offers.list_base_files(folder)
    local = introduced(NodeService(node(tiny_folder, tmp_path / "local")), config)
    config["model"]["name"] = NAME
    limits = {"models": [NAME], "accept_base": True}
    service = NodeService(node(tiny_folder, tmp_path / "node", limits=limits))
    waiting = introduced(service, config, base_files=tuple(files))
    assert waiting.waiting
    assert "receives the base model" in (waiting.refused or "")
    receive(tmp_path / "node", make_fetch(folder, files, block=2**16))
    joined = introduced(service, config, base_files=tuple(files))
    assert (joined.refused, joined.waiting) == (None, False)
    assert joined.base == local.base
    assert joined.examples == local.examples


@pytest.mark.parametrize("is_offered", [True, False])
def test_a_node_that_does_not_accept_the_only_source_of_its_model_names_the_limit(
    is_offered: bool, tiny_folder: Path, tmp_path: Path, caplog: CapturedLog
) -> None:
    config = values(tiny_folder)
    files = tuple(base_offers.list_base_files(Path(config["model"]["name"]))) if is_offered else ()
    config["model"]["name"] = NAME
    service = NodeService(node(tiny_folder, tmp_path / "node", limits={"models": [NAME]}))
    introduction = introduced(service, config, base_files=files)
    assert not introduction.waiting
    if is_offered:
        assert introduction.refused == (
            f"`limits.accept_base`: this node has no copy of {NAME}, could not load it from the hub, and does not "
            "receive it from the server. Its operator can set limits.accept_base: true, or name a copy under models."
        )
    else:
        assert introduction.refused == "model.name; see the client's own log"
    (line,) = caplog.messages
    assert line.startswith("the invitation to run is refused: `")
    assert "Traceback" not in caplog.text


def test_files_of_one_name_are_refused() -> None:
    from helpers.node_service import invitation

    for names in (("config.json", "config.json"), ("a.safetensors", "A.safetensors")):
        one, other = (BaseFile(name=name, size=1, sha256="0" * 64) for name in names)
        with pytest.raises(ValidationError, match="different names"):
            invitation({}, base_files=(one, other))


def test_only_weights_configs_and_tokenizers_are_offered(model: Path) -> None:
    assert [file.name for file in base_offers.list_base_files(model)] == [
        "config.json",
        "model.safetensors",
        "vocab.txt",
    ]


def test_the_weights_of_an_index_are_its_shards(model: Path) -> None:
    (model / "model.safetensors").unlink()
    shards = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
    for shard in shards:
        (model / shard).write_bytes(b"weights")
    index = {"weight_map": {"a": shards[0], "b": shards[1], "c": shards[0]}}
    (model / "model.safetensors.index.json").write_text(json.dumps(index))
    names = [file.name for file in base_offers.list_base_files(model)]
    assert names == ["config.json", *shards, "model.safetensors.index.json", "vocab.txt"]
    (model / shards[1]).unlink()
    with refusals.refused("--offer-base"):
        base_offers.list_base_files(model)


@pytest.mark.parametrize("missing", ["config.json", "model.safetensors"])
def test_a_folder_without_weights_in_safetensors_cannot_be_offered(model: Path, missing: str) -> None:
    (model / missing).unlink()
    (model / "model.safetensors.index.json").unlink()
    with refusals.refused("--offer-base"):
        base_offers.list_base_files(model)


@pytest.mark.parametrize(
    "name",
    [
        "../config.json",
        "/etc/x.json",
        "a/b.json",
        "model.bin",
        "model.pt",
        "code.py",
        "adapter_config.json",
        "",
        ".json",
        "config.json\n",
        "package.json",
        "1_Pooling/../config.json",
        "x" * 200 + ".json",
    ],
)
def test_names_of_other_files_are_refused(name: str) -> None:
    with pytest.raises(ValidationError):
        BaseFile(name=name, size=1, sha256="0" * 64)


def test_files_are_offered_for_the_duration_of_each_run(model: Path, tmp_path: Path) -> None:
    files = base_offers.list_base_files(model)
    (tmp_path / "bases").mkdir()
    killed = tmp_path / "bases" / f"{'a' * 64}.0123.json"  # its process ended without deleting it
    killed.write_text("{}")
    with base_offers.offer_base(tmp_path, model, files):
        (offer,) = (tmp_path / "bases").glob("*.json")
        assert offer.name.partition(".")[0] == base_offers.compute_offer_digest(files)
        paths = json.loads(offer.read_text())
        assert {Path(path).name for path in paths.values()} == {file.name for file in files}
        with base_offers.offer_base(tmp_path, model, files):
            assert len(list((tmp_path / "bases").glob("*.json"))) == 2
        assert list((tmp_path / "bases").glob("*.json")) == [offer]
    assert not list((tmp_path / "bases").iterdir())


def write(folder: Path, **files: Any) -> list[str]:
    """Write JSON files, each named by its stem, beside weights; the names of all."""
    (folder / "model.safetensors").write_bytes(bytes(10))
    (folder / "vocab.txt").write_text("a")
    for stem, value in files.items():
        (folder / f"{stem}.json").write_text(json.dumps(value))
    return [path.name for path in folder.iterdir()]


@pytest.mark.parametrize(
    "shard",
    ["../private/secret.safetensors", "/etc/secret.safetensors", "a/b.safetensors", "../x.bin", "x.bin", "", 1, None],
)
def test_an_index_names_files_of_its_folder_only(shard: object, tmp_path: Path) -> None:
    index = json.dumps({"weight_map": {"a": "model-1.safetensors", "b": shard}}).encode()
    with pytest.raises(ValueError, match="names another file"):
        list_shards(index)


def test_an_index_names_listed_files_only(tmp_path: Path) -> None:
    shards = ["model-1.safetensors", "model-2.safetensors"]
    for name in shards:
        (tmp_path / name).write_bytes(b"")
    (tmp_path / "config.json").write_text("{}")
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": dict(zip("ab", shards, strict=True))}))
    names = ["config.json", index.name]
    require_own_names(tmp_path, [*names, *shards])
    with pytest.raises(ValueError, match="not listed"):
        require_own_names(tmp_path, [*names, shards[0]])
    for content in ("{}", "[]", '{"weight_map": {}}'):
        index.write_text(content)
        with pytest.raises(ValueError, match="no weight_map"):
            require_own_names(tmp_path, [*names, *shards])


@pytest.mark.parametrize(
    "value",
    [
        {"vocab_file": "/etc/passwd"},
        {"tokenizer_file": "other.json"},
        {"merges": "../merges.txt"},
        {"source_spm": "C:\\x"},
        {"nested": [{"some_kwarg": "../secret"}]},
        {"fast_tokenizer_files": ["tokenizer.json", "../x.json"]},
        {"transformers_weights": "vocab.txt"},
        {"_attn_implementation": "someone/kernel"},
        {"text_config": {"auto_map": {}}},
        [],
    ],
)
@pytest.mark.parametrize("stem", ["config", "tokenizer_config"])
def test_a_config_names_no_other_files_and_no_code(stem: str, value: Any, tmp_path: Path) -> None:
    names = write(tmp_path, **{stem: value})
    with pytest.raises(ValueError, match=r"names another file|names code|not a JSON object"):
        require_own_names(tmp_path, names)


def test_texts_with_slashes_and_own_files_are_allowed(tmp_path: Path) -> None:
    names = write(
        tmp_path,
        config={"_name_or_path": "/home/me/model", "id2label": {"0": "a/b"}, "vocab_size": 2**20},
        tokenizer_config={
            "eos_token": "</s>",
            "added_tokens_decoder": {"0": {"content": "/"}},
            "chat_template": "</s>",
            "vocab_file": "vocab.txt",
            "tokenizer_file": None,
            "special_tokens_map_file": "/tmp/x",
            "model_max_length": 10**30,
        },
        vocab={"/": 0},
        modules=[{"path": "", "type": "a.Transformer"}, {"path": "1_Pooling", "type": "a.Pooling"}],
    )
    require_own_names(tmp_path, names)


def test_the_folder_of_a_pooling_is_the_models_own(tmp_path: Path) -> None:
    names = write(tmp_path, modules=[{"path": "../other", "type": "a.Pooling"}])
    with pytest.raises(ValueError, match="names another file"):
        require_own_names(tmp_path, names)


_TABLE = {"max_position_embeddings": 2**20, "dim": 65}
"""Each number is small enough, and some models compute a table of that size before anything is allocated."""


@pytest.mark.parametrize(
    "value", [{"vocab_size": 2**20 + 1}, {"num_hidden_layers": 1025}, {"a": [{"b": -(10**9)}]}, _TABLE]
)
def test_a_config_has_no_numbers_beyond_its_weights(value: Any, tmp_path: Path) -> None:
    names = write(tmp_path, config=value)
    with pytest.raises(ValueError, match="the weights allow"):
        require_own_names(tmp_path, names)


def test_a_model_that_is_larger_than_its_weights_is_refused(tiny_folder: Path, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(tiny.config(tiny_folder).model.name, folder)
    require_weights_of_config(folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "vocab_size": 10**9}))
    with refusals.refused("limits.accept_base"):
        require_weights_of_config(folder)
