"""Training without padding gives what training with it gives; where that can't be, batches stay padded."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from fedspan.config import parse_config
from fedspan.core.values import Job
from fedspan.models import unpadded
from fedspan.models.adapted import AdaptedModel
from fedspan.models.layout import TokenLayout
from fedspan.models.unpadded import Unpadded
from fedspan.runs.setup import Prepared, prepare
from fedspan.training.batched import BatchedEngine
from fedspan.training.batching import Padding
from fedspan.training.jobs import Assignment
from fedspan.training.loop import LoopEngine
from fedspan.training.stacking import StackingRequest
from helpers import tiny, tiny_decoders
from helpers.families import others_slow

TEXTS = ("bert", "roberta", "distilbert", "gpt2")
KINDS = (*TEXTS, *(f"{family}-lm" for family in tiny_decoders.FAMILIES))


def built(kind: str, tiny_folder: Path, decoders: Path, **changes: Any) -> Prepared:
    changes = {"training": {"optimizer": "sgd", "lr": 0.02}, **changes}
    if kind.endswith("-lm"):
        made = {"evaluation": {"generate": False}, **changes}
        return prepare(parse_config(tiny_decoders.settings(decoders, kind.removesuffix("-lm"), **made)))
    if kind == "distilbert":
        changes["model"] = {"target_modules": ["q_lin", "v_lin", "lin1"], **changes.get("model", {})}
    return prepare(tiny.config(tiny_folder, kind, **changes))


@pytest.fixture
def packed(monkeypatch: pytest.MonkeyPatch) -> list[TokenLayout]:
    """The layouts of all passes without padding."""
    found: list[TokenLayout] = []
    pack = TokenLayout.pack

    def counted(self: TokenLayout, x: Tensor) -> Tensor:
        found.append(self)
        return pack(self, x)

    monkeypatch.setattr(TokenLayout, "pack", counted)
    return found


def trained(prepared: Prepared, padding_free: bool) -> tuple[Mapping[str, Tensor], LoopEngine]:
    """One client's first job."""
    federation, settings = prepared.federation, prepared.config.build_training_settings()
    engine = LoopEngine(prepared.engine.adapted, prepared.task, settings, 0, None, padding_free)
    id, client_data = next((id, one) for id, one in federation.clients.items() if len(one.train))
    state = federation.begin().state
    client = federation.get_client(id, federation.begin())
    job = federation.method.start(federation.method.sync(state, client), client, {}, state.round)
    assert isinstance(job, Job)
    made = engine.train(Assignment(id, 0, job, client_data.train, 0.02), prepared.train)
    return {**made.tensors, "loss": torch.tensor(made.metrics["loss"])}, engine


def require_equal_to_padded(prepared: Prepared, limit: float = 1e-6) -> None:
    """Check that a job ends where it ends with padding.

    Factors, and softmax or norms of decoders, are float32 in a float64 model, too.
    """
    expected, _ = trained(prepared, padding_free=False)
    found, engine = trained(prepared, padding_free=True)
    assert engine.padding.refusal is None
    for name, value in expected.items():
        apart = (found[name].double() - value.double()).norm() / value.double().norm().clamp(min=1e-3)
        assert apart < limit, name


@pytest.mark.parametrize("kind", others_slow(KINDS, ["bert", "gpt2", "llama-lm", "gemma-lm"]))
def test_a_job_ends_where_it_ends_with_padding(
    kind: str, tiny_folder: Path, decoders: Path, packed: list[TokenLayout]
) -> None:
    prepared = built(kind, tiny_folder, decoders)
    prepared.engine.adapted.model.double()
    require_equal_to_padded(prepared)
    assert packed


@pytest.mark.parametrize("kind", ["bert", "gpt2", "llama-lm"])
def test_fused_attention_in_bins(kind: str, tiny_folder: Path, decoders: Path, packed: list[TokenLayout]) -> None:
    prepared = built(kind, tiny_folder, decoders, model={"attention": "sdpa"})
    prepared.engine.adapted.model.double()
    require_equal_to_padded(prepared)
    assert all(layout.fused for layout in packed)


def reference_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    ends_q: Tensor,
    ends_k: Tensor,
    longest_q: int,
    longest_k: int,
    *,
    scale: float | None = None,
    window_size: tuple[int, int] = (-1, -1),
    enable_gqa: bool = False,
) -> Tensor:
    """``torch.nn.attention.varlen.varlen_attn``, text by text on the CPU."""
    assert ends_q.dtype == torch.int32
    assert (q.shape[1] != k.shape[1]) == enable_gqa
    assert max(ends_q.diff()) == longest_q == longest_k
    k, v = (part.repeat_interleave(q.shape[1] // k.shape[1], 1) for part in (k, v))
    outputs: list[Tensor] = []
    for start, end in zip(ends_q[:-1].tolist(), ends_k[1:].tolist(), strict=True):
        scores = torch.einsum("qhd,khd->hqk", q[start:end], k[start:end]) * (scale or q.shape[2] ** -0.5)
        distance = torch.arange(end - start)[:, None] - torch.arange(end - start)
        left, right = window_size
        hidden = (distance > (left if left >= 0 else end)) | (-distance > (right if right >= 0 else end))
        outputs.append(torch.einsum("hqk,khd->qhd", scores.masked_fill(hidden, -torch.inf).softmax(-1), v[start:end]))
    return torch.cat(outputs)


@pytest.fixture
def variable(monkeypatch: pytest.MonkeyPatch) -> None:
    """Attention over texts of variable length, as on a GPU in half precision."""
    begin = Unpadded.__init__

    def start(self: Unpadded, adapted: AdaptedModel) -> None:
        begin(self, adapted)
        self.variable = True

    monkeypatch.setattr(Unpadded, "__init__", start)
    monkeypatch.setattr(unpadded, "import_variable_attention", lambda: reference_attention)


@pytest.mark.parametrize("kind", others_slow(KINDS, ["bert", "gpt2", "llama-lm", "gemma-lm"]))
@pytest.mark.usefixtures("variable")
def test_attention_over_texts_of_variable_length(
    kind: str, tiny_folder: Path, decoders: Path, packed: list[TokenLayout], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(TokenLayout, "attend", None)
    prepared = built(kind, tiny_folder, decoders)
    prepared.engine.adapted.model.double()
    require_equal_to_padded(prepared)
    assert packed


@pytest.mark.usefixtures("variable")
def test_where_the_gpu_has_no_such_attention_texts_stand_in_bins(
    tiny_folder: Path, decoders: Path, packed: list[TokenLayout], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*args: Any, **options: Any) -> Any:
        raise RuntimeError("FlashAttention only supports Ampere GPUs or newer.")

    monkeypatch.setattr(unpadded, "import_variable_attention", lambda: refuse)
    require_equal_to_padded(built("bert", tiny_folder, decoders), 1e-4)
    assert packed


def test_pytorch_has_the_attention_that_is_used() -> None:
    varlen = pytest.importorskip("torch.nn.attention.varlen", reason="PyTorch before 2.10")
    known = list(inspect.signature(varlen.varlen_attn).parameters)
    assert known[:7] == ["query", "key", "value", "cu_seq_q", "cu_seq_k", "max_q", "max_k"]
    assert {"scale", "window_size", "enable_gqa"} <= set(known)


@pytest.mark.parametrize("layers", [pytest.param(None, marks=pytest.mark.slow), [1]])
@pytest.mark.parametrize("workers", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_several_clients_at_once(
    layers: list[int] | None, workers: int, tiny_folder: Path, decoders: Path, packed: list[TokenLayout]
) -> None:
    """With the frozen prefix cached, too; clients' batches differ in size, and ranks are their own."""
    model: dict[str, Any] = {} if layers is None else {"layers_to_transform": layers}
    changes: dict[str, Any] = {
        "model": model,
        "method": {"name": "hetlora", "r": 3},
        "federation": {"rounds": 2, "clients_per_round": None, "ranks": [1, 2, 3]},
        "training": {"optimizer": "sgd", "lr": 0.02, "batch_size": 7, "local_steps": None},
    }
    states: list[Mapping[str, Tensor]] = []
    for padding_free in (False, True):
        prepared = built("deep-bert", tiny_folder, decoders, **changes)
        prefix = prepared.config.engine.build_prefix_settings(8)
        settings = prepared.config.build_training_settings()
        engine = BatchedEngine(
            prepared.engine.adapted, prepared.task, settings, 0, StackingRequest(3, workers), prefix, padding_free
        )
        tiny.use_engine(prepared.federation, engine)
        progress = prepared.federation.begin()
        for _ in range(2):
            progress = prepared.federation.run_round(progress).progress
        states.append(progress.state.tensors)
        assert engine.refusal is None
        assert bool(packed) == padding_free
    assert workers > 1 or any(layout.clients > 1 for layout in packed)
    for name, value in states[0].items():
        assert (states[1][name] - value).norm() < 1e-5 * value.norm().clamp(min=1e-3)


def verified_padding(prepared: Prepared) -> Padding:
    """Return the padding of an engine after its verification on the training data."""
    settings = prepared.config.build_training_settings()
    padding = LoopEngine(prepared.engine.adapted, prepared.task, settings, 0, None, padding_free=True).padding
    padding.ensure(prepared.train)
    return padding


def batch_of_one_length(prepared: Prepared) -> tuple[Any, np.ndarray]:
    """Return a batch of four training texts of the most frequent length, and their lengths."""
    lengths = np.asarray(prepared.train.lengths)
    alike = np.flatnonzero(lengths == np.bincount(lengths).argmax())[:4].tolist()
    return prepared.task.collate(prepared.train, alike, torch.device("cpu")), lengths[alike]


@pytest.mark.parametrize(
    ("kind", "changes", "reason"),
    [
        ("bert", {"training": {"lora_dropout": 0.1}}, "dropout masks"),
        ("bert", {"model": {"gradient_checkpointing": True}}, "gradient checkpointing"),
        ("bert", {"model": {"modules_to_save": ["LayerNorm"]}}, "trains inside a block"),
        ("llama-lm", {"data": {"packing": True}}, "packed batches"),
    ],
)
def test_where_batches_stay_padded(
    kind: str, changes: dict[str, Any], reason: str, tiny_folder: Path, decoders: Path
) -> None:
    refusal = verified_padding(built(kind, tiny_folder, decoders, **changes)).refusal
    assert refusal is not None
    assert reason in refusal


def test_other_attention_than_eager_and_sdpa_is_left_alone(tiny_folder: Path, decoders: Path) -> None:
    prepared = built("bert", tiny_folder, decoders)
    model: Any = prepared.engine.adapted.model
    model.set_attn_implementation("flex_attention")
    assert "eager or sdpa" in str(verified_padding(prepared).refusal)


def test_a_model_that_reads_its_neighbors_is_detected(tiny_folder: Path, decoders: Path) -> None:
    """A block that adds the next place's hidden states does something else when texts stand side by side."""
    prepared = built("bert", tiny_folder, decoders)
    model: Any = prepared.engine.adapted.model
    block: nn.Module = model.bert.encoder.layer[0]
    block.register_forward_hook(lambda _, __, output: output + output.roll(1, 1))
    assert "without padding" in str(verified_padding(prepared).refusal)


def test_batches_of_one_length_are_left_as_they_are(
    tiny_folder: Path, decoders: Path, packed: list[TokenLayout]
) -> None:
    prepared = built("bert", tiny_folder, decoders)
    padding, (batch, lengths) = verified_padding(prepared), batch_of_one_length(prepared)
    packed.clear()
    with padding.remove_padding(batch, lengths):
        prepared.task.compute_loss(prepared.engine.adapted.model, batch)
    assert not packed


def test_texts_of_one_length_of_which_some_are_nobody_s(
    tiny_folder: Path, decoders: Path, packed: list[TokenLayout]
) -> None:
    """Transformers would make no mask: one client's batch is smaller than the other's, and no text is padded."""
    prepared = built("bert", tiny_folder, decoders)
    padding, (batch, lengths) = verified_padding(prepared), batch_of_one_length(prepared)
    packed.clear()
    model, mask = prepared.engine.adapted.model, torch.eye(3, 4)
    expected = prepared.task.compute_client_losses(model, batch, mask)
    with padding.remove_padding(batch, lengths, 2, np.array([True, True, True, False])):
        losses = prepared.task.compute_client_losses(model, batch, mask)
    assert packed
    torch.testing.assert_close(losses, expected)
