"""The handshake of a server and its nodes before the first round: versions, labels, base model and identities.

Every node receives an invitation with the run's config. It checks the config against its operator's limits, loads model
and data, and introduces itself with its number of examples and a digest of its base; or it refuses and reports the
reason.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field

from fedspan import __version__
from fedspan.assembly.model import RunModel
from fedspan.config import RunConfig, parse_config
from fedspan.data.files import NOWHERE
from fedspan.deployment.base_offers import MAX_FILES, BaseFile, compute_offer_digest
from fedspan.errors import FedspanError, escape_controls
from fedspan.federation.protocol import REPLY_HEADER, Count, HeaderPart, PrintableName, Reason
from fedspan.federation.tags import MAX_TAGS, Tag
from fedspan.files import from_json

_SHARED = ("labels", "label_separator", "chat", "system", "packing", "prompt")
"""Fields of ``data`` that belong to the problem. All others select examples or say where they are: a node's own."""
_ENGINE = ("name", "padding_free", "prefix_cache")
"""Fields of ``engine`` that a node takes from the server; all others are about the machine."""


def _require_names(files: tuple[BaseFile, ...]) -> tuple[BaseFile, ...]:
    if len({file.name.casefold() for file in files}) != len(files):  # some file systems ignore case
        raise ValueError("files of different names")
    return files


class Invitation(HeaderPart):
    """A server's first message to a node.

    Args:
        base_files: Files of the base model that the server offers; empty: it offers none.
    """

    task: Literal["invite"] = "invite"
    run: PrintableName
    version: PrintableName
    config: str
    base_files: Annotated[tuple[BaseFile, ...], Field(max_length=MAX_FILES), AfterValidator(_require_names)] = ()

    @property
    def digest(self) -> str:
        """SHA-256 of the config and of the offered base model, which all clients of a secure sum agree on."""
        if not self.base_files:
            return self.config_digest
        return hashlib.sha256(f"{self.config_digest} {compute_offer_digest(self.base_files)}".encode()).hexdigest()

    @property
    def config_digest(self) -> str:
        """SHA-256 of the config."""
        return hashlib.sha256(self.config.encode(errors="surrogatepass")).hexdigest()

    def read_values(self) -> dict[str, Any]:
        """Return the config's plain values.

        Raises:
            ValueError: If the config is not a JSON object.
        """
        values = from_json(self.config.encode())
        if not isinstance(values, dict):
            raise ValueError("a config is an object")
        return values


class Introduction(HeaderPart):
    """A node's reply to an invitation.

    Args:
        base: Digest of the node's frozen model, tokenizer and pooling.
        extras: Digest of what trains in full.
        refused: Reason for not participating; None: the node participates.
        waiting: Whether the node's operator has to approve the run first, or the node receives the base model, so that
            it may be invited again.
    """

    longest = REPLY_HEADER

    task: Literal["invite"] = "invite"
    id: PrintableName
    version: PrintableName
    examples: Count = 0
    base: Annotated[str, Field(max_length=64), AfterValidator(escape_controls)] = ""
    extras: Annotated[str, Field(max_length=64), AfterValidator(escape_controls)] = ""
    refused: Reason | None = None
    waiting: bool = False
    tags: Annotated[dict[Tag, Tag], Field(max_length=MAX_TAGS)] = Field(default_factory=dict)


def get_minor_release(version: str) -> str:
    """Return the minor release of a version: 0.1 of 0.1.3.

    Patch releases change neither messages nor the config's fields and defaults nor what is computed.
    """
    return ".".join(version.split(".")[:2])


def explain_version(version: str) -> str | None:
    """Return why a machine with a version of fedspan cannot participate; None: it can."""
    own = get_minor_release(__version__)
    if get_minor_release(version) == own:
        return None
    return f"it runs fedspan {version}, and this is {__version__}: install fedspan {own}"


def parse_run_config(values: Mapping[str, Any]) -> RunConfig:
    """Parse a server's config whole, with the parts that a node's own config leaves out.

    Raises:
        FedspanError: If it is not valid.
    """
    data = values.get("data") or {}
    if not isinstance(data, Mapping):
        raise FedspanError("data", data, "a section")
    return parse_config({**values, "data": {**data, "train": NOWHERE}})


def build_server_config(values: Mapping[str, Any]) -> RunConfig:
    """Return the config of a deployment: a run's config without data locations.

    Raises:
        FedspanError: If it names data locations, baselines, which need all data in one place, or a record of arrivals,
            or is not valid.
    """
    read = ("data", "federation", "model", "privacy", "training")
    if not all(isinstance(values.get(name) or {}, Mapping) for name in read):
        return parse_config(values)  # raises for what is no section
    data = dict(values.get("data") or {})
    for name in ("dataset", "train", "test"):
        if data.get(name) not in (None, NOWHERE):
            raise FedspanError(
                f"data.{name}",
                data[name],
                problem="it cannot be set in a deployment, because every node names its own data in its node file",
            )
    if values.get("simulation") is not None:
        raise FedspanError(
            "simulation",
            values["simulation"],
            problem="it cannot be set in a deployment, because real nodes have conditions of their own",
        )
    if values.get("cluster") is not None:
        problem = "it cannot be set in a deployment, whose clients train on their own machines"
        raise FedspanError("cluster", values["cluster"], problem=problem)
    if (values.get("training") or {}).get("lr") == "auto":
        problem = "auto cannot be used in a deployment, because the server has no examples to test rates on"
        raise FedspanError("training.lr", "auto", "a number", problem=problem)
    if values.get("baselines"):
        raise FedspanError(
            "baselines",
            values["baselines"],
            problem="they cannot be trained in a deployment, because they need all examples on one machine",
        )
    if final_rounds := (values.get("federation") or {}).get("final_rounds"):
        problem = "they cannot be run in a deployment, whose nodes do not train on their validation examples"
        raise FedspanError("federation.final_rounds", final_rounds, "0", problem=problem)
    run_values = dict(values)
    if values.get("privacy") is not None:
        privacy = dict(values["privacy"])
        if privacy.setdefault("randomness", "secret") not in (None, "secret"):
            expected = "secret, because every node knows the run's seed"
            raise FedspanError("privacy.randomness", privacy["randomness"], expected)
        run_values["privacy"] = {**privacy, "randomness": "secret"}
    run_values = {**run_values, "data": {**data, "train": NOWHERE, "test_fraction": 0.0}}
    config = parse_config(run_values)
    if config.model.head_init == "auto":
        # No statistics of nodes unless the run's operator asks for them: the first rounds train the head instead.
        start = {"head_init": "random", "head_rounds": config.head_rounds}
        config = parse_config({**run_values, "model": {**(values.get("model") or {}), **start}})
    buffered = config.federation.buffered
    if buffered is not None and buffered.replay is not None:
        problem = "a record of arrivals is repeated in the simulator; nodes reply when they have trained"
        raise FedspanError("federation.buffered.replay", buffered.replay, "null", problem=problem)
    if config.task_definition.has_labels and config.data.labels is None:
        raise FedspanError("data.labels", None, "all labels in order, because no single node may know them all")
    return config


def build_node_values(config: Mapping[str, Any], node: Mapping[str, Any]) -> dict[str, Any]:
    """Return a run's config for a node: the server's config, with all of the node's own data as one client.

    The server decides neither which of the node's examples are used nor how they are split.

    Args:
        node: The node's ``data`` section, its shares for validation and test, and the seed of that split.
    """
    server_data, node_data = dict(config.get("data") or {}), dict(node.get("data") or {})
    shared = {name: server_data[name] for name in _SHARED if server_data.get(name) is not None}
    if node_data.get("label_columns") is not None:  # these labels are no texts
        shared.pop("label_separator", None)
    split = {"validation": node["validation"], "test": node["test"], "seed": node["split_seed"]}
    run_values = {key: value for key, value in config.items() if key not in ("data", "partition", "device", "threads")}
    rounds = dict(run_values.pop("federation", None) or {})
    # These concern the server and other clients; each order contains what a node needs to know of them.
    for name in (
        *("clients_per_round", "over_select", "ranks", "min_replies"),
        *("early_stopping", "final_rounds", "buffered"),
    ):
        rounds.pop(name, None)
    engine = dict(run_values.pop("engine", None) or {})
    evaluation = dict(run_values.pop("evaluation", None) or {})
    return {
        **run_values,
        **{name: node[name] for name in ("device", "threads") if node.get(name) is not None},
        "federation": rounds,
        "engine": {name: engine[name] for name in _ENGINE if name in engine},
        "evaluation": {name: evaluation[name] for name in ("batch_size", "metric") if name in evaluation},
        "data": {"test_fraction": 0.0, **shared, **node_data},
        "partition": {"partitioner": "iid", "clients": 1, **split},
    }


BASE_PARTS = {"weights or dtype": slice(32), "tokenizer": slice(32, 48), "pooling or text_pair": slice(48, 64)}
"""The parts of a base digest: what each is the beginning of a SHA-256 of."""


def compute_base_digest(model: RunModel) -> str:
    """Return the digest of what must be equal on all machines (``BASE_PARTS``). Extras are transmitted instead."""
    vocabulary: dict[str, int] = getattr(model.processor, "get_vocab", dict)()  # image processors have none
    others = (json.dumps(sorted(vocabulary.items())), repr(model.pooling))
    return model.adapted.hash_frozen().hexdigest()[:32] + "".join(
        hashlib.sha256(text.encode()).hexdigest()[:16] for text in others
    )


def compute_extras_digest(model: RunModel) -> str:
    """Return the digest of a model's extras: 32 digits of the SHA-256 of their paths, and 32 with their shapes."""
    shapes = sorted((path, list(value.shape)) for path, value in model.adapted.extras.items())
    parts = (json.dumps([path for path, _ in shapes]), json.dumps(shapes))
    return "".join(hashlib.sha256(text.encode()).hexdigest()[:32] for text in parts)
