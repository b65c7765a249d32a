"""Exported models, also of images, convolutions and from scratch: what others load, as reported; and their cards."""

import json
import re
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from huggingface_hub import ModelCard
from peft import AutoPeftModelForSequenceClassification, LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file
from torch import Tensor

import fedspan
from fedspan.assembly.run import Prepared, prepare
from fedspan.assembly.task import collect_task_settings, parse_task_settings, read_notes
from fedspan.config import RunConfig, parse_config
from fedspan.core.base import materialize
from fedspan.core.parametrization import compute_dense_change
from fedspan.core.tensors import select_slots
from fedspan.errors import FedspanError
from fedspan.federation.progress import Progress
from fedspan.run_folder import CARD, RunFolder
from fedspan.runs.model_card import _write_command
from fedspan.runs.trained_models import write_adapters
from fedspan.serving.load import _load_adapter
from fedspan.tasks.settings import TaskSettings
from helpers import tiny, tiny_convolutions, tiny_decoders, tiny_images
from helpers.exported_models import close, load_as_its_card_says, predict_with, predict_with_engine, run_rounds
from helpers.families import others_slow
from helpers.refusals import refused


@pytest.fixture(scope="module")
def adapter(tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("trained") / "run"
    fedspan.run(tiny.settings(tiny_folder, federation={"rounds": 1}), folder)
    return folder / "adapter"


def test_an_adapter_s_folder_holds_its_tokenizer(adapter: Path) -> None:
    texts = ["word1 admin1", "word7"]
    tokenizer: Any = transformers.AutoTokenizer.from_pretrained(adapter)
    labels = json.loads((adapter / "fedspan.json").read_text())["labels"]
    model: Any = AutoPeftModelForSequenceClassification.from_pretrained(adapter, num_labels=len(labels))
    with torch.no_grad():
        probabilities = model.eval()(**tokenizer(texts, padding=True, return_tensors="pt")).logits.softmax(1)
    for (label, probability), row in zip(fedspan.predict(adapter, texts), probabilities, strict=True):
        assert label == labels[int(row.argmax())]
        assert probability == pytest.approx(float(row.max()), abs=1e-6)


def test_an_adapter_s_folder_holds_its_image_processor(image_runs: Path) -> None:
    processor: Any = transformers.AutoImageProcessor.from_pretrained(image_runs / "vit" / "adapter", backend="pil")
    assert type(processor).__name__ == "ViTImageProcessorPil"


@pytest.mark.parametrize("name", ["vit", "resnet", "scratch"])
def test_evaluate_gives_the_report_s_scores(name: str, images: Path, image_runs: Path) -> None:
    report = json.loads((image_runs / name / "report.json").read_text())
    found = fedspan.evaluate(image_runs / name)
    wanted = report["scores"]["test"]
    assert found == pytest.approx({**{key: wanted[key] for key in found if key in wanted}, "examples": 10}, abs=1e-4)
    assert {"accuracy", "loss"} <= set(found)
    everywhere = fedspan.evaluate(image_runs / name, data=images / "pictures")
    assert everywhere["examples"] == sum(tiny_images.SITES.values())


@pytest.mark.parametrize("name", ["vit", "resnet", "scratch"])
def test_predictions_on_files(name: str, images: Path, image_runs: Path) -> None:
    """The same as somebody without fedspan gets; paths as text or as paths."""
    folder = image_runs / name / "adapter"
    paths = sorted((images / "pictures").rglob("0[0-4].png"))
    if name == "scratch":
        model = transformers.AutoModelForImageClassification.from_pretrained(folder).eval()
        pixels = tiny_images.pixels(folder, paths)
    else:
        base = tiny_images.fresh_classifier(images / name)
        model = PeftModel.from_pretrained(base, str(folder)).eval()
        pixels = tiny_images.pixels(images / name, paths)
    with torch.no_grad():
        shares = model(pixel_values=pixels).logits.softmax(1)
    found = fedspan.predict(image_runs / name, [str(paths[0]), *paths[1:]])
    assert [label for label, _ in found] == [tiny_images.COLORS[index] for index in shares.argmax(1).tolist()]
    assert [share for _, share in found] == pytest.approx(shares.amax(1).tolist(), abs=1e-4)


@pytest.mark.parametrize("name", ["vit", "resnet", "scratch"])
def test_merged_exports(name: str, images: Path, image_runs: Path, tmp_path: Path) -> None:
    out = fedspan.export(image_runs / name, tmp_path / "merged", form="merged")
    model = load_as_its_card_says(out)
    paths = sorted((images / "pictures" / "west").rglob("*.png"))
    with torch.no_grad():
        shares = model(pixel_values=tiny_images.pixels(out, paths)).logits.softmax(1).amax(1)
    for folder in (image_runs / name, out):
        found = fedspan.predict(folder, paths)
        assert [share for _, share in found] == pytest.approx(shares.tolist(), abs=1e-4)
    again = fedspan.export(out, tmp_path / "again", form="merged")
    assert fedspan.predict(again, paths) == fedspan.predict(out, paths)
    if name == "scratch":
        with pytest.raises(Exception, match="holds a merged model"):
            fedspan.export(image_runs / name, tmp_path / "adapter")


def test_a_model_that_reads_its_convolutions_attributes(tmp_path: Path) -> None:
    """MobileNet's padding reads the stride of a convolution, which PEFT's wrapper does not have."""
    torch.manual_seed(0)
    sizes = {"image_size": 32, "depth_multiplier": 0.25, "depth_divisible_by": 4, "min_depth": 4, "num_labels": 3}
    config = transformers.MobileNetV2Config(**sizes, initializer_range=0.5)
    model = transformers.MobileNetV2ForImageClassification(config).eval()
    model.save_pretrained(tmp_path / "base")
    adapted = get_peft_model(
        model, LoraConfig(r=2, target_modules=r".*\.conv_1x1\.convolution", init_lora_weights=False)
    )
    adapted.save_pretrained(str(tmp_path / "adapter"))
    base = transformers.MobileNetV2ForImageClassification.from_pretrained(tmp_path / "base").eval()
    pixels = torch.randn(2, 3, 32, 32)
    with torch.no_grad():
        expected = adapted.merge_and_unload()(pixel_values=pixels).logits
        assert not torch.allclose(base(pixel_values=pixels).logits, expected, rtol=0.01)
        found = _load_adapter(base, tmp_path / "adapter")(pixel_values=pixels).logits
    assert torch.allclose(found, expected, rtol=1e-4)


def settings(**changes: Any) -> TaskSettings:
    config = parse_config({"data": {"train": "train.csv"}, **changes})
    return collect_task_settings(config, ("a", "b"), 64, None)


def written(folder: Path, **changes: Any) -> dict[str, Any]:
    notes = {**asdict(settings()), "base_model": "base", "client": None, "kept": ["classifier"], **changes}
    (folder / "fedspan.json").write_text(json.dumps(notes))
    return notes


def test_settings_are_those_of_the_config_and_of_the_model() -> None:
    found = settings(evaluation={"max_new_tokens": 9}, model={"quantization": "int8"})
    assert (found.task, found.labels, found.max_length) == ("sequence-classification", ("a", "b"), 64)
    assert (found.metric, found.max_new_tokens, found.quantization) == ("accuracy", 9, "int8")
    assert settings(evaluation={"metric": "macro_f1"}).metric == "macro_f1"
    assert settings(task="causal-lm").labels == ()  # whatever column of labels its data have


def test_notes_come_back_as_they_were_written(tmp_path: Path) -> None:
    notes = written(tmp_path)
    assert read_notes(tmp_path) == json.loads(json.dumps(notes))
    assert parse_task_settings(tmp_path, read_notes(tmp_path)) == settings()


@pytest.mark.parametrize(
    ("name", "value"),
    [("base_model", ""), ("base_model", 3), ("revision", 3), ("client", 3), ("kept", "classifier"), ("kept", [1])],
)
def test_entries_of_another_kind_are_named(name: str, value: object, tmp_path: Path) -> None:
    written(tmp_path, **{name: value})
    with refused(f"{tmp_path / 'fedspan.json'}.{name}"):
        read_notes(tmp_path)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("labels", ["a"]),
        ("labels", ["a", "a"]),
        ("max_length", 0),
        ("max_new_tokens", 0),
        ("metric", "pearson"),
        ("answer_pattern", "("),
        ("columns", {"label_separator": ""}),
        ("image_size", 0),
    ],
)
def test_settings_that_no_run_has_are_named(name: str, value: object, tmp_path: Path) -> None:
    written(tmp_path, **{name: value})
    with pytest.raises(FedspanError) as caught:
        parse_task_settings(tmp_path, read_notes(tmp_path))
    assert caught.value.field.startswith(f"{tmp_path / 'fedspan.json'}")
    assert caught.value.field.endswith(name)


@pytest.fixture(scope="module")
def run(tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("cards") / "run"
    fedspan.run(tiny.config(tiny_folder, federation={"rounds": 2}), folder)
    return folder


def test_the_hub_reads_it_and_it_says_what_the_report_says(run: Path) -> None:
    card = ModelCard.load(run / "adapter" / CARD)
    report = json.loads((run / "report.json").read_text())
    assert card.data.base_model == "bert"
    assert card.data.library_name == "peft"
    assert card.data.pipeline_tag == "text-classification"
    assert {"federated-learning", "fedspan", "lora", "fedit"} <= set(card.data.tags or [])
    found = {one.metric_type: one.metric_value for one in card.data.eval_results or []}
    assert found["accuracy"] == pytest.approx(report["scores"]["test"]["accuracy"], abs=1e-6)
    assert f"- Rounds: 2; this is round {report['best_round']}" in card.text
    assert f"{report['bytes']['down']:,} down" in card.text
    assert "- Clients: 4, 3 a round; partition: natural" in card.text


def test_neither_clients_nor_paths_nor_labels_are_in_it(run: Path, tiny_folder: Path) -> None:
    text = (run / "adapter" / CARD).read_text()
    for word in ("east", "north", "south", "west", str(tiny_folder), str(run), *tiny.LABELS):
        assert not re.search(rf"\b{re.escape(word)}\b", text), word


def test_a_command_says_neither_where_things_are_nor_what_the_data_are() -> None:
    words = ["/usr/bin/fedspan", "run", "ward7/my.yaml", "--set", "data.train=patients/ward7.csv", "--set", "seed=3"]
    assert (
        _write_command(words, "") == "## Command\n\n```\nfedspan run my.yaml --set data.train=... --set seed=3\n```\n"
    )
    module = ["/usr/lib/python3/site-packages/fedspan/__main__.py", "demo"]
    assert _write_command(module, "") == "## Command\n\n```\nfedspan demo\n```\n"


@pytest.mark.parametrize("words", [["-c"], ["train.py", "--secret", "ward7"], ["/usr/bin/pytest", "tests"], [""]])
def test_a_run_from_python_has_a_python_call(words: list[str]) -> None:
    call = 'fedspan.run("config.yaml", "run")'
    section = _write_command(words, call)
    assert f"import fedspan\n\n{call}\n" in section
    assert "ward7" not in section
    assert "## Command" not in section


def test_personal_adapters_have_one_each_and_an_export_takes_it_along(tiny_folder: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    fedspan.run(tiny.config(tiny_folder, method={"name": "fedsa-lora"}, federation={"rounds": 1}), folder)
    cards = sorted((folder / "adapter").glob(f"*/{CARD}"))
    assert len(cards) == 4
    assert len({card.read_text() for card in cards}) == 1
    out = fedspan.export(folder, tmp_path / "own", client="north")
    assert (out / CARD).is_file()
    assert (fedspan.export(out, tmp_path / "again") / CARD).read_text() == (out / CARD).read_text()


def test_a_merged_model_s_card_is_that_of_a_model(run: Path, tmp_path: Path) -> None:
    before, card = (ModelCard.load(folder / CARD) for folder in (run / "adapter", merged(run, tmp_path)))
    assert (card.data.library_name, card.data.base_model) == ("transformers", "bert")
    assert "lora" not in (card.data.tags or [])
    assert [one.metric_value for one in card.data.eval_results or []] == [
        one.metric_value for one in before.data.eval_results or []
    ]
    assert "PEFT" not in card.text
    assert "PeftModel" not in card.text
    assert 'AutoModelForSequenceClassification.from_pretrained("FOLDER")' in card.text
    for section in ("## Training", "## Scores", "## Python"):  # the rest is as it was
        assert text_of(card, section) == text_of(before, section)


def test_a_cut_adapter_s_card_says_so_and_claims_no_score(run: Path, tmp_path: Path) -> None:
    card = ModelCard.load(fedspan.export(run, tmp_path / "cut", rank=1) / CARD)
    assert card.data.eval_results is None
    assert "cut to rank 1 afterwards" in text_of(card, "## Scores")
    assert "- Method: fedit, cut to rank 1\n" in card.text
    assert card.data.library_name == "peft"


def merged(run: Path, folder: Path) -> Path:
    return fedspan.export(run, folder / "merged", form="merged")


def text_of(card: ModelCard, section: str) -> str:
    return card.text.partition(section)[2].partition("\n## ")[0].strip()


@pytest.mark.parametrize(
    "method", others_slow(["fedit", "ffa-lora", "fedloru", "flora", "fedavg"], ["fedit", "fedavg"])
)
@pytest.mark.parametrize("kind", ["vit", "resnet"])
def test_an_adapter_reloads_in_peft(kind: str, method: str, images: Path, tmp_path: Path) -> None:
    """Linear layers and a patch projection; convolutions with trained norms and their statistics."""
    made, progress = run_rounds(tiny_images.config(images, kind, method={"name": method}))
    folder = write_adapters(made, progress, RunFolder(tmp_path))["global"]
    expected = predict_with_engine(made, progress)
    base = tiny_images.fresh_classifier(images / kind)
    assert not close(predict_with(made, base), expected)
    model = PeftModel.from_pretrained(base, str(folder))
    assert close(predict_with(made, model), expected)
    merged: Any = model.merge_and_unload()
    assert close(predict_with(made, merged), expected)


def test_every_client_s_own_model_reloads(images: Path, tmp_path: Path) -> None:
    """Norms kept on the client, so statistics differ from client to client."""
    config = tiny_images.config(images, "resnet", method={"name": "fedsa-lora"})
    config = config.model_copy(update={"model": config.model.model_copy(update={"extras": "local"})})
    made, progress = run_rounds(config)
    folders = write_adapters(made, progress, RunFolder(tmp_path))
    assert set(folders) == set(tiny_images.SITES)
    logits = {}
    for id, folder in folders.items():
        model = PeftModel.from_pretrained(tiny_images.fresh_classifier(images / "resnet"), str(folder))
        logits[id] = predict_with(made, model)
        assert close(logits[id], predict_with_engine(made, progress, id))
    assert not close(logits["east"], logits["west"])


@pytest.mark.parametrize("method", others_slow(["fedit", "fedloru", "fedavg"], ["fedit", "fedavg"]))
def test_a_model_from_scratch_is_exported_whole(method: str, images: Path, tmp_path: Path) -> None:
    made, progress = run_rounds(tiny_images.config(images, "builtin:resnet-8", method={"name": method}))
    folder = write_adapters(made, progress, RunFolder(tmp_path))["global"]
    assert not (folder / "adapter_config.json").exists()
    model = transformers.AutoModelForImageClassification.from_pretrained(folder)
    assert model.config.id2label == dict(enumerate(tiny_images.COLORS))
    assert close(predict_with(made, model), predict_with_engine(made, progress))
    paths = sorted((images / "pictures" / "east" / "red").iterdir())
    mine = made.task.processor([tiny_images.Image.open(path) for path in paths], return_tensors="pt")["pixel_values"]
    assert torch.equal(tiny_images.pixels(folder, paths), mine)
    assert mine.shape[-2:] == (9, 9)


@pytest.mark.parametrize("kind", ["vit", pytest.param("resnet", marks=pytest.mark.slow)])
def test_only_the_architecture_is_taken(kind: str, images: Path, tmp_path: Path) -> None:
    """Nothing of the checkpoint is left, all that is no target trains, and the seed decides the weights."""
    model = {"pretrained": False, "modules_to_save": [], "target_modules": tiny_images.TARGETS[kind][:1]}
    config = tiny_images.config(images, kind, model=model, method={"name": "fedavg"})
    made = prepare(config)
    adapted = made.engine.adapted
    before = {name: value.clone() for name, value in adapted.model.named_parameters()}
    kept = {name: v for name, v in load_file(images / kind / "model.safetensors").items() if v.double().std() > 0}
    assert not [name for name, value in before.items() if name in kept and torch.equal(value, kept[name])]
    targets = {f"{name}.weight" for name in adapted.layers}
    assert set(adapted.spec.extras) - adapted.spec.buffers == set(before) - targets
    again = prepare(config).engine.adapted.model
    assert all(torch.equal(value, before[name]) for name, value in again.named_parameters())
    other = prepare(config.model_copy(update={"seed": 4})).engine.adapted.model
    assert not torch.equal(other.get_parameter(min(targets)), before[min(targets)])
    progress = made.federation.run_round(made.federation.begin()).progress
    folder = write_adapters(made, progress, RunFolder(tmp_path))["global"]
    back = transformers.AutoModelForImageClassification.from_pretrained(folder)
    assert close(predict_with(made, back), predict_with_engine(made, progress))
    moved = [name for name, value in back.named_parameters() if not torch.equal(value, before[name])]
    # The keys' bias shifts all scores of a query alike, so that it has no gradient, but for rounding.
    assert {name for name in before if "k_proj.bias" not in name} <= set(moved)


@pytest.mark.parametrize("method", ["fedit", pytest.param("fedavg", marks=pytest.mark.slow)])
def test_a_text_model_from_scratch(method: str, tiny_folder: Path, tmp_path: Path) -> None:
    changes: dict[str, Any] = {"model": {"pretrained": False}, "method": {"name": method}}
    made, progress = run_rounds(tiny.config(tiny_folder, "bert", **changes))
    folder = write_adapters(made, progress, RunFolder(tmp_path))["global"]
    model = transformers.AutoModelForSequenceClassification.from_pretrained(folder)
    assert close(predict_with(made, model), predict_with_engine(made, progress))
    assert model.config.hidden_dropout_prob == 0.1  # of the architecture; fedspan trains without
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    assert tokenizer("lab1 word2")["input_ids"] == made.task.tokenizer("lab1 word2")["input_ids"]


def test_a_language_model_from_scratch_keeps_its_weights_tied(decoders: Path, tmp_path: Path) -> None:
    """Gemma's head is its embedding: one tensor, averaged once."""
    made, progress = run_rounds(parse_config(tiny_decoders.settings(decoders, "gemma", model={"pretrained": False})), 1)
    assert not [path for path in made.engine.adapted.spec.extras if path.startswith("lm_head")]
    folder = write_adapters(made, progress, RunFolder(tmp_path))["global"]
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(folder)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert close(predict_with(made, model), predict_with_engine(made, progress))


@pytest.mark.parametrize("method", others_slow(["fedit", "flora", "fedavg"], ["fedit", "flora"]))
def test_an_embedding_of_a_language_model(method: str, decoders: Path, tmp_path: Path) -> None:
    model = {"target_modules": ["embed_tokens", "q_proj"]}
    values = tiny_decoders.settings(decoders, "llama", model=model, method={"name": method, "r": 2})
    made, progress = run_rounds(parse_config(values))
    folder = write_adapters(made, progress, RunFolder(tmp_path))["global"]
    expected = predict_with_engine(made, progress)
    base = transformers.AutoModelForCausalLM.from_pretrained(decoders / "llama-lm")
    assert not close(predict_with(made, base), expected)
    assert close(predict_with(made, PeftModel.from_pretrained(base, str(folder))), expected)


def test_embeddings_of_an_encoder(tiny_folder: Path, tmp_path: Path) -> None:
    """Words, positions and types; BERT's words have a padding index."""
    targets = ["word_embeddings", "position_embeddings", "token_type_embeddings", "query"]
    changes: dict[str, Any] = {"model": {"target_modules": targets}, "method": {"name": "fedit", "r": 2}}
    made, progress = run_rounds(tiny.config(tiny_folder, "bert", **changes))
    folder = write_adapters(made, progress, RunFolder(tmp_path))["global"]
    model = PeftModel.from_pretrained(tiny.fresh_classifier(tiny_folder / "bert"), str(folder))
    assert close(predict_with(made, model), predict_with_engine(made, progress))


@pytest.mark.parametrize("method", ["fedit", pytest.param("fedavg", marks=pytest.mark.slow)])
@pytest.mark.parametrize("what", ["convolutions", "embeddings"])
def test_starting_from_an_adapter(what: str, method: str, images: Path, decoders: Path, tmp_path: Path) -> None:
    """PEFT's own factors of convolutions, norms with statistics, and of an embedding, whose weight PEFT saves too."""
    values: dict[str, Any]
    changes: dict[str, Any] = {"method": {"name": method, "r": 2}}
    start = {"adapter": str(tmp_path / "start")}
    options: dict[str, Any] = {"r": 3, "lora_alpha": 5, "init_lora_weights": False}
    if what == "convolutions":
        base = tiny_images.fresh_classifier(images / "resnet")
        options |= {"target_modules": ["convolution"], "modules_to_save": ["normalization", "classifier"]}
        values = tiny_images.settings(images, "resnet", **changes)
    else:
        base = transformers.AutoModelForCausalLM.from_pretrained(decoders / "llama-lm")
        options |= {"target_modules": ["embed_tokens", "q_proj"], "task_type": "CAUSAL_LM"}
        values = tiny_decoders.settings(decoders, "llama", **changes)
        values["model"]["target_modules"] = ["embed_tokens", "q_proj"]
    values["model"] |= start
    with torch.random.fork_rng():
        torch.manual_seed(8)
        model = get_peft_model(base, LoraConfig(**options)).eval()
        for name, value in model.named_buffers():
            if "modules_to_save" in name and "running" in name:
                value += torch.rand_like(value)
    model.save_pretrained(str(tmp_path / "start"))
    made, progress = run_rounds(parse_config(values), 0)
    first = predict_with_engine(made, progress)
    assert close(first, predict_with(made, model))
    progress = made.federation.run_round(progress).progress
    folder = write_adapters(made, progress, RunFolder(tmp_path))["global"]
    fresh = (
        tiny_images.fresh_classifier(images / "resnet")
        if what == "convolutions"
        else transformers.AutoModelForCausalLM.from_pretrained(decoders / "llama-lm")
    )
    expected = predict_with_engine(made, progress)
    assert close(predict_with(made, PeftModel.from_pretrained(fresh, str(folder))), expected)
    assert not close(first, expected)


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_convolutions.save_pictures(tmp_path_factory.mktemp("scratch"))


def scratch_config(pictures: Path, method: dict[str, Any], **changes: Any) -> RunConfig:
    return parse_config(
        {
            "task": "image-classification",
            "seed": 3,
            "device": "cpu",
            "model": {
                "name": "builtin:resnet-8",
                "pretrained": False,
                "image_size": 9,
                "target_modules": ["conv1", "conv2", "downsample.0"],
            },
            "data": {"train": str(pictures), "test_fraction": 0.2},
            "partition": {"partitioner": "natural", "column": "domain"},
            "method": method,
            "federation": {"rounds": 3, "clients_per_round": 3, **changes},
            "training": {"lr": 0.02, "local_steps": 2, "batch_size": 5},
        }
    )


def weights(made: Prepared, progress: Progress, client: str | None = None) -> dict[str, Tensor]:
    """The target layers' effective weights, (O, I), in float64."""
    job, adapted = made.evaluator.build_job(progress, client), made.engine.adapted
    found: dict[str, Tensor] = {}
    for layer in adapted.spec.layers:
        base = materialize(adapted.get_weight(layer.name), progress.state.base, layer.name).double()
        slots = {slot: value.double() for slot, value in select_slots(job.tensors, layer.name).items()}
        found[layer.name] = base + compute_dense_change(job.parametrization[layer.name].compute_effective(slots), base)
    return found


def is_close(one: Tensor, other: Tensor, tolerance: float = 1e-5) -> bool:
    return float((one - other).norm()) <= tolerance * float(other.norm())


def require_export(made: Prepared, progress: Progress, place: Path) -> None:
    """Whoever has the folder, and nothing else, computes the same."""
    folder = write_adapters(made, progress, RunFolder(place))["global"]
    model = transformers.AutoModelForImageClassification.from_pretrained(folder)
    assert close(predict_with(made, model), predict_with_engine(made, progress))


def test_fedloru_builds_convolutions_of_nothing_but_its_factors(pictures: Path, tmp_path: Path) -> None:
    """The weight is the sum of s B A over accumulations: of what was drawn for the layer nothing is left."""
    made = prepare(scratch_config(pictures, {"name": "fedloru", "r": 4, "tau": 2, "from_scratch": True}))
    scaling, progress = 4.0, made.federation.begin()
    spec = made.engine.adapted.spec
    assert {layer.kernel for layer in spec.layers} == {(3, 3), (1, 1)}
    sums = {layer.name: torch.zeros(layer.shape, dtype=torch.float64) for layer in spec.layers}
    for round in range(3):
        tensors = made.evaluator.build_job(progress, None).tensors
        for name, weight in weights(made, progress).items():
            B, A = (select_slots(tensors, name)[slot].double() for slot in "BA")
            assert is_close(weight, sums[name] + scaling * B @ A)
            assert weight.norm() > 0.1
        result = made.federation.run_round(progress)
        if round == 1:  # what every factor was before it began again
            for name, weight in weights(made, result.progress).items():
                assert torch.linalg.matrix_rank(weight, rtol=1e-5) <= 4  # to rounding of float32
                sums[name] = weight
                assert not select_slots(made.evaluator.build_job(result.progress, None).tensors, name)["B"].any()
        for name, weight in weights(made, result.progress).items():
            assert not is_close(weight, weights(made, progress)[name], 1e-3)
        progress = result.progress
    assert progress.state.base.rho == 0.0
    require_export(made, progress, tmp_path)


def test_fedhm_takes_ranks_above_a_convolution_s_outputs(pictures: Path, tmp_path: Path) -> None:
    """The first convolution is 16 x 27 as PEFT unfolds it, and a 48 x 9 matrix to FedHM; the last one 192 x 192."""
    ranks = {"east": 2, "north": 20, "south": 100, "west": 192}
    made = prepare(scratch_config(pictures, {"name": "fedhm"}, ranks=ranks, clients_per_round=4))
    progress = made.federation.begin()
    for _ in range(2):
        whole = weights(made, progress)
        for id, rank in ranks.items():
            job = made.evaluator.build_job(progress, id)
            for layer in made.engine.adapted.spec.layers:
                assert select_slots(job.tensors, layer.name)["U"].shape[1] == min(rank, *layer.rectangle)
        for name, weight in weights(made, progress, "west").items():
            assert is_close(weight, whole[name])  # of full rank in every layer: nothing is cut
        smaller = weights(made, progress, "south")
        assert not is_close(smaller["layer3.0.conv2"], whole["layer3.0.conv2"], 0.01)
        assert is_close(smaller["conv1"], whole["conv1"])
        result = made.federation.run_round(progress)
        sizes = {one.client: one.payload for one in result.transfers if one.direction == "up"}
        assert sizes["east"] < sizes["north"] < sizes["south"] < sizes["west"]
        progress = result.progress
    require_export(made, progress, tmp_path)
