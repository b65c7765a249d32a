"""Models, a tokenizer and a corpus so small that a test can train on them: what the tests of real transformers share.

The models are real Hugging Face classes with random weights (larger than usual, so that logits differ), the corpus is
a csv file; both are read from a folder as a user's would be. ``BERT`` names target modules of three shapes: 16 x 16
(query, value), 24 x 16 (intermediate.dense) and 16 x 24 (output.dense). ``bert``, which most tests train, has one layer
with them, to save time; ``deep-bert`` and the others have two.
"""

import copy
import csv
import json
import random
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from tokenizers.processors import TemplateProcessing
from torch import Tensor, nn
from transformers import AutoModelForSequenceClassification, PreTrainedTokenizerFast

from fedspan.assembly.federation import compute_client_ranks, compute_client_scaling
from fedspan.assembly.run import Prepared, prepare
from fedspan.clients.host import Host
from fedspan.config import RunConfig, parse_config
from fedspan.core.method import Method
from fedspan.federation.evaluation import Evaluator
from fedspan.federation.federation import Federation
from fedspan.federation.progress import ClientData, Progress
from fedspan.training.engine import Engine
from fedspan.training.loop import LoopEngine
from fedspan.transports.in_process import simulate

BERT = ["query", "value", "intermediate.dense", "output.dense"]
GPT2 = ["c_attn", "c_proj"]
LABELS = ("admin", "billing", "lab", "symptom")
SITES = {"east": 11, "north": 19, "south": 32, "west": 58}
"""Clients of the corpus with their number of texts."""

_SPECIAL = ["<pad>", "<unk>", "<s>", "</s>"]
_WORDS = [f"{label}{number}" for label in LABELS for number in range(8)] + [f"word{number}" for number in range(12)]
_VOCABULARY = {word: index for index, word in enumerate([*_SPECIAL, *_WORDS])}
VOCABULARY_SIZE = len(_VOCABULARY)
_SMALL = {"vocab_size": len(_VOCABULARY), "initializer_range": 0.3}
_ENCODER = {
    "pad_token_id": 0,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
}


def _bert(layers: int) -> nn.Module:
    shape = {**_ENCODER, "num_hidden_layers": layers}
    return transformers.BertModel(transformers.BertConfig(**_SMALL, **shape, max_position_embeddings=32))


_MODELS: dict[str, Callable[[], nn.Module]] = {
    "bert": lambda: _bert(layers=1),
    "deep-bert": lambda: _bert(layers=2),
    "roberta": lambda: transformers.RobertaModel(
        transformers.RobertaConfig(**_SMALL, **_ENCODER, max_position_embeddings=34, type_vocab_size=1),
        add_pooling_layer=False,
    ),
    "distilbert": lambda: transformers.DistilBertModel(
        transformers.DistilBertConfig(**_SMALL, pad_token_id=0, dim=16, hidden_dim=24, n_layers=2, n_heads=2)
    ),
    "gpt2": lambda: transformers.GPT2Model(
        transformers.GPT2Config(**_SMALL, n_embd=16, n_inner=24, n_layer=2, n_head=2, n_positions=32, eos_token_id=3)
    ),
}


def save_model(kind: str, folder: Path) -> Path:
    """A model without a head, and its tokenizer, in a folder of its own; the same weights every time."""
    path = folder / kind
    with torch.random.fork_rng():
        torch.manual_seed(5)
        _MODELS[kind]().save_pretrained(path)
    save_tokenizer(path, pairs=kind != "gpt2")
    return path


def save_tokenizer(folder: Path, *, pairs: bool = True) -> None:
    """One id a word. GPT-2's (not for pairs) adds no tokens and has none for padding, like the real one."""
    _tokenizer(pairs).save_pretrained(folder)


def _tokenizer(pairs: bool) -> PreTrainedTokenizerFast:
    tokenizer = Tokenizer(WordLevel(_VOCABULARY, unk_token="<unk>"))
    tokenizer.pre_tokenizer = Whitespace()
    if not pairs:
        return PreTrainedTokenizerFast(
            tokenizer_object=tokenizer, unk_token="<unk>", eos_token="</s>", model_max_length=32
        )
    tokenizer.post_processor = TemplateProcessing(
        single="<s> $A </s>", pair="<s> $A </s> $B </s>", special_tokens=[("<s>", 2), ("</s>", 3)]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        unk_token="<unk>",
        cls_token="<s>",
        sep_token="</s>",
        model_max_length=32,
    )


def save_corpus(folder: Path) -> Path:
    """120 texts of 2 to 9 words in 4 labels; every site has one label in 2 of 3 texts, another one for each site."""
    rng = random.Random(0)
    path = folder / "corpus.csv"
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["text", "label", "site"])
        for number, (site, size) in enumerate(SITES.items()):
            for _ in range(size):
                label = LABELS[number] if rng.random() < 2 / 3 else rng.choice(LABELS)
                own = [f"{label}{rng.randrange(8)}" for _ in range(rng.randint(1, 4))]
                filler = [f"word{rng.randrange(12)}" for _ in range(rng.randint(1, 5))]
                words = own + filler
                rng.shuffle(words)
                writer.writerow([" ".join(words), label, site])
    return path


def save_rows(path: Path, sites: Mapping[str, int], seed: int, draw: Callable[[random.Random], dict[str, Any]]) -> Path:
    """Write records of sites as JSON lines, as many of each as its number."""
    rng = random.Random(seed)
    rows = [{**draw(rng), "site": site} for site, size in sites.items() for _ in range(size)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def settings(folder: Path, kind: str = "bert", **changes: Mapping[str, Any]) -> dict[str, Any]:
    """A run on the tiny model and corpus as plain values; ``changes`` go into its sections."""
    values: dict[str, Any] = {
        "seed": 3,
        "device": "cpu",
        "model": {
            "name": str(folder / kind),
            "target_modules": GPT2 if kind == "gpt2" else BERT,
            "max_length": 16,
            "head_init": "random",
        },
        "data": {"train": str(folder / "corpus.csv"), "test_fraction": 0.1},
        "partition": {"partitioner": "natural", "column": "site"},
        "method": {"name": "fedit", "r": 2, "lora_alpha": 4},
        "federation": {"rounds": 2, "clients_per_round": 3},
        "training": {"lr": 0.02, "local_steps": 2, "batch_size": 4},
        "evaluation": {"batch_size": 32},
        "engine": {"name": "loop"},
    }
    return change_sections(values, changes)


def change_sections(values: dict[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Values of a config with changes in its sections, of which nothing is shared."""
    for section, change in changes.items():
        values[section] = {**values.get(section, {}), **change} if isinstance(change, Mapping) else change
    return copy.deepcopy(values)


def config(folder: Path, kind: str = "bert", **changes: Mapping[str, Any]) -> RunConfig:
    """``settings``, parsed."""
    return parse_config(settings(folder, kind, **changes))


def variant(
    prepared: Prepared,
    config: RunConfig,
    *,
    watch: Callable[[Method], Method] = lambda method: method,
    engine: type[LoopEngine] = LoopEngine,
) -> Prepared:
    """Another method, or other rounds or training, on a model and data that are loaded; ``watch`` wraps the method."""
    adapted = prepared.engine.adapted
    all_clients = prepared.federation.clients
    method = config.build_method(replace(adapted.spec, clients=len(all_clients)))
    known = []
    for id, rank in compute_client_ranks(config, method, list(all_clients)).items():
        client = replace(all_clients[id].client, rank=rank, scaling=compute_client_scaling(config, method, rank))
        known.append(replace(all_clients[id], client=client))
    training, privacy = config.build_training_settings(), config.build_privacy_settings()
    made = engine(adapted, prepared.task, training, config.seed, privacy=privacy)
    wrapped = watch(config.wrap_method(method))
    federation = simulate(wrapped, made, known, prepared.train, config.build_round_settings().trust())
    evaluator = Evaluator(federation, config.evaluation.batch_size)
    return replace(prepared, config=config, engine=made, federation=federation, evaluator=evaluator)


def fresh_classifier(folder: str | Path, **changes: object) -> nn.Module:
    """The pretrained model with a random head, as somebody without fedspan loads it; the same head every time."""
    with torch.random.fork_rng():
        torch.manual_seed(6)
        model = AutoModelForSequenceClassification.from_pretrained(folder, num_labels=len(LABELS), **changes)
    if model.config.pad_token_id is None:
        model.config.pad_token_id = 3
    return model.eval()


def host_of(federation: Federation) -> Host:
    """The host of all clients of a simulation."""
    return federation.transport.host


def run_all_rounds(prepared: Prepared) -> Progress:
    """Run all rounds; return the progress after them."""
    progress = prepared.federation.begin()
    while progress.state.round < prepared.federation.settings.rounds:
        progress = prepared.federation.run_round(progress).progress
    return progress


def final_tensors(prepared: Prepared) -> Mapping[str, Tensor]:
    """Run all rounds; return the global tensors after them."""
    return run_all_rounds(prepared).state.tensors


def require_sgd_without_noise(values: Mapping[str, Any], rtol: float = 1e-5, atol: float = 1e-7) -> None:
    """Require that DP-SGD without noise and clipping moves tensors in a step of all examples as SGD does."""
    training = {"optimizer": "sgd", "lr": 0.05, "batch_size": 1000, "local_steps": 1, "max_grad_norm": 0}
    federation, training = {"rounds": 1, "weights": "uniform", "clip_ratio": None}, {**values["training"], **training}
    values = {**values, "federation": federation, "training": training, "engine": {"name": "loop"}}
    privacy = {"mechanism": "dp-sgd", "clip": 1e3, "noise": 1e-9, "delta": 1e-3}
    plain, private = (final_tensors(prepare(parse_config(own))) for own in (values, {**values, "privacy": privacy}))
    assert max(float(value.norm()) for name, value in plain.items() if name.endswith("/B")) > 1e-3
    for name, value in plain.items():
        torch.testing.assert_close(private[name], value, rtol=rtol, atol=atol)


def use_engine(federation: Federation, engine: Engine) -> None:
    """Have a simulation train on another engine."""
    federation.engine = host_of(federation).engine = engine


def use_clients(federation: Federation, clients: Mapping[str, ClientData]) -> None:
    """Give a simulation other clients."""
    federation.clients = host_of(federation).clients = clients


def reweight(federation: Federation, weights: Mapping[str, float]) -> None:
    """Give the clients of a simulation other weights."""
    all_clients = federation.clients
    changed = {id: replace(one, client=replace(one.client, weight=weights[id])) for id, one in all_clients.items()}
    use_clients(federation, changed)
