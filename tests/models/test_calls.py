"""Modules that a forward pass calls, and the replaced forward: fast paths, PEFT's numbers, weights nobody writes."""

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoTokenizer, PretrainedConfig, PreTrainedModel
from transformers.modeling_outputs import SequenceClassifierOutput

import fedspan
from fedspan.core.lowrank import LowRank
from fedspan.core.parametrization import LoRA, Parametrization
from fedspan.core.tensors import join_extra_name, join_tensor_name
from fedspan.errors import FedspanError
from fedspan.models.adapted import AdaptedModel, BlockedFastPaths
from fedspan.models.calls import (
    build_tiny_batch,
    enter_evaluation,
    find_block_chains,
    has_own_decoder_inputs,
    replace_forward,
    trace_calls,
)
from fedspan.models.direct_uses import forbid_direct_uses
from fedspan.models.targets import find_extras
from fedspan.planning.compute import Meter, meter_pass
from fedspan.training.trainers import trainer_engine
from fedspan.training.trainers.trainer_engine import TrainerEngine
from helpers import tiny
from helpers.refusals import refused


class Block(nn.Module):
    """Adds a linear map, and returns a tuple if asked to."""

    def __init__(self, outputs: int = 4, width: int | None = None) -> None:
        super().__init__()
        self.linear, self.width = nn.Linear(4, outputs), width

    def forward(self, hidden_states: Tensor, bias: Tensor | None = None) -> Any:
        result = self.linear(hidden_states) + (0 if bias is None else bias)
        return result if self.width is None else (result, bias)[: self.width]


class Reader(nn.Module):
    """Reads tokens, passes them through its blocks in some order, and counts its passes."""

    main_input_name = "input_ids"

    def __init__(self, *blocks: nn.Module, order: tuple[int, ...] = ()) -> None:
        super().__init__()
        self.embedding, self.blocks = nn.Embedding(9, 4), nn.ModuleList(blocks)
        self.dropout, self.order = nn.Dropout(0.5), order or tuple(range(len(blocks)))
        self.config = SimpleNamespace()

    def forward(self, input_ids: Tensor) -> Tensor:
        hidden: Any = self.embedding(input_ids)
        for number in self.order:
            hidden = self.blocks[number](hidden)
            hidden = hidden[0] if isinstance(hidden, tuple) else hidden
        return self.dropout(hidden)


def chains(model: nn.Module) -> list[list[nn.Module]]:
    return find_block_chains(model, trace_calls(model)[1])


def test_blocks_that_pass_on_hidden_states_are_a_chain_in_the_order_of_their_calls() -> None:
    model = Reader(Block(), Block(width=1), Block(), order=(2, 0))
    assert chains(model) == [[model.blocks[2], model.blocks[0]]]  # a block that is not called is none of it


@pytest.mark.parametrize(
    "model",
    [
        Reader(Block(), order=(0, 0)),  # called twice
        Reader(Block(outputs=1), nn.Identity()),  # of another shape
        Reader(),
    ],
)
def test_what_is_no_chain(model: nn.Module) -> None:
    assert chains(model) == []


def test_hidden_states_that_change_between_two_blocks_end_a_chain() -> None:
    model = Reader(Block(), Block())
    first, second = model.blocks
    with replace_forward(first, lambda hidden: Block.forward(first, hidden)):
        assert chains(model) == [[first, second]]
    model.forward = lambda input_ids: second(first(model.embedding(input_ids)) * 2)
    assert chains(model) == []


def test_tracing_leaves_modes_and_hooks_as_they_were() -> None:
    model = Reader(Block(), Block())
    model.train()
    model.blocks[0].eval()
    modes = [module.training for module in model.modules()]
    entered, calls = trace_calls(model)
    assert sorted(entered[module] for module in (model, model.embedding, *model.blocks)) == [
        entered[module] for module in (model, model.embedding, *model.blocks)
    ]
    assert [len(calls[block]) for block in model.blocks] == [1, 1]
    assert [module.training for module in model.modules()] == modes
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


def test_evaluation_ends_with_an_error_in_it() -> None:
    model = nn.Sequential(nn.Dropout(), nn.Linear(2, 3)).train()
    model[1].eval()

    def fail() -> None:
        with enter_evaluation(model):
            assert not model[0].training
            assert not torch.is_grad_enabled()
            raise ValueError("inner")

    with pytest.raises(ValueError, match="inner"):
        fail()
    assert (model.training, model[0].training, model[1].training) == (True, True, False)
    assert torch.is_grad_enabled()


def test_a_replaced_forward_is_restored_also_one_of_its_own() -> None:
    module = nn.Linear(2, 3)
    with replace_forward(module, lambda x: x):
        assert module(5) == 5
        with replace_forward(module, lambda x: -x):
            assert module(5) == -5
        assert module(5) == 5
    assert "forward" not in vars(module)
    assert module(torch.zeros(1, 2)).shape == (1, 3)


def test_tiny_batches_are_what_a_model_reads() -> None:
    small = {"num_hidden_layers": 1, "num_attention_heads": 2, "hidden_size": 8, "intermediate_size": 4}
    bert = transformers.BertModel(transformers.BertConfig(vocab_size=9, **small))
    assert build_tiny_batch(bert)["input_ids"].tolist() == [[1, 1, 1]] * 2
    vit = transformers.ViTModel(transformers.ViTConfig(image_size=(6, 4), patch_size=2, num_channels=1, **small))
    assert build_tiny_batch(vit)["pixel_values"].shape == (2, 1, 6, 4)
    sizes = {"d_model": 8, "d_ff": 4, "d_kv": 4, "num_layers": 1, "num_heads": 2, "vocab_size": 9}
    t5 = transformers.T5ForConditionalGeneration(transformers.T5Config(**sizes, decoder_start_token_id=0))
    assert has_own_decoder_inputs(t5)
    assert not has_own_decoder_inputs(bert)
    batch = build_tiny_batch(t5)
    assert batch["input_ids"].tolist() == batch["decoder_input_ids"].tolist() == [[1, 1, t5.config.eos_token_id]] * 2
    for model in (bert, vit, t5):
        trace_calls(model)


def test_a_model_of_something_else_is_refused() -> None:
    model = nn.Linear(2, 3)
    with pytest.raises(ValueError, match="the model takes neither tokens nor images"):
        trace_calls(model)


LINEAR = ["linear1", "linear2"]


def test_layers_within_are_called_until_the_fast_paths_are_allowed_again() -> None:
    layer = nn.TransformerEncoderLayer(8, 2, 12, batch_first=True)
    model = nn.TransformerEncoder(layer, 1).eval().requires_grad_(False)
    calls: list[str] = []
    inner = model.layers[0].linear1
    forward = inner.forward
    inner.forward = lambda x: [calls.append("linear1"), forward(x)][1]
    x, mask = torch.randn(3, 5, 8), torch.zeros(3, 5, dtype=torch.bool)
    mask[1, 3:] = True

    def compute() -> Tensor:
        calls.clear()
        return model(x, src_key_padding_mask=mask)[~mask]

    expected = compute()
    assert not calls
    blocked = BlockedFastPaths(model)
    assert compute().allclose(expected, atol=1e-5)
    assert calls == ["linear1"]
    blocked.restore()
    assert compute().allclose(expected, atol=1e-5)
    assert not calls


class SmallConfig(PretrainedConfig):
    model_type = "small-encoder"


class SmallEncoder(PreTrainedModel):
    """A user's own classifier around torch's encoder layer."""

    config_class = SmallConfig
    base_model_prefix = "encoder"

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.embed = nn.Embedding(tiny.VOCABULARY_SIZE, 16)
        self.block = nn.TransformerEncoderLayer(16, 2, 24, dropout=0.0, batch_first=True)
        self.classifier = nn.Linear(16, config.num_labels)
        self.post_init()

    def get_input_embeddings(self) -> nn.Module:
        return self.embed

    def forward(self, input_ids: Tensor, attention_mask: Any = None, labels: Any = None, **_: Any) -> Any:
        mask = None if attention_mask is None else attention_mask == 0
        logits = self.classifier(self.block(self.embed(input_ids), src_key_padding_mask=mask)[:, 0])
        loss = None if labels is None else nn.functional.cross_entropy(logits, labels)
        return SequenceClassifierOutput(loss=loss, logits=logits)


def make_model() -> SmallEncoder:
    torch.manual_seed(8)
    return SmallEncoder(SmallConfig(num_labels=len(tiny.LABELS))).eval()


def merge(folder: Path) -> Any:
    """A run's model, with its adapter merged by PEFT."""
    return PeftModel.from_pretrained(make_model(), str(folder / "adapter")).merge_and_unload().eval()


def test_a_model_predicts_as_its_adapter_merged_by_peft(tiny_folder: Path, tmp_path: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(tiny_folder / "bert")
    changes = {"model": {"target_modules": LINEAR}, "training": {"lr": 0.1, "local_steps": 4, "batch_size": 4}}
    config = tiny.settings(tiny_folder, **changes)
    del config["model"]["name"]
    fedspan.run(config, tmp_path / "run", model=make_model(), tokenizer=tokenizer)
    texts = ["admin1 word2 word3", "lab4 lab5", "symptom6 word1 word2 word7", "billing2"]
    predictions = fedspan.predict(tmp_path / "run", texts, model=make_model(), tokenizer=tokenizer)
    with torch.no_grad():
        logits = merge(tmp_path / "run")(**tokenizer(texts, padding=True, return_tensors="pt")).logits
    expected = logits.softmax(1).max(1)
    assert [label for label, _ in predictions] == [tiny.LABELS[at] for at in expected.indices.tolist()]
    assert [score for _, score in predictions] == pytest.approx(expected.values.tolist(), abs=1e-5)


def test_a_trainer_s_evaluation_has_the_adapter(tmp_path: Path) -> None:
    model, ids, labels = make_model(), torch.arange(4, 36).reshape(8, 4), torch.arange(8) % 4

    def train(round: fedspan.TrainingRound) -> None:
        for rows in round.batches(torch.arange(8).split(4)):
            loss = model(ids[rows], labels=labels[rows]).loss
            loss.backward()
            round.step(loss, len(rows))

    measures = {"evaluate": lambda: {"loss": float(model(ids, labels=labels).loss)}, "validation_examples": 8}
    trainer = fedspan.TorchTrainer(model, train, 8, **measures)
    config = {"model": {"target_modules": LINEAR}, "training": {"lr": 0.1, "local_epochs": 2}}
    report = fedspan.simulate(config, tmp_path / "run", trainers={"a": trainer})
    with torch.no_grad():
        expected = float(merge(tmp_path / "run")(ids, labels=labels).loss)
        body = make_model()
        body.classifier.load_state_dict(merge(tmp_path / "run").classifier.state_dict())
        assert expected != pytest.approx(float(body(ids, labels=labels).loss), rel=1e-2)
    assert report.scores["validation"]["loss"] == pytest.approx(expected, rel=1e-5)


def test_replicas_block_the_fast_paths_too() -> None:
    model = make_model()
    adapted = AdaptedModel(model, {"block.linear1": model.block.linear1}, {})
    replica = adapted.create_replica()
    assert replica.model.block._forward_pre_hooks
    adapted.restore()
    assert not model.block._forward_pre_hooks


class Parts(nn.Module):
    """A model that calls ``called``, uses the weight of ``read`` or of ``both``, and has an expert without inputs."""

    def __init__(self, used: str) -> None:
        super().__init__()
        self.called, self.read, self.both, self.expert = (nn.Linear(6, 6) for _ in range(4))
        self.norm, self.noise, self.used = nn.BatchNorm1d(6), nn.Dropout(0.5), used

    def forward(self, x: Tensor) -> Tensor:
        x = self.noise(self.norm(self.both(self.called(x))))
        return x if self.used == "none" else F.linear(x, getattr(self, self.used).weight)


USED = ["called", "read", "both", "expert"]


def adapt(model: nn.Module) -> AdaptedModel:
    return AdaptedModel(model, {name: model.get_submodule(name) for name in USED}, {})


@pytest.mark.parametrize("used", ["read", "both"])
def test_a_weight_that_is_used_without_a_call_is_refused_by_name(used: str) -> None:
    adapted = adapt(Parts(used).train())
    with (
        pytest.raises(FedspanError, match=f"the model uses the weight of '{used}' without calling the layer") as caught,
        forbid_direct_uses(adapted),
    ):
        adapted.model(torch.randn(4, 6))
    assert caught.value.field == "model.target_modules"
    assert adapted.model.training
    assert "forward" not in vars(adapted.model)


def test_calls_and_layers_without_a_use_are_accepted_and_leave_no_trace() -> None:
    adapted = adapt(Parts("none").train())
    mean = adapted.model.norm.running_mean.clone()
    with forbid_direct_uses(adapted):
        adapted.model(torch.randn(4, 6))
        adapted.model.read.weight.norm()  # a penalty of the loss is outside of the model
    assert torch.equal(adapted.model.norm.running_mean, mean)
    assert all(layer.observe is None for layer in adapted.layers.values())


def make_trainer(used: str) -> fedspan.TorchTrainer:
    torch.manual_seed(2)
    model = Parts(used)
    x, y = torch.randn(8, 6), torch.randn(8, 6)

    def train(round: fedspan.TrainingRound) -> None:
        for rows in round.batches(torch.arange(8).split(4)):
            loss = (model(x[rows]) - y[rows]).square().mean()
            loss.backward()
            round.step(loss, len(rows))

    return fedspan.TorchTrainer(model, train, 8)


@pytest.mark.parametrize("used", ["read", "both"])
def test_a_trainer_s_model_is_checked_in_its_first_pass(used: str, tmp_path: Path) -> None:
    config: dict[str, Any] = {"model": {"target_modules": USED}, "method": {"r": 2}, "federation": {"rounds": 1}}
    with pytest.raises(FedspanError, match=f"uses the weight of '{used}' without calling the layer"):
        fedspan.simulate(config, tmp_path / "run", trainers={"a": make_trainer(used)})


def test_the_check_of_a_trainer_s_model_changes_no_bits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config: dict[str, Any] = {"model": {"target_modules": USED}, "method": {"r": 2}, "federation": {"rounds": 1}}
    checked: list[AdaptedModel] = []

    def check(adapted: AdaptedModel) -> AbstractContextManager[None]:
        checked.append(adapted)
        return forbid_direct_uses(adapted)

    monkeypatch.setattr(trainer_engine, "forbid_direct_uses", check)
    fedspan.simulate(config, tmp_path / "checked", trainers={"a": make_trainer("none")})
    assert len(checked) == 1
    monkeypatch.setattr(TrainerEngine, "_check_first_pass", lambda *_: nullcontext())
    fedspan.simulate(config, tmp_path / "unchecked", trainers={"a": make_trainer("none")})
    assert len(checked) == 1
    expected, found = (
        load_file(tmp_path / name / "adapter" / "adapter_model.safetensors") for name in ("unchecked", "checked")
    )
    assert expected.keys() == found.keys()
    assert all(torch.equal(value, found[name]) for name, value in expected.items())


class ReadingConfig(PretrainedConfig):
    model_type = "reading-encoder"


class ReadingEncoder(PreTrainedModel):
    """A text classifier that uses the weight of ``read`` without a call."""

    config_class = ReadingConfig
    base_model_prefix = "encoder"

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.embed, self.called, self.read = nn.Embedding(tiny.VOCABULARY_SIZE, 6), nn.Linear(6, 7), nn.Linear(7, 5)
        self.classifier = nn.Linear(5, config.num_labels)
        self.post_init()

    def get_input_embeddings(self) -> nn.Module:
        return self.embed

    def forward(self, input_ids: Tensor, labels: Any = None, **_: Any) -> Any:
        logits = self.classifier(F.linear(self.called(self.embed(input_ids)[:, 0]), self.read.weight))
        loss = None if labels is None else F.cross_entropy(logits, labels)
        return SequenceClassifierOutput(loss=loss, logits=logits)


@pytest.mark.parametrize("engine", ["loop", "batched"])
def test_an_engine_checks_a_model_before_it_trains(tiny_folder: Path, tmp_path: Path, engine: str) -> None:
    objects: dict[str, Any] = {
        "model": ReadingEncoder(ReadingConfig(num_labels=len(tiny.LABELS))),
        "tokenizer": AutoTokenizer.from_pretrained(tiny_folder / "bert"),
    }

    def run(*targets: str) -> None:
        settings = tiny.settings(tiny_folder, model={"target_modules": list(targets)}, engine={"name": engine})
        del settings["model"]["name"]
        fedspan.run(settings, tmp_path / targets[-1], **objects)

    with refused("model.target_modules"):
        run("called", "read")
    assert not (tmp_path / "read" / "metrics.jsonl").read_text()  # no round is done
    run("called")


ROWS, INPUTS, WIDTH = 6, 10, 14


def net(device: str, frozen: int = 0) -> nn.Sequential:
    """Three layers, the first of which may be frozen."""
    made = nn.Sequential(nn.Linear(INPUTS, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, 1))
    for layer in list(made)[:frozen]:
        layer.requires_grad_(False)
    return made.to(device)


def test_flops_are_those_of_torch_s_counter_on_a_real_pass() -> None:
    for frozen in (0, 1, 3):
        real, empty = net("cpu", frozen), net("meta", frozen)
        with FlopCounterMode(display=False) as counter:
            loss = real(torch.ones(ROWS, INPUTS)).sum()
            forward = counter.get_total_flops()
            loss.backward()
        found = meter_pass(lambda empty=empty: empty(torch.empty(ROWS, INPUTS, device="meta")))
        assert (found.forward, found.forward + found.backward) == (forward, counter.get_total_flops())


def test_frozen_weights_have_no_gradients_and_nothing_goes_below_the_first_that_moves() -> None:
    layer, last = 2 * ROWS * WIDTH * WIDTH, 2 * ROWS * WIDTH
    found = meter_pass(lambda: net("meta", frozen=3)(torch.empty(ROWS, INPUTS, device="meta")))
    assert found.forward == 2 * ROWS * INPUTS * WIDTH + layer + last
    assert found.backward == last  # of the last weight alone


def test_the_peak_is_of_what_is_held_at_the_same_time() -> None:
    """A chain without gradients holds two tensors at a time; one with them holds all until they are used."""
    x = torch.empty(1000, device="meta")

    def chain() -> torch.Tensor:
        y = x
        for _ in range(5):
            y = y.sin()
        return y

    assert meter_pass(chain).peak == 2 * 4000
    weight = torch.empty(1000, device="meta", requires_grad=True)

    def saved() -> torch.Tensor:
        y = weight
        for _ in range(5):
            y = y.sin()  # keeps its input: four results; the fifth one is the output
        return y

    assert 5 * 4000 <= meter_pass(saved).peak <= 8 * 4000


def test_what_is_computed_again_is_counted_again_and_not_kept() -> None:
    chain = [nn.Sequential(nn.Linear(WIDTH, 50), nn.GELU(), nn.Linear(50, WIDTH)).to("meta") for _ in range(8)]

    def blocks(again: bool) -> torch.Tensor:
        y = torch.empty(100, WIDTH, device="meta", requires_grad=True)
        for block in chain:
            block.requires_grad_(False)
            y = checkpoint(block, y, use_reentrant=False) if again else block(y)
        return y

    kept, again = meter_pass(lambda: blocks(False)), meter_pass(lambda: blocks(True))
    assert again.forward == kept.forward
    assert again.backward > kept.backward
    assert again.peak < kept.peak


def test_questions_about_values_are_answered_with_yes() -> None:
    mask = torch.empty(3, dtype=torch.bool, device="meta")
    with Meter():
        assert bool(mask.all())
        assert F.relu(torch.empty(2, device="meta")).shape == (2,)


TARGETS = {"bert": tiny.BERT, "gpt2": tiny.GPT2}
BATCH = {
    "input_ids": torch.tensor([[2, 7, 21, 40, 4], [2, 9, 3, 3, 3]]),
    "attention_mask": torch.tensor([[1, 1, 1, 1, 1], [1, 1, 1, 0, 0]]),
}
both_kinds = pytest.mark.parametrize("kind", TARGETS)


def adapt_layers(model: nn.Module, kind: str) -> AdaptedModel:
    names = tuple(TARGETS[kind])
    targets = {name: module for name, module in model.named_modules() if name.endswith(names)}
    return AdaptedModel(model, targets, find_extras(model, ["score" if kind == "gpt2" else "classifier"]))


def random_pairs(adapted: AdaptedModel, seed: int = 1) -> dict[str, LowRank]:
    """By layer, of rank 3."""
    rng = torch.Generator().manual_seed(seed)
    return {
        layer.name: LowRank(
            0.3 * torch.randn(layer.out_features, 3, generator=rng),
            0.3 * torch.randn(3, layer.in_features, generator=rng),
        )
        for layer in adapted.spec.layers
    }


def install(adapted: AdaptedModel, how: Parametrization, **slots: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """One parametrization for all layers, slots given as ``A={layer: tensor}``."""
    tensors = {
        join_tensor_name(layer, slot): value for slot, by_layer in slots.items() for layer, value in by_layer.items()
    }
    return adapted.install(dict.fromkeys(adapted.layers, how), tensors, frozenset(tensors))


def install_pairs(adapted: AdaptedModel, pairs: Mapping[str, LowRank], scaling: float) -> dict[str, Tensor]:
    factors = {slot: {layer: getattr(pair, slot) for layer, pair in pairs.items()} for slot in ("A", "B")}
    return install(adapted, LoRA(scaling), **factors)


@torch.no_grad()
def logits(model: nn.Module) -> Tensor:
    return model(**BATCH).logits.float()


def distance(left: Tensor, right: Tensor) -> float:
    return float((left - right).abs().max())


@pytest.mark.filterwarnings("ignore:fan_in_fan_out is set to False")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@both_kinds
def test_the_forward_is_peft_s(kind: str, dtype: torch.dtype, tiny_folder: Path) -> None:
    """The same float32 factors on a base in either format.

    bfloat16 has 8 bits, and PEFT rounds the sum of base and product once where we round both: 0.05 is a few roundings
    of logits of order 2, which the factors move by more than 0.3.
    """
    model = tiny.fresh_classifier(tiny_folder / kind, dtype=dtype)
    before, adapted = logits(model), adapt_layers(model, kind)
    pairs = random_pairs(adapted)
    install_pairs(adapted, pairs, 2.0)
    lora = LoraConfig(r=3, lora_alpha=6, target_modules=TARGETS[kind], task_type="SEQ_CLS")
    peft = get_peft_model(tiny.fresh_classifier(tiny_folder / kind, dtype=dtype), lora).eval()
    with torch.no_grad():
        for layer, pair in pairs.items():
            peft.get_parameter(f"base_model.model.{layer}.lora_A.default.weight").copy_(pair.A)
            peft.get_parameter(f"base_model.model.{layer}.lora_B.default.weight").copy_(pair.B)
        for path, value in adapted.extras.items():
            module, _, slot = path.rpartition(".")
            peft.get_parameter(f"base_model.model.{module}.modules_to_save.default.{slot}").copy_(value)
    assert distance(logits(model), logits(peft)) < (1e-6 if dtype == torch.float32 else 0.05)
    assert distance(logits(model), before) > 0.3


@pytest.mark.parametrize("recomputed", [False, True])
def test_a_layer_used_twice_has_one_gradient(recomputed: bool) -> None:
    """The sum over its uses; also where activations are computed again in the backward pass."""
    linear = torch.nn.Linear(5, 4)

    class Twice(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.shared = linear

        def forward(self, x: Tensor) -> Tensor:
            def once(x: Tensor) -> Tensor:
                return torch.tanh(self.shared(x))

            for number in range(2):
                x = checkpoint(once, x, use_reentrant=False) if recomputed else once(x)
                x = torch.cat([x, x[:, :1]], 1) if number == 0 else x
            return x

    model, x = Twice(), torch.randn(3, 5)
    loss = model(x).square().sum()
    (expected,) = torch.autograd.grad(loss, linear.weight)
    adapted = AdaptedModel(model, {"shared": linear}, {})
    slots = {"shared/A": torch.zeros(1, 5), "shared/B": torch.zeros(4, 1)}
    adapted.install({"shared": LoRA(1.0)}, slots, frozenset(slots))
    found: list[LowRank] = []
    with adapted.capture_gradients(lambda name, gradient: found.append(gradient)):
        model(x).square().sum().backward()
    assert torch.allclose(torch.stack([gradient.to_dense() for gradient in found]).sum(0), expected, atol=1e-6)
    assert len(found) == 1


def test_what_is_installed_is_a_copy_and_extras_fall_back_to_what_was_loaded(tiny_folder: Path) -> None:
    model = tiny.fresh_classifier(tiny_folder / "bert")
    adapted = adapt_layers(model, "bert")
    pairs = random_pairs(adapted)
    before = {name: pair.A.clone() for name, pair in pairs.items()}
    live = install_pairs(adapted, pairs, 1.0)
    with torch.no_grad():
        for value in live.values():
            assert value.requires_grad
            value.fill_(7.0)
    assert all(torch.equal(pair.A, before[name]) for name, pair in pairs.items())
    name, loaded = join_extra_name("classifier.bias"), adapted.get_extra("classifier.bias")
    live = adapted.install({}, {name: torch.ones(4)}, frozenset([name]))
    assert live[name] is model.get_parameter("classifier.bias")
    assert torch.equal(live[name].detach(), torch.ones(4))
    adapted.install({}, {}, frozenset())
    assert torch.equal(model.get_parameter("classifier.bias"), loaded)
    assert not any(parameter.requires_grad for parameter in model.parameters())
