"""Training without padding gives what training with it gives; where that can't be, batches stay padded."""

import inspect
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from fedspan.assembly.run import Prepared, prepare
from fedspan.config import parse_config
from fedspan.models import unpadded
from fedspan.models.adapted import AdaptedModel
from fedspan.models.layout import Move, Padded, TokenLayout, pack_bins, round_up
from fedspan.models.unpadded import Unpadded
from fedspan.training.batched import BatchedEngine
from fedspan.training.batching import Padding
from fedspan.training.config import EngineConfig
from fedspan.training.jobs import Assignment
from fedspan.training.loop import LoopEngine
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
    engine = LoopEngine(
        prepared.engine.adapted, prepared.task, settings, 0, EngineConfig(padding_free=padding_free, prefix_cache=False)
    )
    id, client_data = next((id, one) for id, one in federation.clients.items() if len(one.train))
    state = federation.begin().state
    client = federation.get_client(id, federation.begin())
    job = federation.method.start(federation.method.sync(state, client), client, {}, state.round)
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
        options = EngineConfig(clients_per_pass=3, workers=workers, padding_free=padding_free)
        settings = prepared.config.build_training_settings()
        engine = BatchedEngine(
            LoopEngine(prepared.engine.adapted, prepared.task, settings, 0, options, hidden_batch_size=8)
        )
        tiny.use_engine(prepared.federation, engine)
        states.append(tiny.final_tensors(prepared))
        assert engine.refusal is None
        assert bool(packed) == padding_free
    assert workers > 1 or any(layout.clients > 1 for layout in packed)
    for name, value in states[0].items():
        assert (states[1][name] - value).norm() < 1e-5 * value.norm().clamp(min=1e-3)


@pytest.mark.parametrize("kind", ["deep-bert", "gpt2", "llama-lm"])
@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("layers", [None, [1]])
def test_evaluation_attends_as_with_padding(
    kind: str, attention: str, layers: list[int] | None, tiny_folder: Path, decoders: Path, packed: list[TokenLayout]
) -> None:
    """Predictions, and hidden states that leave the frozen prefix, in two threads."""
    model: dict[str, Any] = {"attention": attention} | ({} if layers is None else {"layers_to_transform": layers})
    rows: list[Tensor] = []
    for padding_free in (False, True):
        changes = {"model": model, "engine": {"name": "batched", "padding_free": padding_free, "workers": 2}}
        prepared = built(kind, tiny_folder, decoders, **changes)
        job = prepared.evaluator.build_job(prepared.federation.begin(), None)
        indices = np.arange(len(prepared.train))
        prepared.engine.prepare(prepared.train, [indices[:20], indices[10:]])
        before = len(packed)
        rows.append(prepared.engine.predict(job, prepared.train, indices, 8))
        assert (prepared.engine.prefixes.get_cache(prepared.train) is None) == (layers is None)
    assert before < len(packed)
    assert all(layout.same_attention for layout in packed[before:])
    torch.testing.assert_close(rows[1], rows[0], rtol=1e-5, atol=1e-6)


def verified_padding(prepared: Prepared) -> Padding:
    """Return the padding of an engine after its verification on the training data."""
    settings = prepared.config.build_training_settings()
    padding = LoopEngine(prepared.engine.adapted, prepared.task, settings, 0, EngineConfig(prefix_cache=False)).padding
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


def test_batches_of_one_length_are_left(tiny_folder: Path, decoders: Path, packed: list[TokenLayout]) -> None:
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


CPU = torch.device("cpu")


@st.composite
def cohorts(draw: st.DrawFn) -> tuple[np.ndarray, int, int]:
    """Lengths of C * B texts, T, and C; some texts are nobody's, every client has one of its own."""
    clients, batch = draw(st.integers(1, 4)), draw(st.integers(1, 5))
    tokens = draw(st.integers(1, 90))
    lengths = np.array(
        [draw(st.integers(1 if at % batch == 0 else 0, tokens)) for at in range(clients * batch)], dtype=np.int64
    )
    return lengths, tokens, clients


@settings(max_examples=60, deadline=None)
@given(cohorts(), st.integers(1, 3))
def test_what_is_moved_comes_back(cohort: tuple[np.ndarray, int, int], width: int) -> None:
    lengths, tokens, clients = cohort
    layout = TokenLayout(lengths, tokens, CPU, clients)
    real = torch.arange(tokens) < torch.from_numpy(lengths)[:, None]
    x = torch.randn(len(lengths), tokens, width)
    packed = layout.pack(x)
    assert packed.shape == (1, layout.places, width)
    assert torch.equal(packed[0, : layout.used], x[real])
    assert not packed[0, layout.used :].any()
    assert torch.equal(layout.unpack(packed), x * real[:, :, None])
    assert torch.equal(layout.ungroup(layout.group_by_client(packed)), packed[0])
    grouped = layout.group_by_client(packed)
    for client, own in enumerate(real.view(clients, -1, tokens)):
        assert torch.equal(grouped[client, : own.sum()], x.view(clients, -1, tokens, width)[client][own])


@settings(max_examples=40, deadline=None)
@given(st.lists(st.booleans(), min_size=1, max_size=12), st.integers(0, 5))
def test_a_move_s_gradient_is_its_transpose(kept: list[bool], empty: int) -> None:
    rows = len(kept)
    chosen = [row for row in range(rows) if kept[row]]
    source = np.random.default_rng(0).permutation([*chosen, *[-1] * (empty + (not chosen))])
    matrix = torch.zeros(len(source), rows, dtype=torch.float64)
    for place, row in enumerate(source.tolist()):
        if row >= 0:
            matrix[place, row] = 1
    move = Move.from_sources(source, rows, CPU)
    x = torch.randn(rows, 2, dtype=torch.float64, requires_grad=True)
    made = move(x)
    assert torch.equal(made, matrix @ x)
    gradient = torch.randn_like(made)
    assert torch.equal(torch.autograd.grad(made, x, gradient)[0], matrix.T @ gradient)
    assert torch.equal(move.reverse(gradient), matrix.T @ gradient)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(0, 700), min_size=1, max_size=40).filter(any))
def test_bins_hold_every_text_once_and_whole(lengths: list[int]) -> None:
    seen: dict[int, list[int]] = {}
    found = pack_bins(np.array(lengths, dtype=np.int64))
    for bins in found:
        assert bins.width % 32 == 0
        for text, position in zip(bins.text, bins.position, strict=True):
            for one in {*text.tolist()} - {-1}:
                assert one not in seen  # in one bin only
                seen[one] = position[text == one].tolist()
    assert seen == {text: list(range(length)) for text, length in enumerate(lengths) if length}
    assert len({bins.width for bins in found}) == len(found)


@given(st.integers(1, 100_000))
def test_few_shapes_and_little_waste(count: int) -> None:
    assert count <= round_up(count) <= count * 1.0625 + 1
    assert len({round_up(one) for one in range(513, 1025)}) <= 16


@pytest.mark.parametrize("causal", [False, True])
def test_attention_in_bins_is_attention_text_by_text(causal: bool) -> None:
    lengths, tokens, heads, width = np.array([3, 40, 7, 1, 20]), 40, 4, 6
    layout = TokenLayout(lengths, tokens, CPU)
    dtype, least = torch.float64, torch.finfo(torch.float64).min
    real = torch.arange(tokens) < torch.from_numpy(lengths)[:, None]
    allowed = real[:, None, None, :].expand(-1, 1, tokens, -1)
    if causal:
        allowed = allowed & torch.ones(tokens, tokens, dtype=torch.bool).tril()
    mask = torch.zeros(allowed.shape, dtype=dtype).masked_fill(~allowed, least)

    def eager(module: object, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor, scaling: float):
        k, v = (one.repeat_interleave(q.shape[1] // one.shape[1], 1) for one in (k, v))
        weights = torch.softmax(q @ k.mT * scaling + mask, -1)
        return (weights @ v).transpose(1, 2).contiguous(), weights

    q, k, v = (torch.randn(len(lengths), tokens, count, width, dtype=dtype) for count in (heads, 2, 2))
    parts = [layout.pack(one.flatten(2)).view(1, layout.places, -1, width).transpose(1, 2) for one in (q, k, v)]
    found = layout.attend(eager, torch.nn.Identity(), *parts, mask, {"scaling": 0.3})
    for text, length in enumerate(lengths.tolist()):
        own = [one[text : text + 1, :length].transpose(1, 2) for one in (q, k, v)]
        wanted = eager(None, *own, mask[text : text + 1, :, :length, :length], 0.3)[0]
        start = int(lengths[:text].sum())
        torch.testing.assert_close(found[:, start : start + length], wanted)


def test_a_mask_of_another_form_is_refused() -> None:
    layout = TokenLayout(np.array([2, 3]), 3, CPU)  # None would do if no text were padded
    x = torch.zeros(1, 2, layout.places, 4)
    for mask in (None, torch.zeros(2, 2, 3, 3), torch.ones(2, 1, 3, 3, dtype=torch.bool), torch.zeros(2, 3)):
        with pytest.raises(Padded):
            layout.attend(lambda *_: None, torch.nn.Identity(), x, x, x, mask, {})
