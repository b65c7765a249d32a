"""A federation through each class of trainers: its adapter scores as the trainers' own evaluation reported."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

import datasets
import pytest
import torch
import transformers
from peft import LoraConfig, PeftModel
from torch.nn import functional
from torch.utils.data import DataLoader

import fedspan
from fedspan.config.node import NodeConfig
from fedspan.deployment.trainer_node import TrainerNode
from fedspan.training.trainers.local import RoundPlan
from fedspan.training.trainers.optimizer import JobOptimizer
from fedspan.training.trainers.transformers import TransformersTrainer, list_unused_arguments
from helpers import tiny_decoders, tiny_seq2seq
from helpers.captured_log import CapturedLog
from helpers.families import others_slow
from helpers.node_service import node, serve
from helpers.refusals import refused
from helpers.trainer_clients import QUIET, sentence_encoder, spare_the_collector

OWNERS = (0, 1)
ROWS = 6
DECODER = tiny_decoders.TARGETS["llama"]
ENCODER = ["query", "value"]
Make = Callable[[Path, int, Any], Any]


def rows(owner: int, *columns: str) -> list[dict[str, str]]:
    """An owner's texts, another one for each row and column."""
    words = [f"{kind}{number}" for kind in "abcd" for number in range(6)]
    return [
        {column: " ".join(words[(owner + row + 3 * at) % 24 :][:4]) for at, column in enumerate(columns)}
        for row in range(ROWS)
    ]


def split(table: list[dict[str, Any]]) -> dict[str, Any]:
    data = datasets.Dataset.from_list(table)
    return {"train_dataset": data.select(range(4)), "eval_dataset": data.select(range(4, ROWS))}


def decoder(folder: Path) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(folder / "llama-lm", dtype=torch.float32)


def sft(folder: Path, owner: int, model: Any) -> Any:
    trl = pytest.importorskip("trl")
    args = trl.SFTConfig(**QUIET, output_dir=str(folder / "trainer"), bf16=False, max_length=16)
    tokens = tiny_decoders.tokenizer(pads=True)
    return trl.SFTTrainer(model=model, args=args, processing_class=tokens, **split(rows(owner, "text")))


def dpo(folder: Path, owner: int, model: Any) -> Any:
    trl = pytest.importorskip("trl")
    args = trl.DPOConfig(**QUIET, output_dir=str(folder / "trainer"), bf16=False, max_length=16)
    data = split(rows(owner, "prompt", "chosen", "rejected"))
    tokens = tiny_decoders.tokenizer(pads=True)
    return trl.DPOTrainer(model=model, ref_model=decoder(folder), args=args, processing_class=tokens, **data)


def kto(folder: Path, owner: int, model: Any) -> Any:
    trl = pytest.importorskip("trl")
    args = trl.KTOConfig(**QUIET, output_dir=str(folder / "trainer"), bf16=False, max_length=16)
    table = [{**row, "label": at % 2 == 0} for at, row in enumerate(rows(owner, "prompt", "completion"))]
    tokens = tiny_decoders.tokenizer(pads=True)
    return trl.KTOTrainer(model=model, ref_model=decoder(folder), args=args, processing_class=tokens, **split(table))


def encoder_decoder(folder: Path) -> Any:
    config = transformers.T5Config(
        vocab_size=32,
        d_model=16,
        d_kv=8,
        d_ff=24,
        num_layers=2,
        num_heads=2,
        dropout_rate=0.0,
        decoder_start_token_id=0,
    )
    torch.manual_seed(5)
    return transformers.T5ForConditionalGeneration(config)


def seq2seq(folder: Path, owner: int, model: Any) -> Any:
    args = transformers.Seq2SeqTrainingArguments(**QUIET, output_dir=str(folder / "trainer"))
    table = [{"input_ids": [owner + 2 + at, 3, 4], "labels": [owner + 5 + at, 1]} for at in range(ROWS)]
    tokens = tiny_seq2seq.make_tokenizer()
    return transformers.Seq2SeqTrainer(model=model, args=args, processing_class=tokens, **split(table))


def sentences(folder: Path, owner: int, model: Any, evaluator: Any = None) -> Any:
    library = pytest.importorskip("sentence_transformers")
    losses = pytest.importorskip("sentence_transformers.sentence_transformer.losses")
    args = library.SentenceTransformerTrainingArguments(**QUIET, output_dir=str(folder / "trainer"))
    words = [f"{label}{number}" for label in ("admin", "billing", "lab", "symptom") for number in range(8)]
    table = [{"anchor": words[owner + at], "positive": words[owner + at + 9]} for at in range(ROWS)]
    loss = losses.MultipleNegativesRankingLoss(model)
    return library.SentenceTransformerTrainer(model=model, args=args, loss=loss, evaluator=evaluator, **split(table))


CASES: dict[str, tuple[Callable[[Path], Any], Make, list[str]]] = {
    "SFTTrainer": (decoder, sft, DECODER),
    "DPOTrainer": (decoder, dpo, DECODER),
    "KTOTrainer": (decoder, kto, DECODER),
    "Seq2SeqTrainer": (encoder_decoder, seq2seq, ["q", "v"]),
    "SentenceTransformerTrainer": (sentence_encoder, sentences, ENCODER),
}


@pytest.mark.parametrize("name", others_slow(CASES, ["SFTTrainer", "SentenceTransformerTrainer"]))
def test_the_adapter_of_a_federation_scores_as_its_trainers_reported(
    name: str, tiny_folder: Path, decoders: Path, tmp_path: Path, caplog: CapturedLog
) -> None:
    load, make, targets = CASES[name]
    folder = tiny_folder if name == "SentenceTransformerTrainer" else decoders
    config = {
        "model": {"target_modules": targets},
        "method": {"name": "rolora", "r": 2},
        "federation": {"rounds": 2},
        "training": {"lr": 0.05, "local_steps": 2},
    }
    trainers = {f"owner-{owner}": make(folder, owner, load(folder)) for owner in OWNERS}
    spare_the_collector()  # TRL or sentence-transformers was imported
    before = sum(trainer.evaluate()["eval_loss"] for trainer in trainers.values()) / len(OWNERS)
    report = fedspan.simulate(config, tmp_path / "run", trainers=trainers)
    assert "did not call the model" not in caplog.text
    reported = report.scores["validation"]["loss"]
    assert reported != pytest.approx(before, rel=1e-4)  # it learned something
    model = load(folder)
    inner = getattr(model, "transformers_model", model)
    PeftModel.from_pretrained(inner, tmp_path / "run" / "adapter").merge_and_unload()  # in place
    for trainer in trainers.values():
        trainer.model.load_state_dict(model.state_dict())
    losses = [trainer.evaluate()["eval_loss"] for trainer in trainers.values()]
    assert sum(losses) / len(OWNERS) == pytest.approx(reported, rel=1e-4)


def test_the_result_of_sentence_trainers_is_a_sentence_encoder(tiny_folder: Path, tmp_path: Path) -> None:
    """With the pooling and the normalization of the trainers' model: its vectors are those that they trained."""
    library = pytest.importorskip("sentence_transformers")
    modules = pytest.importorskip("sentence_transformers.sentence_transformer.modules")

    def load() -> Any:
        encoder = sentence_encoder(tiny_folder)[0]
        return library.SentenceTransformer(
            modules=[encoder, modules.Pooling(16, pooling_mode="cls"), modules.Normalize()], device="cpu"
        )

    config = {"model": {"target_modules": ENCODER}, "method": {"r": 2}, "federation": {"rounds": 1}}
    training = {"training": {"lr": 0.05, "local_steps": 2}}
    trainers = {"a": sentences(tmp_path, 0, load()), "b": sentences(tmp_path, 1, load())}
    fedspan.simulate({**config, **training}, tmp_path / "run", trainers=trainers)
    adapter, expected, texts = tmp_path / "run" / "adapter", load(), ["admin1 lab2", "billing3"]
    before = expected.encode(texts)
    PeftModel.from_pretrained(expected.transformers_model, adapter).merge_and_unload()  # in place
    encoder = library.SentenceTransformer(str(adapter), device="cpu")
    assert encoder.max_seq_length == 16
    assert encoder.encode(texts) == pytest.approx(expected.encode(texts), abs=1e-5)
    assert encoder.encode(texts) != pytest.approx(before, abs=1e-3)
    assert "similarities = model.similarity(vectors, vectors)" in (adapter / "README.md").read_text()


def test_metrics_of_trl_have_the_names_of_fedspan_s_tasks(decoders: Path) -> None:
    names = {
        sft: {"token_accuracy": "mean_token_accuracy"},
        dpo: {"reward_accuracy": "rewards/accuracies", "reward_margin": "rewards/margins"},
        kto: {"reward_margin": "rewards/margins"},
    }
    for make, others in names.items():
        trainer = make(decoders, 0, decoder(decoders))
        metrics, returned = TransformersTrainer(trainer).evaluate(), trainer.evaluate()
        assert {"loss", *others} <= metrics.keys()
        assert all(metrics[name] == pytest.approx(returned[f"eval_{other}"]) for name, other in others.items())


def test_the_metrics_of_an_evaluator_judge_rounds(tiny_folder: Path, tmp_path: Path) -> None:
    evaluators = pytest.importorskip("sentence_transformers.sentence_transformer.evaluation")
    words = {str(at): f"lab{at}" for at in range(12)}
    retrieval = evaluators.InformationRetrievalEvaluator(words, words, {key: {key} for key in words}, name="search")
    texts = list(words.values())
    similarity = evaluators.EmbeddingSimilarityEvaluator(texts[:6], texts[6:], [at / 6 for at in range(6)])
    both = evaluators.SequentialEvaluator([retrieval, similarity])
    config = {
        "model": {"target_modules": ENCODER},
        "federation": {"rounds": 1},
        "training": {"local_steps": 1},
        "evaluation": {"metric": "ndcg_at_10"},
    }
    trainer = sentences(tmp_path, 0, sentence_encoder(tiny_folder), both)
    report = fedspan.simulate(config, tmp_path / "run", trainers={"a": trainer})
    assert report.metric == "ndcg_at_10"
    assert {"loss", "spearman", "recall_at_10", "ndcg_at_10"} <= report.scores["validation"].keys()


def test_a_sentence_encoder_that_uses_a_weight_without_a_call_is_refused(tiny_folder: Path, tmp_path: Path) -> None:
    model = sentence_encoder(tiny_folder)
    bert = model.transformers_model
    query = bert.encoder.layer[0].attention.self.query
    bert.embeddings.register_forward_hook(lambda _, args, hidden: hidden + functional.linear(hidden, query.weight))
    config = {"model": {"target_modules": ENCODER}, "method": {"r": 2}}
    with refused("model.target_modules"):
        fedspan.simulate(config, tmp_path / "run", trainers={"a": sentences(tmp_path, 0, model)})
    assert "forward" not in vars(bert)


def saved_encoder_decoder(folder: Path) -> Any:
    return transformers.T5ForConditionalGeneration.from_pretrained(folder / "t5", dtype=torch.float32)


SERVED: dict[str, tuple[Callable[[Path], Any], Make, dict[str, Any]]] = {
    "SFTTrainer": (decoder, sft, {"task": "causal-lm", "data": {"prompt": "{text}"}, "model": "llama-lm"}),
    "DPOTrainer": (decoder, dpo, {"task": "preference", "model": "llama-lm"}),
    "KTOTrainer": (decoder, kto, {"task": "preference", "model": "llama-lm"}),
    "Seq2SeqTrainer": (saved_encoder_decoder, seq2seq, {"task": "seq2seq", "model": "t5"}),
    "SentenceTransformerTrainer": (sentence_encoder, sentences, {"task": "text-embedding", "model": "bert"}),
}
"""The task and the model that a server's config names, beside those of ``CASES``."""


@pytest.mark.parametrize("name", SERVED)
def test_a_server_has_the_base_of_each_class_of_trainers(
    name: str, tiny_folder: Path, decoders: Path, tmp_path: Path
) -> None:
    load, make, problem = SERVED[name]
    folder = {"bert": tiny_folder, "llama-lm": decoders, "t5": tmp_path}[problem["model"]]
    tiny_seq2seq.save_model("t5", tmp_path / "t5")
    targets: Any = "all-linear" if name == "SentenceTransformerTrainer" else CASES[name][2]
    values = {
        **{"seed": 3, "device": "cpu", "data": {}, "method": {"name": "rolora", "r": 2}, "federation": {"rounds": 1}},
        **problem,
        "model": {"name": str(folder / problem["model"]), "target_modules": targets, "max_length": 16},
        "training": {"lr": 0.05, "local_steps": 2},
    }
    limits = {"models": [f"{folder}/*"], "train_examples": 1}
    trainer = make(folder, 0, load(folder))
    before = {key: value.clone() for key, value in trainer.model.state_dict().items()}
    with closing(TrainerNode(node(folder, tmp_path / "node", data={}, limits=limits), trainer)) as worker:
        prepared, _ = serve(values, worker.service)
        result = prepared.federation.run_round(prepared.federation.begin())
    assert result.loss > 0
    after = trainer.model.state_dict()
    assert all(torch.equal(value, after[key]) for key, value in before.items())
    assert before.keys() == after.keys()


@pytest.mark.parametrize(
    ("library", "kind"),
    [
        ("transformers", "TrainingArguments"),
        ("transformers", "Seq2SeqTrainingArguments"),
        ("sentence_transformers", "SentenceTransformerTrainingArguments"),
        ("trl", "SFTConfig"),
        ("trl", "DPOConfig"),
    ],
)
def test_arguments_at_their_defaults_are_not_reported_as_unused(library: str, kind: str, tmp_path: Path) -> None:
    make = getattr(pytest.importorskip(library), kind)
    number_format = {"bf16": False} if library == "trl" else {}
    assert list_unused_arguments(make(output_dir=str(tmp_path), **number_format)) == ()
    changed = make(output_dir=str(tmp_path), warmup_steps=3, adam_beta2=0.95, **number_format)
    assert list_unused_arguments(changed) == ("adam_beta2", "warmup_steps")


class TwoSizes:
    """A batch sampler of an owner: batches of 3 and 1, which are not what the arguments say."""

    def __iter__(self) -> Iterator[list[int]]:
        return iter([[0, 1, 2], [3], [1, 3, 0]])

    def __len__(self) -> int:
        return 3


class FewerBatches:
    """A batch sampler of an owner that yields 2 of the 4 batches that its length says."""

    def __iter__(self) -> Iterator[list[int]]:
        return iter([[0, 1, 2], [3]])

    def __len__(self) -> int:
        return 4


class LoaderOfOwner(transformers.Seq2SeqTrainer):
    """A trainer whose owner writes the loader."""

    loading: Mapping[str, Any]

    def get_train_dataloader(self) -> Any:
        loader = DataLoader(self.train_dataset, collate_fn=self.data_collator, **self.loading)
        return self.accelerator.prepare(loader)


class Counting(TransformersTrainer):
    """A trainer that notes how many examples each round was computed from."""

    def __init__(self, trainer: transformers.Trainer) -> None:
        super().__init__(trainer)
        self.counts: list[int] = []

    def train(self, plan: RoundPlan, optimizer: JobOptimizer) -> float:
        loss = super().train(plan, optimizer)
        self.counts.append(optimizer.examples)
        return loss


def loading_trainer(loading: Mapping[str, Any] | None, arguments: dict[str, Any], tmp_path: Path) -> Any:
    """A trainer of four examples; ``loading``: how its owner's loader batches them, None: by the arguments."""
    args = transformers.Seq2SeqTrainingArguments(**{**QUIET, **arguments}, output_dir=str(tmp_path / "trainer"))
    table = [{"input_ids": [2 + at, 3, 4], "labels": [5 + at, 1]} for at in range(4)]
    kind = transformers.Seq2SeqTrainer if loading is None else LoaderOfOwner
    trainer = kind(model=encoder_decoder(tmp_path), args=args, train_dataset=datasets.Dataset.from_list(table))
    if isinstance(trainer, LoaderOfOwner):
        trainer.loading = loading
    return trainer


@pytest.mark.parametrize(
    ("loading", "arguments", "steps", "expected"),
    [
        (None, {"per_device_train_batch_size": 3, "dataloader_drop_last": True}, None, 2 * 3),
        (None, {"per_device_train_batch_size": 3}, None, 2 * 4),
        pytest.param(
            *(None, {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 3}, 3, 3 + 1 + 3),
            marks=pytest.mark.slow,
        ),
        (
            None,
            {
                "per_device_train_batch_size": 1,
                "gradient_accumulation_steps": 3,
                "accelerator_config": {"dispatch_batches": True},
            },
            3,
            3 + 1 + 3,
        ),
        pytest.param({"batch_sampler": TwoSizes()}, {}, None, 2 * 7, marks=pytest.mark.slow),
        ({"batch_sampler": TwoSizes()}, {"gradient_accumulation_steps": 2}, 3, 4 + 3 + 4),
        ({"batch_sampler": TwoSizes(), "num_workers": 1}, {}, 2, 3 + 1),
        ({"batch_sampler": FewerBatches()}, {}, None, 2 * 4),
    ],
)
def test_examples_are_counted_as_the_loader_yields_them(
    loading: Mapping[str, Any] | None, arguments: dict[str, Any], steps: int | None, expected: int, tmp_path: Path
) -> None:
    counting = Counting(loading_trainer(loading, arguments, tmp_path))
    training = {"lr": 0.01, "local_epochs": 2} if steps is None else {"lr": 0.01, "local_steps": steps}
    config = {"model": {"target_modules": ["q", "v"]}, "federation": {"rounds": 2}, "training": training}
    fedspan.simulate(config, tmp_path / "run", trainers={"a": counting})
    assert counting.counts == [expected] * 2


def test_a_sampler_with_which_a_trainer_misses_planned_steps_is_refused(tmp_path: Path) -> None:
    trainer = loading_trainer({"batch_sampler": FewerBatches()}, {}, tmp_path)
    config = {"model": {"target_modules": ["q", "v"]}, "training": {"lr": 0.01, "local_steps": 6}}
    with refused("trainer", "client a in round 1 ended after 4 of 6 planned steps") as caught:
        fedspan.simulate(config, tmp_path / "run", trainers={"a": trainer})
    assert "its loader yields fewer batches than its length says" in str(caught.value)


def test_an_adapter_of_trl_is_refused_with_its_spelling_in_the_config(decoders: Path, tmp_path: Path) -> None:
    trl = pytest.importorskip("trl")
    args = trl.SFTConfig(**QUIET, output_dir=str(tmp_path / "trainer"), bf16=False, max_length=16)
    trainer = trl.SFTTrainer(
        model=decoder(decoders),
        args=args,
        processing_class=tiny_decoders.tokenizer(pads=True),
        peft_config=LoraConfig(r=4, lora_alpha=8, target_modules="all-linear", task_type="CAUSAL_LM"),
        **split(rows(0, "text")),
    )
    with refused("trainers['a']"):
        fedspan.simulate({}, tmp_path / "run", trainers={"a": trainer})


def test_weights_outside_of_the_transformers_model_are_compared(tiny_folder: Path, tmp_path: Path) -> None:
    trainers = {str(seed): sentences(tiny_folder, 0, sentence_encoder(tiny_folder, seed)) for seed in OWNERS}
    config = {"model": {"target_modules": ENCODER}, "method": {"name": "rolora", "r": 2}}
    with refused("trainers", "frozen weights of the model of '1' differ"):
        fedspan.simulate(config, tmp_path / "run", trainers=trainers)
    config_of_node = NodeConfig.model_validate({"id": "a", "server": "localhost:1", "folder": str(tmp_path / "node")})
    with refused("trainer", "outside of the Transformers model"):
        TrainerNode(config_of_node, trainers["0"])


def test_a_pooling_that_no_server_has_is_refused_by_a_node(tiny_folder: Path, tmp_path: Path) -> None:
    model = sentence_encoder(tiny_folder)
    model[1].pooling_mode = ("mean", "max")
    with refused("trainer", r"its pooling is mean and max, and the server .* by mean, cls, max or last"):
        TrainerNode(node(tiny_folder, tmp_path / "node", data={}), sentences(tiny_folder, 0, model))


def test_an_evaluator_without_evaluation_examples_is_refused(tiny_folder: Path) -> None:
    evaluation = pytest.importorskip("sentence_transformers.sentence_transformer.evaluation")
    trainer = sentences(tiny_folder, 0, sentence_encoder(tiny_folder))
    evaluator = evaluation.EmbeddingSimilarityEvaluator(["lab1"], ["lab2"], [0.5])
    lone = type(trainer)(
        model=trainer.model,
        args=trainer.args,
        loss=trainer.loss,
        train_dataset=trainer.train_dataset,
        evaluator=evaluator,
    )
    with refused("trainer", r"evaluator= without an eval_dataset=.* Pass an eval_dataset= too"):
        TransformersTrainer(lone)
