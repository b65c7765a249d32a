"""The card of a model that a run exported, in the hub's format.

A card has base model, training and scores. It excludes data, client names, paths and label counts, because cards are
uploaded.
"""

from __future__ import annotations

import re
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path, PurePath
from typing import TYPE_CHECKING, Any, cast

from huggingface_hub import EvalResult, ModelCard, ModelCardData

from fedspan.config import RunConfig
from fedspan.data.catalogue import get_dataset_entry
from fedspan.data.files import FROM_TRAINERS, IN_MEMORY
from fedspan.models.names import FROM_PYTHON, get_architecture, get_published_name
from fedspan.models.pooling import DENSE, Pooling
from fedspan.run_folder import CARD, RunFolder
from fedspan.runs.environment import is_command
from fedspan.runs.report import RunReport, format_final_rounds
from fedspan.tasks.metrics import METRICS, order_metrics
from fedspan.tasks.registry import get_task, is_installed
from fedspan.tasks.settings import TaskSettings

if TYPE_CHECKING:
    from fedspan.assembly.run import Prepared


def write_cards(prepared: Prepared, report: RunReport, run_folder: RunFolder) -> None:
    """Write a card next to every model that a run exported."""
    recorded: Any = run_folder.read_json(run_folder.environment) if run_folder.environment.is_file() else {}
    command = recorded.get("command", []) if isinstance(recorded, Mapping) else []
    for folder in (run_folder.path / name for name in report.adapters.values()):
        text = write_card(prepared, report, command, adapter=(folder / "adapter_config.json").is_file())
        (folder / CARD).write_text(text, encoding="utf-8")


def write_card(prepared: Prepared, report: RunReport, command: Sequence[str], *, adapter: bool = True) -> str:
    """Write the text of a card."""
    from fedspan.models.plain import has_name, is_plain_module  # imports Transformers, which takes seconds

    config, model = prepared.config, prepared.engine.adapted.model
    base = _get_base(config)
    data = ModelCardData(
        base_model=base if has_name(model) or not config.model.name.startswith(FROM_PYTHON) else None,
        library_name=_get_library(prepared.task_settings, adapter=adapter, is_plain=is_plain_module(model)),
        pipeline_tag=config.task_definition.pipeline_tag,
        tags=["federated-learning", "fedspan", *(["lora"] if adapter else []), *config.method.title.split("+")],
        model_name=f"{base.rpartition('/')[2]} by {config.method.title}",
        eval_results=_format_results(prepared, report) or None,
    )
    parts = [f"---\n{data.to_yaml()}\n---\n", f"# {data.model_name}\n", _describe_model(config, base, adapter)]
    parts.append("## Training\n\n" + _list(_describe_training(prepared, report)))
    parts.append("## Scores\n\n" + _describe_scores(report))
    if report.privacy:
        facts = {key: str(value) for key, value in report.privacy.items() if isinstance(value, str | int | float)}
        parts.append("## Privacy\n\n" + _list(facts))
    if is_plain_module(model) and config.task_definition.columns is not None:
        parts.append("## Use\n\n" + _describe_plain_use(base, adapter))
    else:
        parts.append("## Use\n\n" + _use(prepared.task_settings, base, adapter))
    if command:
        call = _write_call(config, has_processor=prepared.model.processor is not None)
        parts.append(_write_command(command, call))
    return "\n".join(parts)


def _get_library(settings: TaskSettings, *, adapter: bool, is_plain: bool) -> str | None:
    """Return the library that loads a model whole; None: the class of the user's own module does."""
    if settings.pooling is not None:  # Transformers' own classifiers have other heads
        return "sentence-transformers"
    return "peft" if adapter else None if is_plain else "transformers"


def convert_card(text: str, settings: TaskSettings, plain: str | None = None) -> str:
    """Turn an adapter's card into that of the model that the adapter was merged into.

    Args:
        plain: Name of the class of a module that is no Transformers model; None: it is one.
    """
    use = _use(settings, "", False) if plain is None else _describe_plain_use(plain, False)
    card = ModelCard(text, ignore_metadata_errors=True)
    data = cast("ModelCardData", card.data)
    data.library_name = _get_library(settings, adapter=False, is_plain=plain is not None)
    data.tags = [tag for tag in data.tags or [] if tag != "lora"]
    body = card.text.replace("A PEFT adapter for `", "A model: its adapter is merged into `", 1)
    card.text = re.sub(r"(?s)## Use\n.*?(?=\n## |\Z)", lambda _: "## Use\n\n" + use, body)
    return str(card)


def cut_card(text: str, rank: int) -> str:
    """Adjust the card of an adapter that was truncated to a rank: its scores were measured before."""
    card = ModelCard(text, ignore_metadata_errors=True)
    cast("ModelCardData", card.data).eval_results = None
    card.text = re.sub(r"(- Method: [^\n]*), rank [^\n,]*", rf"\g<1>, cut to rank {rank}", card.text, count=1)
    note = (
        f"## Scores\n\nThis adapter was cut to rank {rank} afterwards (`relative_error` in `fedspan.json` has what "
        "each layer lost); these are of the whole one.\n\n"
    )
    card.text = card.text.replace("## Scores\n\n", note, 1)
    return str(card)


def _get_base(config: RunConfig) -> str:
    """Return the base model's name; for a local folder, the last part only."""
    name = get_published_name(config.model.name)
    return Path(name).name if Path(name).is_absolute() else name


def _describe_model(config: RunConfig, base: str, adapter: bool) -> str:
    kind = "A PEFT adapter" if adapter else "A model"
    return (
        f"{kind} for `{base}`, trained by fedspan across data owners whose data "
        f"never left them: federated fine-tuning by `{config.method.title}`.\n"
    )


def _describe_training(prepared: Prepared, report: RunReport) -> dict[str, str]:
    config = prepared.config
    clients = [data.client for data in prepared.federation.clients.values()]
    sizes, ranks = [client.examples for client in clients], sorted({client.rank for client in clients})
    partition = config.partition
    description = partition.partitioner + (
        f", alpha {partition.alpha:g}" if partition.partitioner == "dirichlet" else ""
    )
    cohort = config.federation.clients_per_round
    facts = {
        "Task": config.task,
        "Method": f"{config.method.title}, rank {' to '.join(map(str, dict.fromkeys((ranks[0], ranks[-1]))))}",
        "Clients": f"{len(sizes)}, {'all' if cohort is None else cohort} a round; partition: {description}",
        "Training examples of a client": f"{min(sizes)} to {max(sizes)}, median {statistics.median(sizes):g}",
        "Rounds": f"{report.rounds}; this is round {report.best_round}"
        + (f", and {format_final_rounds(report.final_rounds)}" if report.final_rounds else ""),
        "Bytes transmitted": f"{report.bytes['down']:,} down, {report.bytes['up']:,} up",
        "Seed": str(config.seed),
    }
    if config.data.dataset is not None:
        facts["Data set"] = get_dataset_entry(config.data.dataset, "data.dataset").title
    return facts


def _describe_scores(report: RunReport) -> str:
    rows: list[str] = []
    titles = {
        "test": "held-out examples",
        "clients": "the clients' own test parts, mean over clients",
        "validation": "the clients' validation examples"
        + (", by which the best round was selected, so too good on average" if report.selected else ""),
    }
    for part, title in titles.items():
        scores = report.scores.get(part)
        if isinstance(scores, Mapping) and (part != "validation" or not rows):
            numbers = ", ".join(f"{METRICS[name].title} {scores[name]:.4f}" for name in order_metrics(scores))
            rows.append(f"- {title}: {numbers}")
    return ("\n".join(rows) or "Nothing was held out.") + "\n"


def _format_results(prepared: Prepared, report: RunReport) -> list[EvalResult]:
    scores, name = report.scores.get("test"), prepared.config.data.dataset
    if not isinstance(scores, Mapping):
        return []
    title = "held-out examples" if name is None else get_dataset_entry(name, "data.dataset").title
    return [
        EvalResult(
            task_type=prepared.config.task_definition.pipeline_tag or prepared.config.task,
            dataset_type=name or "private",
            dataset_name=title,
            metric_type=metric,
            metric_value=round(float(scores[metric]), 6),
        )
        for metric in order_metrics(scores)
    ]


_POOLED = """```python
from sentence_transformers import SentenceTransformer

model = SentenceTransformer("FOLDER")
logits = model.encode(["a text", "another"])  # {outputs}
```

Transformers' `pipeline` does not know this model's pooling and would give it a random head.
"""


_PAIRS = f"""```python
import torch
from safetensors.torch import load_file
from sentence_transformers import SentenceTransformer

model, head = SentenceTransformer("FOLDER"), load_file("FOLDER/{DENSE}/model.safetensors")
first, second = ["a text"], ["its second text"]
u, v = (model.encode(texts, convert_to_tensor=True).cpu() for texts in (first, second))
features = torch.cat([u, v, (u - v).abs()], 1)
logits = features @ head["linear.weight"].T + head["linear.bias"]  # {{outputs}}
```

Transformers' `pipeline` does not know this model's pooling and would give it a random head.
"""


_VECTORS = """```python
from sentence_transformers import SentenceTransformer

model = SentenceTransformer("FOLDER")
vectors = model.encode(["a text", "another"])
similarities = model.similarity(vectors, vectors)
```
"""


def _write_pooling_code(base: str, pooling: Pooling) -> str:
    """Write the lines that compute a pooled classifier's logits without sentence-transformers."""
    pooled = {
        "mean": "(hidden * mask).sum(1) / mask.sum(1)",
        "max": "hidden.masked_fill(mask == 0, float('-inf')).amax(1)",
        "cls": "hidden[:, 0]",
        "last": "hidden[range(len(hidden)), mask[..., 0].sum(1) - 1]",
    }[pooling.mode]
    if pooling.normalize:
        pooled = f"torch.nn.functional.normalize({pooled}, dim=1)"
    return (
        "```python\nimport torch\nfrom peft import PeftModel\nfrom safetensors.torch import load_file\n"
        "from transformers import AutoModel, AutoTokenizer\n\n"
        f'encoder = PeftModel.from_pretrained(AutoModel.from_pretrained("{base}"), "FOLDER")\n'
        f'head = load_file("FOLDER/{DENSE}/model.safetensors")\n'
        'inputs = AutoTokenizer.from_pretrained("FOLDER")(["a text"], padding=True, return_tensors="pt")\n'
        'hidden, mask = encoder(**inputs).last_hidden_state, inputs["attention_mask"][..., None]\n'
        f"features = {pooled}\n"
        'logits = features @ head["linear.weight"].T + head["linear.bias"]\n```\n'
    )


_MERGE = ".merge_and_unload()  # torch's transformer layers pass over adapters in evaluation"


def _use(settings: TaskSettings, base: str, adapter: bool) -> str:
    definition, pooled = get_task(settings.task), settings.pooling
    if pooled is not None and (definition.is_embedding or definition.columns is None):
        return _VECTORS
    if pooled is not None:
        outputs = "by label, in the order of fedspan.json" if definition.has_labels else "one number for each"
        if pooled.pairs:
            return _PAIRS.format(outputs=outputs)
        text = _POOLED.format(outputs=outputs)
        if not adapter:
            return text
        return f"{text}\nOr, without sentence-transformers:\n\n{_write_pooling_code(base, pooled)}"
    if definition.columns is None:
        return (
            f"```python\nfrom peft import PeftModel\n\n# base: the model `{base}` as the clients' trainers had it\n"
            "# (of a SentenceTransformer, its transformers_model)\n"
            f'model = PeftModel.from_pretrained(base, "FOLDER"){_MERGE}\n```\n'
            if adapter
            else "The folder holds the weights of the model as the clients' trainers had it (`from_pretrained`).\n"
        )
    head = definition.model_head
    kind = head.auto_class
    if not adapter:
        own = "import fedspan.models.resnet  # has the architecture\n" if get_architecture(base) else ""
        return f'```python\n{own}from transformers import {kind}\n\nmodel = {kind}.from_pretrained("FOLDER")\n```\n'
    images = head.has_image_inputs
    labels = "num_labels of this adapter" + (" and ignore_mismatched_sizes" if images else "")
    labels = f"  # a classifier: with {labels}" if head.is_new else ""
    merge = ".merge_and_unload()  # some models, as MobileNet, fail with PEFT's wrapped convolutions" if images else ""
    return (
        f"```python\nfrom peft import PeftModel\nfrom transformers import {kind}\n\n"
        f'base = {kind}.from_pretrained("{base}"){labels}\n'
        f'model = PeftModel.from_pretrained(base, "FOLDER"){merge}\n```\n\n'
        "or `fedspan predict FOLDER ...`, which knows labels, prompts and tokenizer from `fedspan.json`.\n"
    )


def _describe_plain_use(base: str, adapter: bool) -> str:
    """Write the section on a module that is no Transformers model."""
    from fedspan.models.plain import STATE_DICT  # imports Transformers, which takes seconds

    load = f'model.load_state_dict(load_file("FOLDER/{STATE_DICT}"))'
    built = f"model = {base}(...)  # as it was built for the run"
    text = f"```python\nfrom safetensors.torch import load_file\n\n{built}\n{load}\n```\n"
    if not adapter:
        return text
    peft = f'from peft import PeftModel\n\nmodel = PeftModel.from_pretrained(base, "FOLDER"){_MERGE}'
    return f"{text}\nor, with the weights that the run began with in `base`:\n\n```python\n{peft}\n```\n"


def _write_call(config: RunConfig, *, has_processor: bool) -> str:
    """Return the call that starts a run again in Python, with the objects that its config does not name."""
    if config.data.train == FROM_TRAINERS:
        return 'fedspan.simulate("config.yaml", "run", trainers=trainers)  # the clients\' own trainers, by id'
    is_passed = config.model.name.startswith(FROM_PYTHON)
    objects = {
        "data": config.data.train == IN_MEMORY,
        "model": is_passed,
        "tokenizer": is_passed and has_processor,
        "task": not is_installed(config.task),
    }
    names = [name for name, is_needed in objects.items() if is_needed]
    arguments = "".join(f", {name}={name}" for name in names)
    comment = f"  # with its own {', '.join(names)}" if names else ""
    return f'fedspan.run("config.yaml", "run"{arguments}){comment}'


def _write_command(command: Sequence[str], call: str) -> str:
    """Return the section with the command line, or with the call in Python if no command of fedspan made the run."""
    if not is_command(command):
        code = f"```python\nimport fedspan\n\n{call}\n```"
        return f"## Python\n\nWith the run folder's `config.yaml`:\n\n{code}\n"
    words = ["fedspan", *map(_remove_path, command[1:])]
    return f"## Command\n\n```\n{' '.join(words)}\n```\n"


def _remove_path(word: str) -> str:
    """Remove folders, and values of data options, from a word of a command."""
    key, equals, value = word.rpartition("=")
    return f"{key}=..." if key.startswith("data.") else f"{key}{equals}{PurePath(value).name or value}"


def _list(facts: Mapping[str, str]) -> str:
    return "".join(f"- {name}: {value}\n" for name, value in facts.items())
