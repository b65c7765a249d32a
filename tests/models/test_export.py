"""Adapters of PEFT at the beginning and in the end of a run, and as inference servers take them."""

import importlib
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import AutoPeftModelForCausalLM, LoraConfig, PeftConfig, PeftModel, get_peft_model
from safetensors.torch import load_file
from torch import Tensor

import fedspan
from fedspan.assembly.run import Prepared, prepare
from fedspan.core.base import BaseUpdate, Increment
from fedspan.core.lowrank import LowRank
from fedspan.core.tensors import count
from fedspan.errors import FedspanError
from fedspan.models.export import compute_layer_updates, read_adapter
from fedspan.run_folder import RunFolder
from fedspan.runs.trained_models import write_adapters
from helpers import tiny, tiny_decoders
from helpers.exported_models import predict_with_engine
from helpers.families import others_slow

OPTIONS: dict[str, tuple[str, dict[str, Any]]] = {
    "bert": ("bert", {"r": 3, "lora_alpha": 5}),
    "rslora": ("bert", {"r": 4, "lora_alpha": 5, "use_rslora": True}),
    "patterns": ("bert", {"r": 3, "rank_pattern": {"query": 5}, "alpha_pattern": {"0.output.dense": 7, "query": 2}}),
    "gpt2": ("gpt2", {"r": 3, "lora_alpha": 5}),
    "fewer-layers": ("deep-bert", {"r": 2, "target_modules": ["value"], "layers_to_transform": [1]}),
}


def save_adapter(folder: Path, tiny_folder: Path, kind: str = "bert", **options: Any) -> PeftModel:
    """A PEFT model with random A, B and head, saved as PEFT saves it."""
    targets = {"bert": tiny.BERT, "deep-bert": tiny.BERT, "gpt2": tiny.GPT2}[kind]
    config = LoraConfig(task_type="SEQ_CLS", init_lora_weights=False, **{"target_modules": targets, **options})
    with torch.random.fork_rng():
        torch.manual_seed(8)
        model = get_peft_model(tiny.fresh_classifier(tiny_folder / kind), config).eval()
        for name, parameter in model.named_parameters():
            if "modules_to_save" in name:
                parameter.data += torch.randn_like(parameter)
    model.save_pretrained(str(folder))
    return model


def logits(prepared: Prepared, model: torch.nn.Module) -> Tensor:
    batch = prepared.task.collate(prepared.test, range(len(prepared.test)), torch.device("cpu"))
    with torch.no_grad():
        return prepared.task.predict(model, batch)


@pytest.mark.filterwarnings("ignore:fan_in_fan_out is set to False")
@pytest.mark.parametrize("method", others_slow(["fedit", "flora", "fedavg"], ["flora"]))
@pytest.mark.parametrize("case", OPTIONS)
def test_round_0_is_the_adapter_and_the_export_includes_it(
    case: str, method: str, tiny_folder: Path, prepared: Prepared, tmp_path: Path
) -> None:
    kind, options = OPTIONS[case]
    theirs = save_adapter(tmp_path / "start", tiny_folder, kind, **options)
    model = {"adapter": str(tmp_path / "start")}
    made = prepare(tiny.config(tiny_folder, kind, model=model, method={"name": method}), prepared.partition)
    progress = made.federation.begin()
    first = predict_with_engine(made, progress)
    assert torch.allclose(first, logits(made, theirs), rtol=0, atol=1e-5)
    progress = made.federation.run_round(progress).progress
    folder = write_adapters(made, progress, RunFolder(tmp_path))["global"]
    back = PeftModel.from_pretrained(tiny.fresh_classifier(tiny_folder / kind), str(folder)).eval()
    expected = predict_with_engine(made, progress)
    assert torch.allclose(logits(made, back), expected, rtol=0, atol=1e-4)
    assert float((expected - first).abs().max()) > 0.01


def refused(path: Path, value: object, words: str, tiny_folder: Path, prepared: Prepared) -> None:
    with pytest.raises(FedspanError) as caught:
        prepare(tiny.config(tiny_folder, model={"adapter": str(path)}), prepared.partition)
    assert (caught.value.field, caught.value.value) == ("model.adapter", value)
    assert words in str(caught.value)


@pytest.mark.parametrize("options", [{"use_dora": True}, {"lora_bias": True}])
def test_what_is_more_than_lora_is_refused(
    options: dict[str, bool], tiny_folder: Path, prepared: Prepared, tmp_path: Path
) -> None:
    """Its update is not B A alone: magnitudes and biases would be lost without a word."""
    save_adapter(tmp_path, tiny_folder, **options)
    refused(tmp_path, str(tmp_path), "a plain LoRA adapter", tiny_folder, prepared)


def test_the_scaling_is_folded_into_what_is_read(tiny_folder: Path, prepared: Prepared, tmp_path: Path) -> None:
    save_adapter(tmp_path, tiny_folder, r=4, lora_alpha=6)
    read = read_adapter(str(tmp_path), prepared.engine.adapted.operators)
    tensors = load_file(tmp_path / "adapter_model.safetensors")
    assert read.factors.keys() == prepared.engine.adapted.operators.keys()
    for name, pair in read.factors.items():
        A, B = (tensors[f"base_model.model.{name}.lora_{slot}.weight"] for slot in "AB")
        assert torch.allclose(pair.to_dense(), 1.5 * B @ A, atol=1e-6)
    assert read.extras.keys() == {"classifier.weight", "classifier.bias"}


def test_the_rank_of_an_export_is_the_sum_of_its_parts_at_most_the_layer_s(prepared: Prepared) -> None:
    """Base update (rank 3) and factors (rank 2); once a part is dense, the whole layer times an identity."""
    federation, adapted = prepared.federation, prepared.engine.adapted
    begun = federation.begin().state
    job = federation.method.start(federation.method.sync(begun, None), None, {}, begun.round)
    trained = {name: torch.ones_like(value) for name, value in job.tensors.items()}
    job = type(job)(job.parametrization, trained, job.trainable)
    rng = torch.Generator().manual_seed(0)
    pairs = {
        layer.name: LowRank(torch.randn(layer.out_features, 3, generator=rng), torch.randn(3, layer.in_features))
        for layer in adapted.spec.layers
    }
    dense = {name: pair.to_dense() for name, pair in pairs.items()}
    for deltas, ranks in ((pairs, {5}), (dense, {16})):
        updates = compute_layer_updates(job, BaseUpdate().add(Increment(1, deltas)), adapted)
        assert {pair.rank for pair in updates.values()} == ranks
        for layer in adapted.spec.layers:
            ones = 2 * 2 * torch.ones(layer.shape)  # scaling 2, rank 2
            assert torch.allclose(updates[layer.name].to_dense(), dense[layer.name] + ones, atol=1e-5)
    assert {pair.rank for pair in compute_layer_updates(job, BaseUpdate(), adapted).values()} == {2}
    with pytest.raises(FedspanError, match="a merged model"):
        compute_layer_updates(job, BaseUpdate().add(Increment(1, {}, decay=0.5)), adapted)


def test_an_export_is_a_plain_lora_of_one_rank(prepared: Prepared, tmp_path: Path) -> None:
    """Alpha equals r, so that a reader with or without the scaling sees the same update; names are PEFT's."""
    folder = write_adapters(prepared, prepared.federation.begin(), RunFolder(tmp_path))["global"]
    config = PeftConfig.from_pretrained(str(folder))
    tensors = load_file(folder / "adapter_model.safetensors")
    A = {value.shape[0] for name, value in tensors.items() if name.endswith("lora_A.weight")}
    assert A == {config.r} == {config.lora_alpha} == {1}  # nothing is trained yet: rank 1, of zeros
    assert config.inference_mode
    assert set(config.target_modules or ()) == set(tiny.BERT)
    assert config.modules_to_save == ["classifier"]
    assert config.base_model_name_or_path == prepared.config.model.name
    layers = prepared.engine.adapted.spec.layers
    assert count(tensors) == sum(sum(layer.shape) for layer in layers) + 4 * 16 + 4


@pytest.fixture(
    scope="module",
    params=others_slow(
        ["fedit", "flora", "fedex-lora", "flexlora", "fedloru", "rolora"], ["flora", "flexlora", "fedloru"]
    ),
)
def adapter(request: pytest.FixtureRequest, decoders: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An adapter of rank 3, or of what the method makes of it, on all linear layers of a tiny Llama."""
    changes: dict[str, Any] = {
        "method": {"name": request.param, "r": 3},
        "federation": {"rounds": 2},
        "model": {"target_modules": "all-linear"},
    }
    if request.param in ("flora", "flexlora"):
        changes["federation"] |= {"ranks": [1, 3]}
    folder = tmp_path_factory.mktemp("served") / "run"
    fedspan.run(tiny_decoders.settings(decoders, "llama", **changes), folder)
    return folder / "adapter"


def test_an_adapter_is_plain_lora_of_one_rank(adapter: Path) -> None:
    """vLLM: one rank for all layers, which may be padded, plain LoRA, and no modules that are saved whole."""
    config = json.loads((adapter / "adapter_config.json").read_text(encoding="utf-8"))
    assert (config["peft_type"], config["bias"], config["use_dora"]) == ("LORA", "none", False)
    assert not config["modules_to_save"]
    assert not config["rank_pattern"]
    assert not config["alpha_pattern"]
    tensors = load_file(adapter / "adapter_model.safetensors")
    assert all(".lora_A.weight" in name or ".lora_B.weight" in name for name in tensors)
    assert {value.shape[0] for name, value in tensors.items() if ".lora_A." in name} == {config["r"]}
    assert {value.shape[1] for name, value in tensors.items() if ".lora_B." in name} == {config["r"]}


def test_vllm_reads_of_an_adapter_what_peft_reads(adapter: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its own reader of configs and tensors, as its server calls them: the same update of every layer as PEFT's."""
    pytest.importorskip("vllm", reason="vLLM is not installed; it pins a torch of its own")
    helper_of = importlib.import_module("vllm.lora.peft_helper").PEFTHelper
    config_of = importlib.import_module("vllm.config.lora").LoRAConfig
    module = importlib.import_module("vllm.lora.lora_model")
    monkeypatch.setattr(module, "PIN_MEMORY", False)  # which takes an accelerator
    helper = helper_of.from_local_dir(str(adapter), max_position_embeddings=128)
    helper.validate_legal(config_of(max_lora_rank=16))
    ours: Any = AutoPeftModelForCausalLM.from_pretrained(adapter)
    updates = {
        name.removeprefix("base_model.model."): layer.get_delta_weight("default")
        for name, layer in ours.named_modules()
        if hasattr(layer, "get_delta_weight")
    }
    expected = {name.rsplit(".", 1)[-1] for name in updates}
    read = module.LoRAModel.from_local_checkpoint(str(adapter), expected, helper, lora_model_id=1, device="cpu")
    assert read.loras.keys() == updates.keys()
    for name, lora in read.loras.items():
        lora.optimize()
        torch.testing.assert_close(lora.lora_b @ lora.lora_a, updates[name])
    assert any(update.abs().max() > 0 for update in updates.values())
