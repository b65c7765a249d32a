"""Sequence to sequence: a text generated from another one (translation, summaries) by an encoder and a decoder.

Sutskever et al., "Sequence to Sequence Learning with Neural Networks", NeurIPS 2014, arXiv:1409.3215; Raffel et al.,
"Exploring the Limits of Transfer Learning with a Unified Text-to-Text Transformer", JMLR 2020, arXiv:1910.10683. The
decoder reads the target shifted to the right by the model's own rule. The loss is the mean over all target tokens of a
batch, as in Transformers' ``Seq2SeqTrainer``.

Shapes: B examples of a batch, T tokens of the longest target, S target tokens of a batch, V tokens of the vocabulary, C
clients, N generated tokens.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn import functional as F

from fedspan.core.tensors import to_device
from fedspan.data.columns import ColumnReader, ReadColumns, TaskColumns
from fedspan.data.config import DataConfig
from fedspan.data.names import read_names
from fedspan.errors import FedspanError
from fedspan.tasks.definition import InferredColumns, TaskDefinition
from fedspan.tasks.encoding import Ragged, refuse_pairs, require_processor, split_rows
from fedspan.tasks.text_scores import TEXT_METRICS, BleuTokenizer, compute_text_scores, require_text_scores
from fedspan.tasks.token_scores import (
    IGNORED,
    SCORES,
    TARGET_COUNTS,
    VocabularyTask,
    compute_token_metrics,
    mark_ends,
    score_tokens,
    select_targets,
)

if TYPE_CHECKING:
    import datasets
    from transformers import PreTrainedTokenizerBase

    from fedspan.tasks.settings import TaskSettings

_PAIRS = (
    *(("source", "target"), ("src", "tgt"), ("src", "trg"), ("source_text", "target_text")),
    *(("document", "summary"), ("article", "highlights"), ("article", "summary"), ("dialogue", "summary")),
    *(("text", "summary"), ("article", "abstract"), ("original", "simplified")),
)
"""Names of columns of sources and targets."""
_LANGUAGES = (
    " ar bg bn ca cs da de el en es et eu fa fi fr ga gl he hi hr hu it ja ko lt lv mk ms mt nl nn pl pt ro ru sk sl "
    "sq sr sv sw ta te th tl tr uk ur vi zh "
)
"""Language codes (ISO 639-1), each between spaces, that may be names of columns of parallel texts."""


@dataclass(frozen=True)
class Seq2SeqOptions:
    """Options of sequence to sequence.

    Args:
        prefix: Text before every source in training and use, such as "translate English to German: ".
        max_target_length: Maximum number of tokens of a target, at most ``model.max_length``; None: that.
        num_beams: Number of beams of a search for the generated text; 1: greedy; None: the model's own setting.
        length_penalty: Exponent of the length by which a beam's score is divided, with several beams: above 0 favors
            long texts; None: the model's own setting.
        min_new_tokens: Minimum number of tokens of a generated text; None: the model's own setting.
        source_language: Language code of the sources, for tokenizers that mark texts with one (mBART, NLLB, M2M100).
        target_language: Language code of the targets.
        bleu_tokenizer: Tokenizer of sacrebleu for BLEU; char or zh for languages without spaces between words.
    """

    prefix: str = ""
    max_target_length: Annotated[int, Field(ge=1)] | None = None
    num_beams: Annotated[int, Field(ge=1, le=64)] | None = None
    length_penalty: Annotated[float, Field(allow_inf_nan=False)] | None = None
    min_new_tokens: Annotated[int, Field(ge=0)] | None = None
    source_language: Annotated[str, Field(min_length=1)] | None = None
    target_language: Annotated[str, Field(min_length=1)] | None = None
    bleu_tokenizer: BleuTokenizer = "13a"

    def __post_init__(self) -> None:
        if self.length_penalty is not None and self.num_beams == 1:
            expected = "num_beams of more than 1, whose option it is"
            raise FedspanError("task_options.length_penalty", self.length_penalty, expected)
        if (self.source_language is None) != (self.target_language is None):
            missing = "source_language" if self.source_language is None else "target_language"
            raise FedspanError(f"task_options.{missing}", None, "a language code, as for the other language")


@dataclass(frozen=True)
class EncodedPairs:
    """Tokenized sources and targets."""

    sources: Ragged
    targets: Ragged
    texts: tuple[str, ...]
    lengths: np.ndarray
    """Number of tokens of each source and its target together, int64, (examples,)."""

    def __len__(self) -> int:
        return len(self.texts)


class Seq2Seq(VocabularyTask):
    """A target text for a source text, with any Hugging Face model of an encoder and a decoder.

    Args:
        max_length: Maximum number of tokens of a source; further ones are cut.
        max_new_tokens: Maximum number of tokens of a generated text.

    Raises:
        FedspanError: If ``options.max_target_length`` is more than ``max_length``, ``options.min_new_tokens`` is more
            than ``max_new_tokens``, or the options' languages are not those of the tokenizer.
    """

    has_several_passes = True
    """Sources pass through the encoder and targets through the decoder: states that belong to one pass are not
    cached."""

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        max_length: int,
        max_new_tokens: int = 64,
        options: Seq2SeqOptions | None = None,
        metric: str = "loss",
    ) -> None:
        self.options = options or Seq2SeqOptions()
        self.tokenizer, self._language = _set_languages(tokenizer, self.options)
        self.max_length = max_length
        self.max_new_tokens = max_new_tokens
        self.metric = metric
        limit = self.options.max_target_length
        if limit is not None and limit > max_length:
            expected = f"at most {max_length}, model.max_length or what the model has positions for"
            raise FedspanError("task_options.max_target_length", limit, expected)
        self.max_target_length = limit or max_length
        minimum = self.options.min_new_tokens
        if minimum is not None and minimum > max_new_tokens:
            expected = f"at most {max_new_tokens}, evaluation.max_new_tokens"
            raise FedspanError("task_options.min_new_tokens", minimum, expected)

    def encode(self, dataset: datasets.Dataset) -> EncodedPairs:
        """Tokenize a data set once; its columns are ``text`` (sources) and ``answer`` (targets).

        A target ends with the tokenizer's end-of-text token, also if it is cut.
        """
        require_processor(self.tokenizer, "texts")
        prefix = self.options.prefix
        if prefix and (count := len(self.tokenizer(prefix)["input_ids"])) >= self.max_length:  # pyright: ignore
            problem = f"its {count} tokens leave no room for a source: model.max_length is {self.max_length}"
            raise FedspanError("task_options.prefix", prefix, "a shorter text", problem=problem)
        selected = dataset.select_columns(["text", "answer"])
        sources: list[Ragged] = []
        targets: list[Ragged] = []
        for rows in split_rows(selected):
            texts = [prefix + text for text in rows["text"]]
            encoded = self.tokenizer(texts, truncation=True, max_length=self.max_length)
            end = self.tokenizer.eos_token_id
            empty = [end if isinstance(end, int) else self.tokenizer.pad_token_id]  # an encoder needs a token
            sources.append(Ragged([ids or empty for ids in encoded["input_ids"]]))  # pyright: ignore
            encoded = self.tokenizer(text_target=rows["answer"], truncation=True, max_length=self.max_target_length)
            targets.append(Ragged([self._append_end(ids) for ids in encoded["input_ids"]]))  # pyright: ignore
        joined, answers = Ragged.join(sources), Ragged.join(targets)
        return EncodedPairs(joined, answers, (*selected["answer"],), joined.lengths + answers.lengths)

    def _append_end(self, ids: Sequence[int]) -> list[int]:
        """Append the end-of-text token to a target, unless the tokenizer did; mBART's ends before the language."""
        end = self.tokenizer.eos_token_id
        if not isinstance(end, int) or end in ids[-1:] or (self._language is not None and end in ids[-2:]):
            return [*ids]
        return [*ids[: self.max_target_length - 1], end]

    def collate(self, examples: EncodedPairs, indices: Sequence[int], device: torch.device) -> dict[str, Tensor]:
        """Collate ``input_ids`` and ``attention_mask`` of the sources, and ``labels``, the targets' ids, (B, T).

        Labels are padded with -100.
        """
        pad = int(self.tokenizer.pad_token_id)  # pyright: ignore[reportArgumentType]
        rows = list(indices)
        lengths = torch.from_numpy(examples.sources.lengths[rows])
        batch = {
            "input_ids": torch.from_numpy(examples.sources.pad(rows, pad)),
            "attention_mask": (torch.arange(int(lengths.max())) < lengths[:, None]).long(),
            "labels": torch.from_numpy(examples.targets.pad(rows, IGNORED)),
        }
        counts = torch.from_numpy(examples.targets.lengths[rows])
        return {**{key: to_device(value, device) for key, value in batch.items()}, TARGET_COUNTS: counts}

    def compute_logits(self, model: nn.Module, batch: Mapping[str, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        """Return the logits (S, V) of a batch's target tokens, these tokens, and their examples' numbers, (S,)."""
        labels_BT = batch["labels"]
        logits_BTV = model(
            input_ids=batch["input_ids"],
            attention_mask=batch["attention_mask"],
            decoder_input_ids=_shift_right(model, labels_BT),
            use_cache=False,
        ).logits
        return select_targets(logits_BTV, labels_BT, batch[TARGET_COUNTS])

    def predict(self, model: nn.Module, batch: Mapping[str, Tensor], *, generate: bool = False) -> Tensor:
        """Return each example's sum of negative log-likelihood over its target, target tokens, and correct tokens.

        With ``generate``: N further columns with the generated ids, -1 after their end.
        """
        logits_SV, targets_S, rows_S = self.compute_logits(model, batch)
        sums = score_tokens(logits_SV, targets_S, rows_S, len(batch["labels"]))
        return torch.cat([sums, self._generate(model, batch)], 1) if generate else sums

    def require_generation(self, model: Any) -> None:
        """Check that a model's own shortest text is not longer than the longest that is generated.

        Raises:
            FedspanError: If it is, so that no text could end.
        """
        own, limit = model.generation_config, self._limit_generated(model)
        minimum = own.min_new_tokens if own.min_new_tokens is not None else (own.min_length or 0) - 1
        if self.options.min_new_tokens is None and minimum > limit:
            problem = (
                f"the model's generation_config has texts of {minimum} tokens and more (min_length or min_new_tokens), "
                "so none would end"
            )
            expected = f"at least {minimum}, or task_options.min_new_tokens"
            raise FedspanError("evaluation.max_new_tokens", limit, expected, problem=problem)

    def _limit_generated(self, model: Any) -> int:
        """Return the maximum number of generated tokens: the task's, or what the model has positions for."""
        positions = getattr(model.config, "max_position_embeddings", self.max_new_tokens + 1)
        return min(self.max_new_tokens, positions - 1)

    def _generate(self, model: Any, batch: Mapping[str, Tensor]) -> Tensor:
        """Generate a text for each source by the model's own settings, (B, N), float32, -1 after its end."""
        self.require_generation(model)
        settings = copy.deepcopy(model.generation_config)  # forced tokens, lengths and penalties are the model's own
        settings.update(num_return_sequences=1, return_dict_in_generate=False, do_sample=False)
        settings.update(max_length=None, max_new_tokens=self._limit_generated(model))
        settings.update(pad_token_id=self.tokenizer.pad_token_id)
        options = self.options
        for name in ("num_beams", "length_penalty", "min_new_tokens"):
            if getattr(options, name) is not None:
                settings.update(**{name: getattr(options, name)})
        if options.min_new_tokens is not None:
            settings.update(min_length=0)
        if self._language is not None:
            settings.update(**self._language)
        if settings.eos_token_id is None:
            settings.update(eos_token_id=self.tokenizer.eos_token_id)
        inputs = {name: batch[name] for name in ("input_ids", "attention_mask")}
        generated = model.generate(**inputs, generation_config=settings)[:, 1:]  # the first one starts the decoder
        return mark_ends(generated, self.max_new_tokens, settings.eos_token_id)

    def compute_metrics(self, predictions: Tensor, examples: EncodedPairs, indices: Sequence[int]) -> dict[str, float]:
        """Compute ``loss`` (mean over target tokens), ``perplexity``, ``token_accuracy``, and scores of generated ones.

        Raises:
            FedspanError: If there are generated texts and a package that scores them is missing.
        """
        scores = compute_token_metrics(predictions)
        if predictions.shape[1] > SCORES:
            texts, references = self.decode_predictions(predictions), self.decode_targets(examples, indices)
            scores |= compute_text_scores(texts, references, self.options.bleu_tokenizer)
        return scores

    def describe_examples(self, examples: EncodedPairs) -> tuple[str, ...]:
        """Report how many sources and targets fill their maximum length, and so may have been cut."""
        kinds = (
            ("sources", examples.sources, "model.max_length", self.max_length),
            ("targets", examples.targets, "task_options.max_target_length", self.max_target_length),
        )
        counts = [(int((ids.lengths >= limit).sum()), name, option, limit) for name, ids, option, limit in kinds]
        return tuple(
            f"{count} of {len(examples)} {name} reach {option}, {limit} tokens: their end may be cut"
            for count, name, option, limit in counts
            if count
        )

    def decode_targets(self, examples: EncodedPairs, indices: Sequence[int]) -> list[str]:
        """Return the targets as in the data."""
        return [examples.texts[index].strip() for index in indices]


def _set_languages(
    tokenizer: PreTrainedTokenizerBase, options: Seq2SeqOptions
) -> tuple[PreTrainedTokenizerBase, dict[str, int | None] | None]:
    """Return a tokenizer that marks texts with their languages, and how generated texts get the targets' (or None)."""
    has_languages = hasattr(tokenizer, "src_lang") and hasattr(tokenizer, "tgt_lang")
    if options.source_language is None or options.target_language is None:
        if has_languages:
            problem = f"the {type(tokenizer).__name__} of this model marks texts with their language"
            raise FedspanError("task_options.source_language", None, "two language codes", problem=problem)
        return tokenizer, None
    if not has_languages:
        problem = f"the tokenizer of this model ({type(tokenizer).__name__}) does not mark texts with their language"
        raise FedspanError("task_options.source_language", options.source_language, "null", problem=problem)
    marking: Any = copy.deepcopy(tokenizer)
    marks: dict[str, list[int]] = {}
    for name, attribute in (("source_language", "src_lang"), ("target_language", "tgt_lang")):
        code = getattr(options, name)
        try:
            setattr(marking, attribute, code)
            ids = marking("")["input_ids"] if name == "source_language" else marking(text_target="")["input_ids"]
        except KeyError:
            ids = [marking.unk_token_id]
        marks[name] = [id for id in ids if id != marking.eos_token_id]
        if len(marks[name]) != 1 or marks[name][0] == marking.unk_token_id:
            raise FedspanError(f"task_options.{name}", code, f"a language code of the {type(marking).__name__}")
    (mark,) = marks["target_language"]
    ends_first = marking(text_target="")["input_ids"][0] == marking.eos_token_id
    if ends_first:  # mBART's decoder reads the language in place of a start
        return marking, {"decoder_start_token_id": mark, "forced_bos_token_id": None}
    return marking, {"forced_bos_token_id": mark}


def _shift_right(model: Any, labels_BT: Tensor) -> Tensor:
    """Return the decoder's input for labels, (B, T), by the model's own rule, or else as M2M100's forward does it."""
    if not getattr(getattr(model, "config", None), "is_encoder_decoder", False):
        raise FedspanError("model.name", type(model).__name__, "a model of AutoModelForSeq2SeqLM")
    start = getattr(model.config, "decoder_start_token_id", None)
    if start is None:
        problem = f"the config of this {type(model).__name__} has no decoder_start_token_id, which starts every target"
        raise FedspanError("model.name", model.config.name_or_path or type(model).__name__, problem=problem)
    prepare = getattr(model, "prepare_decoder_input_ids_from_labels", None)
    if prepare is not None:
        return prepare(labels=labels_BT)
    shifted_BT = F.pad(labels_BT[:, :-1], (1, 0), value=start)
    return shifted_BT.masked_fill(shifted_BT == IGNORED, model.config.pad_token_id)


def _read(reader: ColumnReader, config: DataConfig) -> ReadColumns:
    columns = {"text": reader.read_texts(config.text, "text"), "answer": reader.read_texts(config.answer, "answer")}
    names = None if config.label is None else reader.read_classes(config.label)
    return ReadColumns(columns, {config.text, config.answer}, names)


def _build(tokenizer: PreTrainedTokenizerBase, settings: TaskSettings, data: DataConfig | None) -> Seq2Seq:
    options: Seq2SeqOptions = SEQ2SEQ.parse_options(settings.options)
    return Seq2Seq(tokenizer, settings.max_length, settings.max_new_tokens, options, settings.metric)


def _infer_columns(sample: datasets.Dataset, options: Mapping[str, str | None]) -> InferredColumns | None:
    """Find columns of sources and targets by their names: well-known pairs, or two languages, the first the source.

    Where the user named the task, also the columns that they named, or the only two columns of texts.
    """
    source, target, label = options["text"], options["answer"], options["label"]
    is_requested = options["task"] is not None
    if label is not None and not is_requested:
        return None
    names = [name for name in sample.column_names if name not in (options["by"], label) and _has_texts(sample, name)]
    by_name = {name.lower().rpartition(".")[2]: name for name in names}
    pairs = [(by_name[left], by_name[right]) for left, right in _PAIRS if {left, right} <= by_name.keys()]
    languages = [name for short, name in by_name.items() if f" {short} " in _LANGUAGES]
    pairs += [(languages[0], languages[1]), (languages[1], languages[0])] if len(languages) == 2 else []
    if is_requested:
        pairs += [(names[0], names[1])] if len(names) == 2 else []
        pairs += [(source, target)] if source is not None and target is not None else []
    pairs = [pair for pair in pairs if source in (None, pair[0]) and target in (None, pair[1])]
    if not pairs:
        return None
    fields = {"text": pairs[0][0], "answer": pairs[0][1]} | ({} if label is None else {"label": label})
    return InferredColumns(fields, f"sources {pairs[0][0]!r}, targets {pairs[0][1]!r}")


def _has_texts(sample: datasets.Dataset, column: str) -> bool:
    """Check whether a column holds texts that mostly differ, and not numbers or classes."""
    if str(getattr(sample.features[column], "dtype", "")) not in ("string", "large_string"):
        return False
    values = [value for value in read_names(sample, column) if value]
    return 2 * len(set(values)) > len(values) and not all(value.replace(".", "", 1).isdigit() for value in values)


def _preprocess(settings: TaskSettings, inputs: Sequence[Any]) -> datasets.Dataset:
    import datasets

    refuse_pairs(inputs, "texts")
    return datasets.Dataset.from_dict({"text": [*inputs], "answer": [""] * len(inputs)})


SEQ2SEQ = TaskDefinition(
    name="seq2seq",
    title="a text for a text (translation, summaries)",
    head="sequence-to-sequence",
    build=_build,
    target_type="text",
    metrics=("loss", "perplexity", "token_accuracy"),
    custom_metrics=TEXT_METRICS,
    columns=TaskColumns(
        read=_read,
        get_required_columns=lambda config, _: [
            (c,) for c in (config.text, config.answer, config.label) if c is not None
        ],
        get_joined_columns=lambda config: (config.text, config.answer),
        get_label_column=lambda config: config.label,
    ),
    peft_task_type="SEQ_2_SEQ_LM",
    options=Seq2SeqOptions,
    default_model=("google-t5/t5-small", "[q, v]"),
    lr=1e-3,
    summary_metrics=("perplexity", *TEXT_METRICS),
    pipeline_tag="text2text-generation",
    infer_columns=_infer_columns,
    preprocess=_preprocess,
    loss_options=Seq2Seq.loss_options,
    require_packages=require_text_scores,
    require_generation=lambda task, model: task.require_generation(model),
    make_examples=lambda ids, _: EncodedPairs(ids, ids, ("",) * len(ids), 2 * ids.lengths),
)
