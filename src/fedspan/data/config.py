"""Options of the data: the location of the examples (`DataConfig`) and their partition (`PartitionConfig`)."""

from __future__ import annotations

from typing import Any, Literal, Self

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    SerializerFunctionWrapHandler,
    ValidationInfo,
    field_validator,
    model_serializer,
    model_validator,
)
from pydantic_core import PydanticCustomError

from fedspan.data.catalogue import dataset_of
from fedspan.data.dialects import Quoting
from fedspan.errors import FedspanError

__all__ = ["DataConfig", "PartitionConfig"]


class DataConfig(BaseModel):
    """Labelled texts or images to fine-tune on.

    Raises:
        pydantic.ValidationError: If a value is out of range, a field is unknown, or fields contradict each other.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    dataset: str | None = Field(
        default=None,
        min_length=1,
        description="A data set that fedspan knows (fedspan data lists them): sst2, gsm8k. It fills train, test, the "
        "columns, the splits and the prompt as far as they are not given. If train is a local file, the columns are "
        "those of the original files or those of the hub, whichever the file has.",
    )
    train: str | None = Field(
        default=None,
        validate_default=True,
        min_length=1,
        description="Training examples: a .csv, .tsv, .txt, .jsonl, .json (a list of objects), .parquet or Excel file, "
        "the text formats also as .gz; or a folder, .zip or .tar with one folder of .txt files for each class (or "
        "domain/class); or the id of a data set on the Hugging Face hub, such as PolyAI/banking77; or "
        "builtin:patient-messages, a small corpus that comes with fedspan. image-classification also takes a folder, "
        ".zip or .tar with one folder of images for each class (or domain/class), MNIST's idx files "
        "(train-images-idx3-ubyte.gz, the labels beside it) and CIFAR's binary batches. Fields inside fields of JSON "
        "and parquet are columns with dots in their names: meta.label. Braces in a table's path stand for any name and "
        "become a column: clinics/{hospital}/train.csv with partition.column: hospital gives each file to one client. "
        "Required unless there is a `dataset`.",
    )
    test: str | None = Field(
        default=None,
        min_length=1,
        description="Test examples, named as for `train`. Left out, a hub id or a built-in corpus gives its own "
        "`test_split`; of a local file, `test_fraction` is set aside.",
    )
    text: str = Field(
        default="text", min_length=1, description="The column with the text to classify, or to give a number to."
    )
    text_pair: str | None = Field(
        default=None,
        min_length=1,
        description="The column with a second text, where a label belongs to a pair: question and answer, premise "
        "and hypothesis.",
    )
    image: str = Field(
        default="image",
        min_length=1,
        description="image-classification: the column with the images, or with paths to them as seen from the file.",
    )
    label: str | None = Field(
        default=None,
        min_length=1,
        description="The column with the class, as a name or a number; regression: with the number. Left out: label. "
        "causal-lm: a column with the kind of an example, for partitions by label; left out: none.",
    )
    prompt: str | None = Field(
        default=None,
        min_length=1,
        description="causal-lm: what the model is given: a text with columns in braces, such as 'Q: {question} A: ', "
        "or the name of a template: alpaca, instruction, metamath, question.",
    )
    answer: str = Field(default="answer", min_length=1, description="causal-lm: the column with what is to be learnt.")
    messages: str | None = Field(
        default=None,
        min_length=1,
        description="causal-lm, in place of prompt and answer: the column with conversations, lists of messages with "
        "role and content; the last message, the assistant's, is what is learnt. Needs `chat`.",
    )
    chat: bool = Field(default=False, description="causal-lm: write prompts with the model's chat template.")
    system: str | None = Field(
        default=None, min_length=1, description="causal-lm: the system message of every conversation. Needs `chat`."
    )
    long_answers: Literal["cut", "refuse"] = Field(
        default="cut",
        description="causal-lm: what becomes of an answer that does not fit into model.max_length, after its prompt "
        "was cut to a quarter: its end is cut and the run says how many, or it is an error.",
    )
    packing: bool = Field(
        default=False,
        description="causal-lm: lay a batch's examples end to end in one row, each with its own positions and "
        "attention, instead of padding them. The same loss; pays on a GPU.",
    )
    delimiter: str | None = Field(
        default=None,
        min_length=1,
        max_length=1,
        description="The character between the columns of a .csv, .tsv or .txt file, such as ';' or '|'. Left out: "
        "detected among commas, semicolons, tabs and pipes.",
    )
    encoding: str | None = Field(
        default=None,
        min_length=1,
        description="The encoding of text files, as Python names it: utf-8, utf-16, latin-1, cp1252, cp1251, "
        "shift_jis. Left out: detected.",
    )
    quoting: Quoting | None = Field(
        default=None,
        description="The quotes that enclose fields with delimiters or line ends in them. Left out: detected; a .csv "
        "usually has double quotes, a .tsv none (GLUE's hold single quotes as they are).",
    )
    header: bool | None = Field(
        default=None,
        description="Whether the first line of a .csv, .tsv, .txt or Excel file names the columns. false names them by "
        "position: column_1, column_2. Left out: detected.",
    )
    columns: list[str] | None = Field(
        default=None,
        min_length=1,
        description="Names of all columns, in order, of a file whose first line is already an example (GLUE's CoLA: "
        "[source, label, mark, text]). Leave out when the first line is a header.",
    )
    sheet: str | None = Field(
        default=None, min_length=1, description="The sheet of an Excel file. Left out: the first one."
    )
    hub_config: str | None = Field(
        default=None, min_length=1, description="Which configuration of a hub data set: sst2 of nyu-mll/glue."
    )
    train_split: str = Field(default="train", min_length=1, description="The split of a hub data set to train on.")
    test_split: str | None = Field(
        default="test",
        min_length=1,
        description="The split of a hub data set to test on (GLUE: validation, as its test labels are secret). null "
        "sets `test_fraction` of `train` aside instead.",
    )
    invalid: Literal["error", "skip"] = Field(
        default="error",
        description="What becomes of a row without a text, a label or an answer, with a label that is not among the "
        "labels, or with too many or too few fields: error refuses the file and names the row, skip leaves such rows "
        "out and reports how many.",
    )
    group: str | None = Field(
        default=None,
        min_length=1,
        description="A column whose equal values belong together: patient, author, thread. All rows of a group go to "
        "one client and to one of training, validation and test. The column of texts or images keeps duplicates "
        "together. A row without a value is a group of its own.",
    )
    test_fraction: float = Field(
        default=0.2,
        ge=0,
        lt=1,
        description="The share of `train` that becomes the test set when there is no other, drawn by seed with each "
        "label in proportion. 0 goes without a test set.",
    )
    labels: list[str] | None = Field(
        default=None,
        min_length=2,
        description="All labels, in the order of the classifier's outputs. Left out, they are those of `train`, "
        "sorted. Give them when each client reads a file of its own: all must agree on the list, also on labels that "
        "a client lacks. A row with any other label is an error unless `keep_only` is set.",
    )
    keep_only: bool = Field(
        default=False, description="Drop the rows whose label is not in `labels` instead of refusing them."
    )
    first_labels: int | None = Field(
        default=None, ge=2, description="Keep only the first N labels in sorted order: a quick try of a task with many."
    )
    max_examples: int | None = Field(
        default=None,
        ge=2,
        description="At most this many examples of the training set, and of the test set, drawn by seed with each "
        "label in proportion: a quick try of a large data set.",
    )

    @field_validator("dataset")
    @classmethod
    def _known(cls, value: str | None) -> str | None:
        try:
            return value and dataset_of(value, "data.dataset").key
        except FedspanError as error:
            raise PydanticCustomError("unknown", "{problem}", {"problem": error.problem, "error": error}) from None

    @field_validator("train")
    @classmethod
    def _somewhere(cls, value: str | None, info: ValidationInfo) -> str | None:
        # An unknown dataset is missing from info.data; that mistake has been reported by then.
        if value is None and info.data.get("dataset", "") is None:
            raise ValueError("is required, or data.dataset: a key that fedspan data lists")
        return value

    @field_validator("labels", mode="before")
    @classmethod
    def _name_labels(cls, value: object) -> object:
        # YAML reads [0, 1] and [true, false] as numbers and bools; a file's labels become text, so these do too.
        if isinstance(value, list | tuple):
            return [str(label) if isinstance(label, int) else label for label in value]
        return value

    @field_validator("labels", "columns")
    @classmethod
    def _refuse_repeats(cls, value: list[str] | None) -> list[str] | None:
        repeated = sorted({name for name in value or () if (value or ()).count(name) > 1})
        if repeated:
            raise ValueError(f"each name once; {', '.join(repeated)} stands there twice")
        return value

    @model_validator(mode="after")
    def _agree(self) -> Self:
        columns = {"text": self.text, "text_pair": self.text_pair, "label": self.label or "label"}
        if self.dataset is not None:  # the catalogue names the other columns later
            columns = {name: column for name, column in columns.items() if name in self.model_fields_set}
        wanted = [column for column in columns.values() if column is not None]
        if len(set(wanted)) < len(wanted):
            raise ValueError(f"text, text_pair and label are different columns, not {', '.join(wanted)}")
        if self.labels is not None and self.first_labels is not None:
            raise ValueError("labels or first_labels, not both: both say which labels to keep")
        if self.messages is not None and self.prompt is not None:
            raise ValueError("prompt or messages, not both: both say what the model is given")
        if (self.messages is not None or self.system is not None) and not self.chat:
            raise ValueError("messages and system need chat: true")
        if self.columns is not None and self.header:
            raise ValueError("columns or header: true, not both: both say how the columns are named")
        if self.keep_only and self.labels is None:
            raise ValueError("keep_only needs labels: the ones to keep")
        return self

    @model_serializer(mode="wrap")
    def _as_given(self, dump: SerializerFunctionWrapHandler) -> dict[str, Any]:
        # A default, if written out, would look like the user's choice and override the catalogue.
        content = dump(self)
        if self.dataset is None:
            return content
        return {name: value for name, value in content.items() if name in self.model_fields_set}


class PartitionConfig(BaseModel):
    """Partition of the training examples among clients, and of each client's among training, validation and test.

    Raises:
        pydantic.ValidationError: If a value is out of range, a field is unknown, or fields contradict each other.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    partitioner: Literal["iid", "dirichlet", "pathological", "natural", "quantity"] = Field(
        default="iid",
        description="iid: at random in equal sizes. dirichlet: each label is divided by shares drawn from a "
        "Dirichlet distribution, so clients differ in labels and size (`alpha`). pathological: a client has few "
        "labels (`classes_per_client`). natural: one client for each value of a column (`column`). quantity: at "
        "random in unequal sizes (`quantity`).",
    )
    clients: int = Field(default=10, ge=1, description="How many clients. natural ignores it: the column decides.")
    alpha: float = Field(
        default=0.5,
        gt=0,
        allow_inf_nan=False,
        description="dirichlet: how alike the clients are. 0.1 leaves most clients a few labels, 1 is moderately "
        "skewed, 100 is nearly iid.",
    )
    classes_per_client: int = Field(
        default=2,
        ge=1,
        description="pathological: at most this many labels for each client; all labels are handed out.",
    )
    bins: int | None = Field(
        default=None,
        ge=2,
        description="dirichlet and pathological of numbers (task: regression), which have no labels: into how many "
        "ranges with about as many examples each they are cut; a range is then what a label is.",
    )
    column: str | None = Field(
        default=None,
        min_length=1,
        description="natural: the column whose values are the clients: hospital, author, domain.",
    )
    quantity: Literal["linear", "square", "exponential"] = Field(
        default="linear",
        description="quantity: the n-th client's size is proportional to n, n^2 or e^n; the last one is the largest. "
        "e^n is steep: ten clients already need some 26 000 examples.",
    )
    min_examples: int = Field(
        default=2,
        ge=1,
        description="The fewest examples that a client may end up with; fewer is an error. dirichlet redraws.",
    )
    validation: float = Field(
        default=0.1,
        ge=0,
        lt=1,
        description="The share of a client's examples for choosing between settings; at least one example if the "
        "client has three, none if this is 0.",
    )
    test: float = Field(
        default=0.1,
        ge=0,
        lt=1,
        description="The share of a client's examples for measuring its own (personalised) accuracy; at least one "
        "example if the client has two, none if this is 0.",
    )
    seed: int | None = Field(
        default=None,
        ge=0,
        lt=2**63,
        description="Seed of the partition and of data.test_fraction and data.max_examples; left out: the run's. Set "
        "it to keep the same partition under several seeds.",
    )

    @model_validator(mode="after")
    def _agree(self) -> Self:
        if self.validation + self.test >= 1:
            raise ValueError(
                f"validation + test below 1, not {self.validation + self.test:g}: the rest is for training"
            )
        if self.partitioner == "natural" and self.column is None:
            raise ValueError("partitioner natural needs column: its values are the clients")
        if self.partitioner != "natural" and self.column is not None:
            raise ValueError(f"column is for partitioner natural, not {self.partitioner}")
        return self
