"""Options of the data: the location of the examples (`DataConfig`) and their partition (`PartitionConfig`)."""

from __future__ import annotations

from collections import Counter
from typing import Any, Literal, Self

from pydantic import (
    Field,
    SerializerFunctionWrapHandler,
    ValidationInfo,
    field_validator,
    model_serializer,
    model_validator,
)
from pydantic_core import PydanticCustomError

from fedspan.data.catalogue import get_dataset_entry
from fedspan.data.dialects import Quoting
from fedspan.data.numbers import drop_decimal_zero
from fedspan.errors import FedspanError
from fedspan.section import Section

CONTRADICTION = "contradiction"
"""Type of pydantic's errors about a field that contradicts another field of its section; their context names it."""


def _build_contradiction(field: str, value: object, problem: str) -> PydanticCustomError:
    """Return the error of a field that contradicts another field of its section."""
    return PydanticCustomError(CONTRADICTION, "{problem}", {"field": field, "value": value, "problem": problem})


class DataConfig(Section):
    """Labeled texts or images to fine-tune on.

    Raises:
        pydantic.ValidationError: If a value is out of range, a field is unknown, or fields contradict each other.
    """

    dataset: str | None = Field(default=None, min_length=1)
    """Name of a data set that fedspan knows (fedspan data lists them): sst2, gsm8k. It sets train, test, the columns,
    the splits and the prompt unless the config sets them. For a local file, the columns are those of the publisher's
    files or of the hub, whichever the file has."""
    train: str | None = Field(default=None, validate_default=True, min_length=1)
    """Training examples. A file: .csv, .tsv, .txt, .jsonl, .json (a list of objects), .parquet or Excel, the text
    formats also as .gz. A folder, .zip or .tar with one folder of .txt files (image-classification: of images) per
    class, or domain/class. A folder of images with a metadata.csv, .jsonl or .parquet, as for datasets' imagefolder.
    MNIST's idx files (train-images-idx3-ubyte.gz, with the labels next to it) and CIFAR's binary batches. The id of a
    data set on the Hugging Face hub, such as PolyAI/banking77. builtin:review-sentences and builtin:patient-messages,
    small corpora that are part of fedspan. Nested fields of JSON and parquet are columns with dots: meta.label. Braces
    in the path of a table or an archive match any name, which becomes a column: clinics/{hospital}/train.csv with
    partition.column: hospital makes each file a client. Required without `dataset`."""
    test: str | None = Field(default=None, min_length=1)
    """Test examples, in the same forms as `train`. Default: `test_split` of a hub id or a built-in corpus;
    `test_fraction` of a local file."""
    text: str = Field(default="text", min_length=1)
    """Column with the text to classify or to score; seq2seq: with the source."""
    text_pair: str | None = Field(default=None, min_length=1)
    """Column with the second text of a pair: question and answer, premise and hypothesis."""
    image: str = Field(default="image", min_length=1)
    """image-classification: column with the images, or with paths relative to the file."""
    label: str | None = Field(default=None, min_length=1)
    """Column with the class, as a name or a number; regression: with the number (decimal point or comma). Default:
    label. causal-lm and seq2seq: column with a category, for partitions by label; default: none."""
    label_separator: str | None = Field(default=None, min_length=1)
    """multi-label-classification: text between the labels of a row, if a column of texts holds them. Default: the first
    of |, ; and , that occurs in the column of data.train; a deployment needs it."""
    label_columns: list[str] | None = Field(default=None, min_length=2)
    """multi-label-classification, instead of label: columns of zeros and ones (false and true), one for each label,
    whose names are the labels."""
    prompt: str | None = Field(default=None, min_length=1)
    """causal-lm, preference: the model's input: a text with columns in braces, such as 'Q: {question} A: ', or the name
    of a template: alpaca, instruction, metamath, question."""
    answer: str = Field(default="answer", min_length=1)
    """causal-lm and seq2seq: column with the target."""
    messages: str | None = Field(default=None, min_length=1)
    """causal-lm, instead of prompt and answer: column with conversations, lists of messages with role and content; the
    last message, the assistant's, is the target. Needs `chat`."""
    chat: bool = False
    """causal-lm, preference: format prompts with the model's chat template."""
    system: str | None = Field(default=None, min_length=1)
    """causal-lm, preference: the system message of every conversation. Needs `chat`."""
    long_answers: Literal["cut", "refuse"] = "cut"
    """causal-lm, preference: handling of an answer that does not fit into model.max_length after its prompt was
    truncated to a quarter. cut: truncate its end and report how many. refuse: an error."""
    packing: bool = False
    """causal-lm: concatenate a batch's examples in one row, each with its own positions and attention, instead of
    padding them. The loss is the same; faster on a GPU."""
    roles: dict[str, str] = Field(default_factory=dict)
    """Columns by their role, for tasks whose data have roles that no other option names: {ROLE: column}. The page of a
    task lists its roles. Default: a column has the name of its role."""
    delimiter: str | None = Field(default=None, min_length=1, max_length=1)
    """Character between the columns of a .csv, .tsv or .txt file, such as ';' or '|'. Default: detected among commas,
    semicolons, tabs and pipes."""
    encoding: str | None = Field(default=None, min_length=1)
    """Encoding of text files, by its Python name: utf-8, utf-16, latin-1, cp1252, cp1251, shift_jis. Default:
    detected."""
    quoting: Quoting | None = None
    """Quotes around fields that contain delimiters or line ends. Default: detected; a .csv usually has double quotes, a
    .tsv none (GLUE's have literal single quotes)."""
    header: bool | None = None
    """Whether the first line of a .csv, .tsv, .txt or Excel file names the columns. false names them by position:
    column_1, column_2. Default: detected for each file; rows above the names with a title in the first column and
    nothing else are left out. If only one of the files of training and test has names, the columns of test are those of
    training, by position."""
    columns: list[str] | None = Field(default=None, min_length=1)
    """Names of all columns, in order, of a file without a header (GLUE's CoLA: [source, label, mark, text]). Do not set
    it for a file with a header."""
    sheet: str | None = Field(default=None, min_length=1)
    """Sheet of an Excel file. Default: the first one."""
    hub_config: str | None = Field(default=None, min_length=1)
    """Configuration of a hub data set: sst2 of nyu-mll/glue."""
    train_split: str = Field(default="train", min_length=1)
    """Training split of a hub data set."""
    test_split: str | None = Field(default="test", min_length=1)
    """Test split of a hub data set (GLUE: validation, because its test labels are secret). null sets `test_fraction` of
    `train` aside instead."""
    invalid: Literal["error", "skip"] = "error"
    """Handling of a row without a text, a label or an answer, with an unknown label, with values that do not fit
    together, or with too many or too few fields, and of a training row without a value in partition.column. error:
    refuse the file and name the row. skip: exclude such rows and report how many."""
    group: str | None = Field(default=None, min_length=1)
    """Column whose equal values belong together: patient, author, thread. All rows of a group go to one client and to
    one of training, validation and test. The column of texts or images keeps duplicates together. A row without a value
    is its own group."""
    test_fraction: float = Field(default=0.2, ge=0, lt=1)
    """Share of `train` for the test set if there is no other, drawn by seed with each label in proportion. 0: no test
    set."""
    labels: list[str] | None = Field(default=None, min_length=2)
    """All labels, in the order of the classifier's outputs. Default: those of `train`, sorted. Set them if each client
    reads its own file: all clients need the same list, including labels that a client lacks. A row with any other label
    is an error unless `keep_only` is set."""
    keep_only: bool = False
    """Drop rows whose label is not in `labels` instead of refusing them."""
    first_labels: int | None = Field(default=None, ge=2)
    """Use only the first N labels in sorted order, for a quick test of a task with many labels."""
    max_examples: int | None = Field(default=None, ge=2)
    """Maximum number of training examples, and of test examples, drawn by seed with each label in proportion, for a
    quick test of a large data set."""

    @field_validator("dataset")
    @classmethod
    def _resolve_dataset(cls, value: str | None) -> str | None:
        try:
            return value and get_dataset_entry(value, "data.dataset").key
        except FedspanError as error:
            raise PydanticCustomError("unknown", "{problem}", {"problem": error.problem, "error": error}) from None

    @field_validator("train")
    @classmethod
    def _require_location(cls, value: str | None, info: ValidationInfo) -> str | None:
        # An unknown dataset is missing from info.data; that mistake has been reported by then.
        if value is None and info.data.get("dataset", "") is None:
            raise ValueError("a file or a hub id, or data.dataset: a key that fedspan data lists")
        return value

    @field_validator("labels", mode="before")
    @classmethod
    def _name_labels(cls, value: object) -> object:
        # YAML reads [0, 1] and [true, false] as numbers and bools; a file's labels become text, so these do too.
        if isinstance(value, list | tuple):
            texts = [str(label) if isinstance(label, int | float) else label for label in value]
            return [drop_decimal_zero(text) if isinstance(text, str) else text for text in texts]
        return value

    @field_validator("labels", "columns", "label_columns")
    @classmethod
    def _refuse_repeats(cls, value: list[str] | None) -> list[str] | None:
        repeated = sorted(name for name, count in Counter(value or ()).items() if count > 1)
        if repeated:
            raise ValueError(f"each name once; repeated: {', '.join(repeated)}")
        return value

    @model_validator(mode="after")
    def _agree(self) -> Self:
        columns = {"text": self.text, "text_pair": self.text_pair, "label": self.label or "label"}
        if self.dataset is not None:  # the catalogue names the other columns later
            columns = {name: column for name, column in columns.items() if name in self.model_fields_set}
        roles: dict[str, str] = {}
        for name, column in columns.items():
            if column in roles:
                problem = f"{column!r} is also the column of {roles[column]}. Each needs a column of its own"
                raise _build_contradiction(name, column, problem)
            if column is not None:
                roles[column] = name
        for name in ("label", "label_separator"):
            if self.label_columns is not None and getattr(self, name) is not None:
                problem = "label_columns already names the labels' columns. Leave one of the two out"
                raise _build_contradiction(name, getattr(self, name), problem)
        if self.labels is not None and self.first_labels is not None:
            problem = "labels already selects the labels. Leave one of the two out"
            raise _build_contradiction("first_labels", self.first_labels, problem)
        if self.messages is not None and self.prompt is not None:
            problem = "messages already defines the model's input. Leave one of the two out"
            raise _build_contradiction("prompt", self.prompt, problem)
        if (self.messages is not None or self.system is not None) and not self.chat:
            raise _build_contradiction("chat", self.chat, "messages and system need chat: true")
        if self.columns is not None and self.header:
            problem = "header: true takes the columns' names from the first line. Leave one of the two out"
            raise _build_contradiction("columns", self.columns, problem)
        if self.keep_only and self.labels is None:
            raise _build_contradiction("keep_only", self.keep_only, "set `data.labels` to the labels to keep")
        return self

    @model_serializer(mode="wrap")
    def _serialize_set_fields(self, dump: SerializerFunctionWrapHandler) -> dict[str, Any]:
        # A default, if written out, would look like the user's choice and override the catalogue.
        content = dump(self)
        if self.dataset is None:
            return content
        return {name: value for name, value in content.items() if name in self.model_fields_set}


class PartitionConfig(Section):
    """Partition of the training examples among clients, and of each client's among training, validation and test.

    Raises:
        pydantic.ValidationError: If a value is out of range, a field is unknown, or fields contradict each other.
    """

    partitioner: Literal["iid", "dirichlet", "pathological", "natural", "quantity"] = "iid"
    """iid: at random in equal sizes. dirichlet: each label is split by shares from a Dirichlet distribution, so clients
    differ in labels and size (`alpha`). pathological: each client has few labels (`classes_per_client`). natural: one
    client per value of a column (`column`). quantity: at random in unequal sizes (`quantity`)."""
    clients: int = Field(default=10, ge=1)
    """Number of clients; natural ignores it."""
    alpha: float = Field(default=0.5, gt=0, allow_inf_nan=False)
    """dirichlet: homogeneity of the clients. 0.1 leaves most clients a few labels, 1 is moderately skewed, 100 is
    nearly iid."""
    classes_per_client: int = Field(default=2, ge=1)
    """pathological: maximum number of labels per client; every label is assigned."""
    bins: int | None = Field(default=None, ge=2)
    """dirichlet and pathological with task: regression: number of ranges, with about equally many examples, that
    replace labels."""
    column: str | None = Field(default=None, min_length=1)
    """natural: column whose values are the clients: hospital, author, domain. Another partitioner divides the examples
    of each value separately, among an equal share of the clients: dirichlet with 12 clients and four domains gives each
    domain three clients that differ in labels."""
    quantity: Literal["linear", "square", "exponential"] = "linear"
    """quantity: the n-th client's size is proportional to n, n^2 or e^n; the last one is the largest. e^n is steep: ten
    clients need some 26 000 examples."""
    min_examples: int = Field(default=2, ge=1)
    """Minimum number of examples of a client; fewer is an error. dirichlet draws again."""
    validation: float = Field(default=0.1, ge=0, lt=1)
    """Share of a client's examples for validation, which selects rounds and settings; at least one example if the
    client has three, none if this is 0."""
    test: float = Field(default=0.1, ge=0, lt=1)
    """Share of a client's examples for its own (personal) test score; at least one example if the client has two, none
    if this is 0."""
    seed: int | None = Field(default=None, ge=0, lt=2**63)
    """Seed of the partition and of data.test_fraction and data.max_examples; default: the run's seed. Set it to use the
    same partition with several seeds."""

    @model_validator(mode="after")
    def _agree(self) -> Self:
        if self.validation + self.test >= 1:
            problem = (
                f"validation and test sum to {self.validation + self.test:g}, which leaves nothing for training. "
                "Their sum must be below 1"
            )
            raise _build_contradiction("validation", self.validation, problem)
        if self.partitioner == "natural" and self.column is None:
            raise _build_contradiction(
                "column", None, "partitioner natural needs it: the column's values are the clients"
            )
        return self
