"""The file of a data owner's node: its data, which never leave it, and its limits, which no server can override."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, BeforeValidator, Field, model_validator

from fedspan.config.reading import read_values
from fedspan.config.validation_errors import convert_validation_errors
from fedspan.data.multiple_files import list_placeholders
from fedspan.errors import FedspanError, require_printable
from fedspan.federation.tags import Tags
from fedspan.section import Section

_MIB = 2**20
Fingerprint = Annotated[str, Field(pattern=r"^SHA256:[A-Za-z0-9+/]{43}$")]


def _require_brackets(address: str) -> str:
    """Check that an IPv6 address is in brackets: without them, the last group could be the port."""
    if address.count(":") > 1 and not address.startswith("["):
        raise ValueError("host:port, and an IPv6 address in brackets, as in [2001:db8::1]:9092")
    return address


class NodeLimits(Section):
    """What a server may ask of this node."""

    methods: list[Annotated[str, Field(min_length=1)]] | None = None
    """Methods that a server may name; default: all."""
    models: list[Annotated[str, Field(min_length=1)]] | None = None
    """Base models that a server may name (model.name), in addition to those under models, as patterns: roberta-base,
    google/*, or name@revision if a run names a revision. Nothing else is loaded or requested from the hub. Default: the
    builtin: models."""
    from_scratch: bool = False
    """Allow model.pretrained: false, where all weights come from the server; builtin:resnet-8, -10 and -18 are always
    trained so."""
    words: bool = False
    """Allow runs that train vectors of words (a model's embeddings, the output layer of a language model): their
    changes list the words of this node's texts, also in a sum of many nodes."""
    columns: list[Annotated[str, Field(min_length=1)]] = Field(default_factory=list)
    """Columns of the data that a run's prompt (data.prompt) may name, in addition to those that data names and those
    that the task reads without a prompt. A prompt in data replaces the run's."""
    run_rounds: int = Field(default=50, ge=1)
    """Maximum number of rounds of a run."""
    rounds: int = Field(default=200, ge=1)
    """Maximum number of rounds of all runs of this server on this data set; an order repeated over the same data counts
    once."""
    runs: int = Field(default=20, ge=1)
    """Maximum number of runs of this server on this data set."""
    run_evaluations: int = Field(default=60, ge=0)
    """Maximum number of evaluations and exports of a run."""
    evaluations: int = Field(default=120, ge=0)
    """Maximum number of evaluations and exports of all runs of this server on this data set."""
    invitations: int = Field(default=100, ge=1)
    """Maximum number of distinct invitations of this server on this data set, accepted or refused, since every answer
    tells something about this node. A repeated one counts once."""
    evaluation_epsilon: float | None = Field(default=0.1, gt=0, allow_inf_nan=False)
    """Epsilon of each evaluation: the validation loss and the run's metric leave this node with Laplace noise, of n
    examples with a scale of 2 / n of their range over this number. Metrics that are no means over examples are not
    sent, nor is a training loss. An example that is evaluated k times has k times this epsilon. null: metrics and
    training losses are sent as measured, from which a server can tell single examples."""
    evaluation_examples: int = Field(default=1000, ge=1)
    """Minimum number of examples of a validation or test part for its metrics to be sent; of fewer, the noise is larger
    than what a run gains. If fewer than three nodes send metrics, the run's last round is its result."""
    train_examples: int = Field(default=16, ge=1)
    """Minimum number of training examples that this node needs to participate in a run, and of those behind a reply:
    local_steps times batch_size times gradient_accumulation_steps; of those of a step, if factors train in turns or a
    round has several projectors. A change after one step of one example is that example's gradient."""
    min_batch: int = Field(default=8, ge=1)
    """Minimum number of examples of a training step (batch_size * gradient_accumulation_steps), and of a pass from
    whose gradient a projector comes. An epoch's short rest joins the step before; few examples may count twice."""
    steps: int = Field(default=20_000, ge=1)
    """Maximum number of forward and backward passes of an order: local_steps, or local_epochs over this node's batches
    (of the rounded number of examples), times gradient_accumulation_steps, and the epochs that the method adds."""
    batch: int = Field(default=1024, ge=1)
    """Maximum batch size in training (batch_size) and evaluation."""
    tokens: int = Field(default=8192, ge=2)
    """Maximum number of tokens of an example (model.max_length)."""
    image_size: int = Field(default=1024, ge=8)
    """Maximum height and width of an image (model.image_size)."""
    rank: int = Field(default=512, ge=1)
    """Maximum rank of an adapter (method.r, federation.ranks)."""
    round_seconds: float = Field(default=3600.0, gt=0, allow_inf_nan=False)
    """Maximum duration of an order in seconds, without loading the model after a restart; then the training process is
    killed and restarted."""
    epsilon: float | None = Field(default=10.0, gt=0, allow_inf_nan=False)
    """Epsilon that all runs of this server together may spend on this data set. It counts runs with privacy.mechanism
    local or dp-sgd; other runs spend none, and limits.rounds ends them. A run whose planned rounds cost more than is
    left is refused at its start, unless it selects some nodes for each round. null: no limit."""
    delta: float = Field(default=1e-5, gt=0, lt=1)
    """Delta for epsilon."""
    private_only: bool | None = None
    """Refuse runs without privacy.mechanism local or dp-sgd. Default: true if the file sets epsilon to a number, else
    false."""
    secure_only: bool = False
    """Participate only in runs with federation.secure: replies leave this node only under masks. All owners must set
    it, and peers."""
    secure_clients: int | None = Field(default=None, ge=3)
    """Minimum number of nodes in a masked sum, this node included, before it reveals shares. Default: this node and all
    of its peers, so that no two sums differ by a node and a missing node stops the run; 3 without peers. With fewer, in
    any owner's file, nodes may drop out, and the difference of two sums may be the update of one of them. If weights
    differ, it may be with all nodes, too: federation.weights: uniform."""
    colluders: int = Field(default=1, ge=1)
    """Number of nodes that may collude with the server, such as that of an owner who runs the server: a masked sum of n
    nodes that t nodes can open is refused unless 2 t > n + colluders and at least two others remain. Three nodes
    withstand one, and all three must stay. All owners must state the same."""
    head_statistics: Annotated[
        Literal["off", "exact"], BeforeValidator(lambda value: "off" if value is False else value)
    ] = "off"
    """exact: send, once per data set and server, the statistics that initialize a run's head (model.head_init): sums of
    the features of this node's examples by label, their second moments, and the number of examples per label. From
    them, a server that chooses the model and max_length can compute texts with their labels. off: the head starts
    without this node."""
    statistics_max_length: int = Field(default=32, ge=2)
    """Smallest model.max_length of a run that receives these statistics: features of one or two tokens name them."""
    statistics_examples: int = Field(default=10, ge=1)
    """Minimum number of training examples for each feature in these statistics: with fewer examples than features, they
    determine the features of each example."""
    class_examples: int = Field(default=10, ge=1)
    """Minimum number of examples of a label in these statistics; rarer labels are omitted. With 1, the mean of a label
    may be the features of a single example. Regression targets count as one label."""
    approve: Literal["auto", "ask"] = "ask"
    """ask: a new run, or one with a changed config or offered base model, waits for the approval of this node's
    operator (fedspan approve). auto: carry out what the other limits allow."""
    accept_base: bool = False
    """Receive a base model that is neither on this machine nor under models from a server that offers its files
    (fedspan submit --offer-base), instead of the hub. The server then chooses the weights, as with from_scratch, and
    how texts become tokens: that this fails or takes long on one tells of it, whatever the noise. Only safetensors and
    files of configs and tokenizers are received, each verified by SHA-256. false: such a model is loaded from the hub,
    or the run is refused."""
    base_mib: int = Field(default=16384, ge=1, le=2**30)
    """Maximum size of all base models that were received or announced together, in MiB."""
    message_mib: int = Field(default=1024, ge=1, le=2048)
    """Maximum size of a message in MiB, in both directions."""

    @property
    def is_private_only(self) -> bool:
        """Whether runs without differential privacy on the node are refused: ``private_only`` or its default."""
        if self.private_only is not None:
            return self.private_only
        return "epsilon" in self.model_fields_set and self.epsilon is not None

    @property
    def message_bytes(self) -> int:
        """The limit ``message_mib`` in bytes."""
        return self.message_mib * _MIB


_Mbit = Annotated[float, Field(ge=0.1, allow_inf_nan=False)]  # below, the server takes the link for broken


class BandwidthLimits(Section):
    """What a node's messages may take of its link, on average."""

    up_mbit: _Mbit | None = None
    """Maximum rate at which the node sends, in megabits (10^6 bits) per second; 8 Mbit/s are 1 MB/s. null: no limit."""
    down_mbit: _Mbit | None = None
    """Maximum rate at which the node receives, in megabits per second. null: no limit."""


class NodeConfig(Section):
    """A data owner's node: its id, its data and its limits."""

    id: Annotated[str, AfterValidator(require_printable)] = Field(min_length=1, max_length=256)
    """Stable id of the node in every federation."""
    server: Annotated[str, AfterValidator(_require_brackets)] = Field(min_length=1)
    """Address of the server, host:port; an IPv6 address in brackets."""
    authority: str | None = Field(default=None, min_length=1)
    """File with the certificate from the server's operator: ca.crt."""
    key: str | None = Field(default=None, min_length=1)
    """File with the node's private key."""
    proxy: str | None = Field(default=None, min_length=1)
    """Address of the proxy to the server, such as http://proxy.example.org:3128. Default: HTTPS_PROXY of the
    environment, unless NO_PROXY names the server."""
    tls_authority: str | None = Field(default=None, min_length=1)
    """File with the authority of the connection's certificate, if a proxy in front of the server, or of this node's
    network, terminates TLS. Orders are verified by authority all the same. Default: authority."""
    folder: str = Field(default="fedspan-node", min_length=1)
    """Folder of the node's persistent state."""
    data: dict[str, Any] = Field(default_factory=dict)
    """The node's data, as in a run's config: train, test, text, label, group, ... Only fields that define the problem
    (labels, label_separator, chat, system, packing, and a prompt, whose columns limits.columns restricts) come from the
    server. Required unless the node trains with a trainer of its own (fedspan.join)."""
    data_id: Annotated[str, AfterValidator(require_printable)] = Field(default="data", min_length=1, max_length=256)
    """Name of the data set. The totals under limits count by server and this name, whatever file data names and
    whatever its content. Set it only to give another data set a budget of its own."""
    validation: float = Field(default=0.1, ge=0, lt=1)
    """Share of the node's examples for validation."""
    test: float = Field(default=0.1, ge=0, lt=1)
    """Share of the node's examples for its own test."""
    split_seed: int = Field(default=0, ge=0, lt=2**63)
    """Seed of this split, independent of the run's seed."""
    examples: int | None = Field(default=None, ge=1)
    """Number of training examples that the node declares, which is also its weight in the average. Default: its number,
    rounded down to two significant digits."""
    peers: dict[str, Fingerprint] | None = None
    """Nodes with which this node joins secure aggregation, by id, with the fingerprints of their keys as ssh-keygen -l
    prints them: {clinic-b: SHA256:...}. Their session keys must be signed with these keys, so that the server can
    neither invent nodes nor intercept their messages. All owners must list theirs. Default: trust the server's list."""
    models: dict[str, str] = Field(default_factory=dict)
    """Local folders of models and adapters that a server may name (model.name, model.adapter): {name: folder}."""
    device: str | None = None
    """auto, cpu, cuda, cuda:1, mps; default: auto."""
    threads: int | None = Field(default=None, ge=1, le=1024)
    """CPU threads of torch."""
    tags: Tags = Field(default_factory=dict)
    """Facts about the node by which a run selects its nodes (federation.require_tags), such as {site: eu, gpu: true};
    at most 32 of 64 characters. They are sent to the server."""
    bandwidth: BandwidthLimits = Field(default_factory=BandwidthLimits)
    limits: NodeLimits = Field(default_factory=NodeLimits)

    @model_validator(mode="after")
    def _validate_shares(self) -> Self:
        if self.validation + self.test >= 1:
            raise ValueError(f"validation + test below 1, not {self.validation + self.test:g}: the rest trains")
        return self

    @property
    def min_secure_clients(self) -> int:
        """The minimum number of nodes in a masked sum."""
        return self.limits.secure_clients or max(3, len({self.id, *(self.peers or ())}))

    @property
    def budget_marker(self) -> Path:
        """The file that proves that the node's budget exists, outside its folder: beside the key, if there is one."""
        return build_budget_marker(Path(self.folder if self.key is None else self.key))


def build_budget_marker(path: Path) -> Path:
    """Return the marker of a node's budget, beside its key or its folder."""
    return path.with_name(f"{path.name}.budget")


def require_data(node: NodeConfig) -> None:
    """Check that a node's file names its data."""
    if not node.data:
        expected = "the node's data, or fedspan.join(file, trainer=...) for a trainer with data of its own"
        raise FedspanError("data", None, expected)


def load_node(path: str | Path) -> NodeConfig:
    """Load a node's file; its paths are relative to its folder.

    Raises:
        FedspanError: If the file is missing, unreadable or no YAML mapping, or for the first mistake in it.
    """
    path = Path(path)
    with convert_validation_errors(root=NodeConfig):
        node = NodeConfig.model_validate(read_values(path))

    def resolve(name: str | None) -> str | None:
        # pathlib would raise for a name that is too long or has a zero byte; opening the file gives a clearer error.
        return None if name is None else os.path.abspath(os.path.join(path.parent, os.path.expanduser(name)))

    data = dict(node.data)
    for name in ("train", "test"):
        value = data.get(name)
        if isinstance(value, str) and (os.path.exists(os.path.join(path.parent, value)) or list_placeholders(value)):
            data[name] = resolve(value)
    changes = {
        "authority": resolve(node.authority),
        "tls_authority": resolve(node.tls_authority),
        "key": resolve(node.key),
        "folder": resolve(node.folder),
        "data": data,
    }
    return node.model_copy(update=changes)
