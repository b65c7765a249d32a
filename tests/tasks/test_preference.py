"""Preference tuning: TRL's losses, metrics and tokens, columns of pairs, generated answers, and what is refused."""

import json
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pytest
import torch
import transformers

import fedspan
from fedspan.assembly.run import prepare
from fedspan.assembly.server import build_server_clients, connect, prepare_server
from fedspan.config import parse_config
from fedspan.config.column_inference import infer_data
from fedspan.data.loading import load
from fedspan.data.source import Source
from fedspan.deployment.handshake import build_server_config
from fedspan.deployment.node import NodeService
from fedspan.models import loading
from fedspan.serving.load import load_served
from fedspan.tasks.causal import CausalLM, GenerationOptions
from fedspan.tasks.preference import PreferenceOptions, PreferenceTuning
from fedspan.tasks.preference_columns import split_preference
from fedspan.training.references import fill_reference
from helpers import tiny, tiny_decoders, tiny_preferences
from helpers.listeners import Notes
from helpers.node_service import CLIENT, Direct, introduced, node
from helpers.refusals import refused
from helpers.run_content import content
from helpers.tiny_preferences import BAD, GOOD, ROWS, USER

CPU = torch.device("cpu")


def make(options: PreferenceOptions) -> PreferenceTuning:
    return PreferenceTuning(CausalLM(tiny_decoders.tokenizer(pads=True), 16), options)


def arrange(rows: list[dict[str, str]]) -> datasets.Dataset:
    return datasets.Dataset.from_list(rows).rename_column("prompt", "text")


@pytest.mark.parametrize(
    "options",
    [
        PreferenceOptions(),
        PreferenceOptions("hinge", 0.3),
        PreferenceOptions("ipo", 0.2),
        PreferenceOptions("robust", 0.4, 0.1),
    ],
    ids=lambda options: options.loss,
)
def test_loss_and_metrics_equal_trls_on_the_same_tokens(
    options: PreferenceOptions, decoders: Path, tmp_path: Path
) -> None:
    trl, peft = pytest.importorskip("trl"), pytest.importorskip("peft")
    args = trl.DPOConfig(
        output_dir=str(tmp_path),
        loss_type=options.loss,
        beta=options.beta,
        label_smoothing=options.label_smoothing,
        max_length=16,
        per_device_eval_batch_size=len(ROWS),
        report_to=[],
        bf16=False,
        use_cpu=True,
        disable_tqdm=True,
    )
    trainer = trl.DPOTrainer(
        model=transformers.AutoModelForCausalLM.from_pretrained(decoders / "llama-lm"),
        args=args,
        processing_class=tiny_decoders.tokenizer(pads=True),
        train_dataset=datasets.Dataset.from_list(ROWS),
        eval_dataset=datasets.Dataset.from_list(ROWS),
        peft_config=peft.LoraConfig(r=3, target_modules=["q_proj", "down_proj"], task_type="CAUSAL_LM"),
    )
    rng = torch.Generator().manual_seed(4)
    for name, value in trainer.model.named_parameters():
        if "lora_B" in name:
            value.data = 0.4 * torch.randn(value.shape, generator=rng)
    expected = trainer.evaluate()
    task = make(options)
    examples = task.encode(arrange(ROWS))
    for role in ("chosen", "rejected"):
        encoded = [row["prompt_ids"] + row[f"{role}_ids"] for row in trainer.eval_dataset]
        assert [*examples.answers[role].ids] == encoded
    model = trainer.model.eval()
    with model.disable_adapter():
        fill_reference(task, model, examples, np.arange(len(ROWS)), CPU, 3)
    batch = task.collate(examples, range(len(ROWS)), CPU)
    loss = task.compute_loss(model, batch)
    assert float(loss.detach()) == pytest.approx(expected["eval_loss"], rel=1e-5)
    loss.backward()  # the reference has no gradient
    metrics = task.compute_metrics(task.predict(model, batch).detach(), examples, range(len(ROWS)))
    assert metrics["loss"] == pytest.approx(expected["eval_loss"], rel=1e-5)
    assert metrics["reward_accuracy"] == pytest.approx(expected["eval_rewards/accuracies"])
    assert metrics["reward_margin"] == pytest.approx(expected["eval_rewards/margins"], rel=1e-4)
    assert 0 < metrics["reward_accuracy"] < 1


@pytest.mark.parametrize(
    "row",
    [{"prompt": [USER], "chosen": [GOOD], "rejected": [BAD]}, {"chosen": [USER, GOOD], "rejected": [USER, BAD]}],
    ids=["explicit", "implicit"],
)
def test_conversations_are_encoded_as_by_trl(row: dict[str, Any], decoders: Path, tmp_path: Path) -> None:
    trl = pytest.importorskip("trl")
    file = tmp_path / "own.jsonl"
    turns = [{"role": "user", "content": "d5"}, {"role": "assistant", "content": "a5"}]
    first = "prompt" if "prompt" in row else "chosen"
    longer = {**row, first: [*turns, *row[first]]}
    longer |= {} if first == "prompt" else {"rejected": [*turns, *row["rejected"]]}
    rows = [row, longer, row]
    file.write_text("".join(json.dumps(one) + "\n" for one in rows))
    values = tiny_preferences.settings(decoders, tmp_path)
    config = parse_config({**values, "data": {"train": str(file), "chat": True, "test_fraction": 0}})
    train = load(config.data, task=config.task_columns).train
    assert [*zip(*(train[name] for name in ("text", "chosen", "rejected")), strict=True)] == [("a1", "b1", "c4 c5")] * 3
    tokens = tiny_decoders.tokenizer(pads=True)
    examples = PreferenceTuning(CausalLM(tokens, 32, chat=True)).encode(train)
    trainer = trl.DPOTrainer(
        model=transformers.AutoModelForCausalLM.from_pretrained(decoders / "llama-lm"),
        args=trl.DPOConfig(output_dir=str(tmp_path), report_to=[], bf16=False, use_cpu=True),
        processing_class=tokens,
        train_dataset=datasets.Dataset.from_list(rows),
    )
    for role in ("chosen", "rejected"):
        expected = [one["prompt_ids"] + one[f"{role}_ids"] for one in trainer.train_dataset]
        assert [ids[: len(own)] for ids, own in zip(examples.answers[role].ids, expected, strict=True)] == expected


def test_an_adapter_answers_prompts(decoders: Path, tmp_path: Path) -> None:
    values = tiny_preferences.settings(decoders, tmp_path, federation={"rounds": 1}, evaluation={"max_new_tokens": 5})
    report = fedspan.run(values, tmp_path / "run")
    assert {"loss", "reward_accuracy", "reward_margin"} <= set(report.scores["test"])
    assert {row["label"] for row in report.examples} == {"chosen"}
    prompts = ["Q: a1 A:", "Q: b3 b4 A:"]
    answers = fedspan.predict(tmp_path / "run", prompts)
    served = load_served(tmp_path / "run")
    for prompt, answer in zip(prompts, answers, strict=True):
        inputs = served.processor(prompt, return_tensors="pt")
        ids = served.model.generate(**inputs, max_new_tokens=5, do_sample=False)[0, inputs["input_ids"].shape[1] :]
        assert answer == served.processor.decode(ids, skip_special_tokens=True).strip()
    # A file with the columns of the run, and one with others.
    rows = tiny_preferences.make_rows()[:9]
    renamed = [{"better": row["chosen"], "worse": row["rejected"], "prompt": row["prompt"]} for row in rows]
    roles = {"chosen": "better", "rejected": "worse"}
    measured = [
        fedspan.evaluate(tmp_path / "run", data=data, roles=own) for data, own in ((rows, None), (renamed, roles))
    ]
    assert measured[0] == measured[1]
    assert measured[0]["examples"] == 9


@pytest.mark.parametrize(
    ("section", "change", "field"),
    [
        ("training", {"lora_dropout": 0.1}, "training.lora_dropout"),
        ("model", {"adapter": "somewhere"}, "model.adapter"),
        ("data", {"packing": True}, "data.packing"),
        ("data", {"roles": {"chosen": "better"}}, "data.roles.chosen"),
        ("task_options", {"label_smoothing": 0.1}, "task_options.label_smoothing"),
        ("task_options", {"beta": 0}, "task_options.beta"),
    ],
)
def test_what_cannot_be_is_refused(
    section: str, change: dict[str, Any], field: str, decoders: Path, tmp_path: Path
) -> None:
    values = tiny_preferences.settings(decoders, tmp_path, **{section: change})
    with refused(field):
        prepare(parse_config(values))


def test_both_answers_follow_the_same_prompt_where_it_is_cut() -> None:
    """The difference of rewards compares two answers to one prompt."""
    prompt = " ".join(f"{letter}{number}" for letter in "abcd" for number in range(6))
    rows = [{"prompt": prompt, "chosen": " b1 c2", "rejected": " a5 a1 a2 a3 a4 b1 b2 b3"}, ROWS[1]]
    task = make(PreferenceOptions())
    encoded = task.encode(arrange(rows)).answers
    chosen, rejected = encoded["chosen"], encoded["rejected"]
    assert chosen.starts.tolist() == rejected.starts.tolist()
    start = int(chosen.starts[0])
    assert chosen.ids[0][:start] == rejected.ids[0][:start]
    assert len(rejected.ids[0]) == 16
    assert chosen.lengths.tolist() == [len(ids) for ids in chosen.ids]
    alone = {role: task.language.encode(arrange([{**rows[0], "answer": rows[0][role]}])) for role in encoded}
    assert rejected.ids[0] == alone["rejected"].ids[0]  # the longer answer decides
    assert chosen.ids[0][start:] == alone["chosen"].ids[0][int(alone["chosen"].starts[0]) :]
    assert chosen.truncated_prompts == 1


def test_a_missing_reference_is_no_number() -> None:
    task = make(PreferenceOptions())
    batch = task.collate(task.encode(arrange(ROWS)), [0, 2], CPU)
    assert "reference" not in batch
    with pytest.raises(ValueError, match=r"call Engine\.prepare"):
        task.compute_loss(torch.nn.Identity(), batch)


def test_generation_has_the_runs_options() -> None:
    language = CausalLM(tiny_decoders.tokenizer(pads=True), 16, generation=GenerationOptions(3))
    examples = PreferenceTuning(language).encode(datasets.Dataset.from_dict({"text": ["Q: a1 A:", "b2"]}))
    assert examples.reference.shape == (2, 0)
    assert [*examples.answers] == ["chosen"]


def test_dp_sgd_without_noise_and_clipping_is_sgd(decoders: Path, tmp_path: Path) -> None:
    pytest.importorskip("opacus", reason="needs fedspan[privacy]")
    tiny.require_sgd_without_noise(tiny_preferences.settings(decoders, tmp_path))


def test_answers_that_are_equal_once_they_are_cut_are_counted() -> None:
    long = " ".join(["b1", "c2"] * 12)
    rows = [{"prompt": "Q: a1", "chosen": f"{long} a1", "rejected": f"{long} b5"}, ROWS[1]]
    task = make(PreferenceOptions())
    remarks = task.describe_examples(task.encode(arrange(rows)))
    expected = "1 of 2 pairs have two answers of the same tokens, which teach nothing: model.max_length is 16 tokens"
    assert remarks[-1] == expected
    assert "chosen: 1 of 2 answers lost their end: model.max_length is 16 tokens" in remarks
    assert not task.describe_examples(task.encode(arrange(ROWS)))


def test_a_merged_model_is_compared_with_the_revision_of_its_base(
    decoders: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    values = tiny_preferences.settings(decoders, tmp_path, federation={"rounds": 1}, model={"revision": "v2"})
    fedspan.run(values, tmp_path / "run")
    merged = fedspan.export(tmp_path / "run", tmp_path / "merged", form="merged")
    rows, revisions = tiny_preferences.make_rows()[:11], list[str | None]()
    load_pretrained = loading.load_pretrained

    def record(name: str, *args: Any, revision: str | None = None, **options: Any) -> Any:
        revisions.append(revision)
        return load_pretrained(name, *args, revision=revision, **options)

    expected = fedspan.evaluate(tmp_path / "run", data=rows, generate=False)
    monkeypatch.setattr(loading, "load_pretrained", record)
    assert fedspan.evaluate(merged, data=rows, generate=False) == pytest.approx(expected, rel=1e-4)
    assert revisions == [None, "v2"]  # the merged weights are in a folder, and the reference is the hub's


def test_a_merged_model_is_compared_with_a_base_from_python(decoders: Path, tmp_path: Path) -> None:
    """Also where another model is stored under its name."""
    name = str(decoders / "llama-lm")
    model = transformers.AutoModelForCausalLM.from_pretrained(name)
    with torch.no_grad():
        model.lm_head.weight.mul_(-1.5)
    values = tiny_preferences.settings(decoders, tmp_path, federation={"rounds": 1})
    values["model"].pop("name")
    objects = {"model": model, "tokenizer": transformers.AutoTokenizer.from_pretrained(name)}
    fedspan.run(values, tmp_path / "run", **objects)
    merged = fedspan.export(tmp_path / "run", tmp_path / "merged", form="merged", **objects)
    rows = tiny_preferences.make_rows()[:11]
    expected = fedspan.evaluate(tmp_path / "run", data=rows, generate=False, **objects)
    assert fedspan.evaluate(merged, data=rows, generate=False, **objects) == pytest.approx(expected, rel=1e-4)
    stored = fedspan.evaluate(merged, data=rows, generate=False)
    assert stored["reward_margin"] != pytest.approx(expected["reward_margin"], rel=1e-2)


@pytest.mark.parametrize("engine", [pytest.param("loop", marks=pytest.mark.slow), "batched"])
def test_a_resumed_run_ends_with_the_same_bits(engine: str, decoders: Path, tmp_path: Path) -> None:
    values = tiny_preferences.settings(decoders, tmp_path, engine={"name": engine}, federation={"rounds": 2})
    fedspan.run(values, tmp_path / "whole")
    with pytest.raises(KeyboardInterrupt):
        fedspan.run(values, tmp_path / "stopped", listener=Notes(1))
    fedspan.resume(tmp_path / "stopped")
    whole, stopped = content(tmp_path / "whole"), content(tmp_path / "stopped")
    assert [name for name in whole if whole[name] != stopped.get(name)] == []


def test_a_node_trains_and_continues_after_a_restart(decoders: Path, tmp_path: Path) -> None:
    """A node computes the reference of its own pairs, and again after a restart."""
    values = tiny_preferences.settings(decoders, tmp_path)
    values |= {"data": {}, "partition": {"partitioner": "iid", "clients": 1}, "federation": {"rounds": 2}}
    values["evaluation"] = {"batch_size": 7}
    data = {"train": str(tiny_preferences.save_preferences(tmp_path / "own.jsonl"))}
    config = node(decoders, tmp_path / "node", data=data)
    prepared = prepare_server(build_server_config(values))
    transport = Direct(NodeService(config))
    introduction = introduced(transport.service, values)
    assert introduction.refused is None
    clients = build_server_clients(prepared.config, prepared.engine.adapted.spec, {CLIENT: introduction.examples})
    federation = connect(prepared, transport, clients=clients, run="run").federation
    first = federation.run_round(federation.begin())
    second = federation.run_round(first.progress)
    assert 0 < second.loss < first.loss
    transport.service = NodeService(config)
    assert introduced(transport.service, values).refused is None
    again = federation.run_round(first.progress)
    for name, value in second.progress.state.tensors.items():
        assert torch.equal(again.progress.state.tensors[name], value), name


def test_prompts_that_both_answers_begin_with_are_found_as_trl_finds_them() -> None:
    extract = pytest.importorskip("trl.data_utils").extract_prompt
    pairs = [("What is it? Blue.", "What is it? Green."), ("no", "yes"), ("one two", "one three")]
    for chosen, rejected in pairs:
        found = split_preference(None, chosen, rejected)
        expected = extract({"chosen": chosen, "rejected": rejected})
        assert found == {
            "text": expected["prompt"],
            "history": "[]",
            **{k: expected[k] for k in ("chosen", "rejected")},
        }
    assert split_preference(None, "ab", "abc d") is None  # TRL takes "a" for the prompt


def test_pairs_are_named_and_skipped_by_row(decoders: Path, tmp_path: Path) -> None:
    rows = [
        *ROWS,
        {"prompt": "Q: a1", "chosen": "b1", "rejected": "b1"},
        {"prompt": None, "chosen": "a1", "rejected": "b1"},
    ]
    file = tmp_path / "own.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    values = tiny_preferences.settings(decoders, tmp_path)
    values["data"] = {"train": str(file), "test_fraction": 0}
    config = parse_config(values)
    with refused("data.train"):
        load(config.data, task=config.task_columns)
    config = parse_config({**values, "data": {**values["data"], "invalid": "skip"}})
    loaded = load(config.data, task=config.task_columns)
    assert len(loaded.train) == len(ROWS) + 1  # a prompt may be empty, two equal answers are no pair
    assert any("rows left out" in note for note in loaded.notes)


def test_messages_need_the_chat_template(decoders: Path, tmp_path: Path) -> None:
    file = tmp_path / "own.jsonl"
    file.write_text(json.dumps({"chosen": [USER, GOOD], "rejected": [USER, BAD]}) + "\n")
    values = tiny_preferences.settings(decoders, tmp_path)
    config = parse_config({**values, "data": {"train": str(file), "test_fraction": 0}})
    with refused("data.chat") as caught:
        load(config.data, task=config.task_columns)
    assert caught.value.expected == "true"


@pytest.mark.parametrize(
    ("chosen", "rejected"),
    [([USER, GOOD], [USER, GOOD]), ([USER, GOOD], [BAD]), ([GOOD], [BAD]), ([USER, GOOD], "c1"), ("", "c1"), (None, 3)]
    + [([USER, GOOD], [USER, {"role": "assistant", "content": content}]) for content in (None, [{"text": "a"}], 3)],
)
def test_what_is_no_pair(chosen: Any, rejected: Any) -> None:
    assert split_preference(None, chosen, rejected) is None


def test_a_prompt_s_column_that_does_not_exist_is_named_with_skipping_too(tmp_path: Path) -> None:
    path = tmp_path / "pairs.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    data = {"train": str(path), "invalid": "skip", "roles": {"prompt": "question"}}
    config = parse_config({"task": "preference", "model": {"name": "unused"}, "data": data})
    with refused("data.roles.prompt"):
        load(config.data, task=config.task_columns)


def test_columns_are_inferred_by_trls_names() -> None:
    def infer(rows: list[dict[str, Any]]) -> tuple[str, dict[str, Any]]:
        inferred = infer_data(
            Source(datasets.Dataset.from_list(rows), "pairs"),
            "pairs",
            None,
            dict.fromkeys(("text", "label", "answer", "by")),
        )
        return inferred.task, dict(inferred.data)

    assert infer(ROWS * 2) == ("preference", {})
    assert infer([{"chosen": [USER, GOOD], "rejected": [USER, BAD]}] * 4) == ("preference", {"chat": True})
