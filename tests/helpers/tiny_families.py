"""Models of many architecture families, built from their Transformers configs with random weights: smaller than a test.

Each has layers that are not square, no dropout, and weights larger than usual, so that predictions differ.
"""

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn

from fedspan.assembly.run import Prepared, prepare
from fedspan.config import parse_config
from fedspan.federation.progress import Progress

from . import tiny, tiny_decoders, tiny_images, tiny_seq2seq

_TEXT: dict[str, Any] = {"vocab_size": tiny.VOCABULARY_SIZE, "initializer_range": 0.3, "pad_token_id": 0}
_CAUSAL: dict[str, Any] = {
    "vocab_size": tiny_decoders.VOCABULARY_SIZE,
    "initializer_range": 0.3,
    **{"pad_token_id": 0, "bos_token_id": 2, "eos_token_id": 3},
}
_BERT: dict[str, Any] = {
    **{"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2},
    "max_position_embeddings": 34,
}
_LLAMA: dict[str, Any] = {
    **{"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4},
    **{"num_key_value_heads": 2, "max_position_embeddings": 64},
}
_IMAGE: dict[str, Any] = {"image_size": 12, "patch_size": 4, "initializer_range": 0.2}
TEXT, LANGUAGE, IMAGES, PAIRS = "sequence-classification", "causal-lm", "image-classification", "seq2seq"
_ATTENTION = ["q_proj", "v_proj"]


@dataclass(frozen=True)
class Family:
    """One architecture family.

    Args:
        title: Name of the family, as its paper or library writes it.
        targets: Target modules, where PEFT has no default for them.
        size: Rows and columns of the images of a vision model.
    """

    title: str
    task: str
    build: Callable[[], nn.Module]
    targets: list[str] | None = None
    size: tuple[int, int] = (12, 12)


def make_model(kind: str, architecture: str, **values: Any) -> Callable[[], nn.Module]:
    """Return what builds a model of Transformers from its config: ``make_model("Bert", "Model", ...)``."""

    def build() -> nn.Module:  # Transformers imports a family's module at the first access to its names
        config = getattr(transformers, f"{kind}Config")(**values)
        return getattr(transformers, f"{kind}{architecture}")(config)

    return build


_ENCODER: dict[str, Any] = {**_TEXT, **_BERT}
_CLIP: dict[str, Any] = {"hidden_size": 16, "intermediate_size": 24, "num_attention_heads": 2}
FAMILIES: Mapping[str, Family] = {
    "bert": Family("BERT", TEXT, make_model("Bert", "Model", **_ENCODER)),
    "roberta": Family("RoBERTa", TEXT, make_model("Roberta", "Model", **_ENCODER)),
    "xlm-roberta": Family("XLM-R", TEXT, make_model("XLMRoberta", "Model", **_ENCODER)),
    "electra": Family("ELECTRA", TEXT, make_model("Electra", "Model", **_ENCODER, embedding_size=8)),
    "deberta-v2": Family("DeBERTa-v3", TEXT, make_model(
        "DebertaV2", "Model", **_ENCODER, relative_attention=True, pos_att_type=["p2c", "c2p"], type_vocab_size=0,
        position_buckets=8, share_att_key=True, norm_rel_ebd="layer_norm", position_biased_input=False,
        pooler_hidden_size=16,
    )),
    "modernbert": Family("ModernBERT", TEXT, make_model(
        "ModernBert", "Model", **_ENCODER, global_attn_every_n_layers=2, local_attention=4,
        bos_token_id=2, cls_token_id=2, eos_token_id=3, sep_token_id=3,
    ), targets=["Wqkv", "Wo"]),
    "t5": Family("T5", TEXT, make_model(
        "T5", "Model", vocab_size=tiny.VOCABULARY_SIZE, d_model=16, d_kv=6, d_ff=24, num_layers=2, num_heads=2,
        pad_token_id=0, eos_token_id=3, decoder_start_token_id=0, initializer_factor=1.0,
    )),
    "llama": Family("Llama", LANGUAGE, make_model("Llama", "ForCausalLM", **_CAUSAL, **_LLAMA)),
    "gpt2": Family("GPT-2", LANGUAGE, make_model(
        "GPT2", "LMHeadModel", **_CAUSAL, n_embd=16, n_inner=24, n_layer=2, n_head=2, n_positions=64
    )),
    "falcon": Family("Falcon", LANGUAGE, make_model(
        "Falcon", "ForCausalLM", **_CAUSAL, hidden_size=16, num_hidden_layers=2, num_attention_heads=4,
        ffn_hidden_size=24, max_position_embeddings=64,
    )),
    "phi": Family("Phi", LANGUAGE, make_model("Phi", "ForCausalLM", **_CAUSAL, **_LLAMA)),
    "mixtral": Family("Mixtral", LANGUAGE, make_model(
        "Mixtral", "ForCausalLM", **_CAUSAL, **_LLAMA, num_local_experts=3, num_experts_per_tok=2
    )),
    "mamba": Family("Mamba", LANGUAGE, make_model(
        "Mamba", "ForCausalLM", **_CAUSAL, hidden_size=16, state_size=4, num_hidden_layers=2, time_step_rank=3
    ), targets=["in_proj", "x_proj"]),
    "convnext": Family("ConvNeXt", IMAGES, make_model(
        "ConvNext", "Model", hidden_sizes=[8, 12], depths=[1, 1], num_stages=2, patch_size=2, initializer_range=0.2,
        layer_scale_init_value=0.5,
    ), targets=["pwconv1", "pwconv2"]),
    "swin": Family("Swin", IMAGES, make_model(
        "Swin", "Model", image_size=16, patch_size=2, embed_dim=8, depths=[1, 1], num_heads=[2, 2], window_size=4,
        initializer_range=0.2, mlp_ratio=3.0,
    ), size=(16, 16), targets=_ATTENTION),
    "dinov2": Family("DINOv2", IMAGES, make_model(
        "Dinov2", "Model", hidden_size=16, num_hidden_layers=2, num_attention_heads=2, mlp_ratio=3,
        layerscale_value=1.0, **_IMAGE,
    ), targets=_ATTENTION),
    "clip": Family("CLIP vision", IMAGES, make_model(
        "CLIP", "Model", projection_dim=8,
        vision_config={**_CLIP, "num_hidden_layers": 2, "image_size": 12, "patch_size": 4, "initializer_factor": 5.0},
        text_config={**_CLIP, "num_hidden_layers": 1, "vocab_size": 20, "max_position_embeddings": 12},
    ), targets=_ATTENTION),
    "mobilenet_v2": Family("MobileNetV2", IMAGES, make_model(
        "MobileNetV2", "Model", image_size=16, depth_multiplier=0.1, min_depth=4, initializer_range=0.2,
        finegrained_output=True,
    ), size=(16, 16), targets=["reduce_1x1.convolution", "expand_1x1.convolution"]),
    "t5-seq2seq": Family("T5", PAIRS, tiny_seq2seq.FAMILIES["t5"]),
    "bart-seq2seq": Family("BART", PAIRS, tiny_seq2seq.FAMILIES["bart"]),
    "marian-seq2seq": Family("Marian", PAIRS, tiny_seq2seq.FAMILIES["marian"], targets=_ATTENTION),
    "mbart-seq2seq": Family(
        "mBART", PAIRS, make_model("MBart", "ForConditionalGeneration", **tiny_seq2seq.BART), targets=_ATTENTION
    ),
    "m2m100-seq2seq": Family(
        "M2M100, NLLB", PAIRS, make_model("M2M100", "ForConditionalGeneration", **tiny_seq2seq.BART), targets=_ATTENTION
    ),
    "whisper": Family("Whisper encoder", TEXT, make_model(
        "Whisper", "Model", vocab_size=40, num_mel_bins=8, d_model=16, encoder_layers=2, encoder_attention_heads=2,
        encoder_ffn_dim=24, decoder_layers=1, decoder_attention_heads=2, decoder_ffn_dim=24, max_source_positions=10,
        max_target_positions=12, pad_token_id=0, bos_token_id=2, eos_token_id=3, decoder_start_token_id=2,
    )),
}  # fmt: skip


def save_family(key: str, folder: Path) -> Path:
    """A model and its processor in a folder of its own; the same weights every time."""
    family, path = FAMILIES[key], folder / key
    with torch.random.fork_rng():
        torch.manual_seed(5)
        family.build().save_pretrained(path)
    if family.task == LANGUAGE:
        tiny_decoders.tokenizer(pads=True).save_pretrained(path)
    elif family.task == TEXT:
        tiny.save_tokenizer(path)
    elif family.task == PAIRS:
        tiny_seq2seq.make_tokenizer().save_pretrained(path)
    else:
        height, width = family.size
        size = {"height": height, "width": width}
        transformers.ViTImageProcessorPil(size=size).save_pretrained(path)
    return path


def save_data(folder: Path) -> None:
    """The texts, questions, pairs of texts and pictures that the families train on."""
    tiny.save_corpus(folder)
    tiny_decoders.save_questions(folder)
    tiny_seq2seq.save_pairs(folder / "pairs.csv")
    tiny_images.save_pictures(folder)


def settings(folder: Path, key: str, method: str = "fedit", engine: str = "loop", **model: Any) -> dict[str, Any]:
    """Two rounds as plain values, on a model that is saved when it is first asked for.

    The target modules are PEFT's default unless they are given.
    """
    family = FAMILIES[key]
    if not (folder / key).exists():
        save_family(key, folder)
    if family.task == IMAGES:
        values = tiny_images.settings(folder, "vit")
    elif family.task == LANGUAGE:
        values = tiny_decoders.settings(folder)
    elif family.task == PAIRS:
        data = {"train": str(folder / "pairs.csv"), "text": "de", "answer": "en", "test_fraction": 0.2}
        values = tiny.settings(folder) | {"data": data}
    else:
        values = tiny.settings(folder)
    values |= {
        "task": family.task,
        "model": {"name": str(folder / key), "target_modules": None, "head_init": "random", "max_length": 16, **model},
        "method": {"name": method, "r": 2, "lora_alpha": 4},
        "federation": {"rounds": 2},
        "engine": {"name": engine} if engine == "loop" else {"name": engine, "clients_per_pass": 3, "workers": 1},
    }
    return copy.deepcopy(values)


@dataclass(frozen=True)
class Outcome:
    """What two rounds of one family did on both engines.

    Args:
        targets: Last name parts of the target layers.
        alone: Why clients train one by one; None: they share passes.
        gap: Largest relative distance between tensors of the two engines.
        losses: Mean losses of the last round, on the loop and batched.
        moved: Whether every layer trained.
    """

    targets: tuple[str, ...]
    alone: str | None
    gap: float
    losses: tuple[float, float]
    moved: bool


def train(values: Mapping[str, Any]) -> tuple[Prepared, Progress, float]:
    """Run all rounds; return the run, its progress and the last round's loss."""
    prepared = prepare(parse_config(values))
    progress, loss = prepared.federation.begin(), 0.0
    while progress.state.round < prepared.federation.settings.rounds:
        result = prepared.federation.run_round(progress)
        progress, loss = result.progress, result.loss
    return prepared, progress, float(loss)


def compare(folder: Path, key: str, method: str = "fedit", targets: list[str] | str | None = None) -> Outcome:
    """Train a family on both engines.

    Raises:
        FedspanError: If the family is refused.
    """
    loop, progress, loss = train(settings(folder, key, method, target_modules=targets))
    batched, same, other = train(settings(folder, key, method, "batched", target_modules=targets))
    tensors, others, start = progress.state.tensors, same.state.tensors, loop.federation.begin().state.tensors
    assert set(tensors) == set(others)
    gaps = [
        float((value - others[name]).norm() / value.norm())
        for name, value in tensors.items()
        if value.is_floating_point() and value.any()
    ]
    engine = batched.engine
    changed = {name.partition("/")[0] for name, value in tensors.items() if not torch.equal(value, start[name])}
    layers = list(loop.engine.adapted.layers)
    suffixes = sorted({name.rpartition(".")[2] for name in layers})
    return Outcome(tuple(suffixes), engine.refusal, max(gaps), (loss, other), changed >= set(layers))
