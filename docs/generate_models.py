"""Write docs/models.md by training one small model of each family: ``python docs/generate_models.py``."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import torch
from transformers.utils import logging

from fedspan.errors import FedspanError

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests"))

from helpers import tiny_families  # noqa: E402
from helpers.tiny_families import FAMILIES  # noqa: E402

PAGE = ROOT / "docs" / "models.md"
INTRO = """# Models

This page lists the model families that fedspan is tested with, and what a model needs beyond them.

`model.name` is a hub id or a folder of any Transformers model that has a head for the [task](tasks.md). Target modules
are named as in PEFT. Without `model.target_modules` they are PEFT's default for the architecture; where PEFT has none,
the error lists names that can be targets.

The engine `batched` trains several clients in one pass over the frozen base. Before clients of a kind first share a
pass, it checks that each gets the same predictions as alone. Where they differ, clients train one by one, and the run
prints why; results are those of the engine `loop` either way.

## Tested families

Each row is a small model with random weights, built from its Transformers config. It trains two rounds of FedIT on both
engines. *stacks*: several clients share a pass, and adapter, head and loss equal those of `loop` up to rounding.
"""
SENTENCES = """
What the run prints where it has no default or does not stack:
"""
REMARKS = """
## What is refused or slower

- **DeBERTa**: queries and keys also read the relative positions, one input for all clients of a pass. With
  `target_modules: [value_proj, dense]`, clients share passes.
- **Mamba**: `dt_proj` and `out_proj` are refused, also as a part of `all-linear`: their weights are used without a call
  of the layer, and PEFT refuses adapters of `out_proj`. `exclude_modules: [dt_proj, out_proj]` leaves them out.
- **Mixtral** and other mixtures of experts: Transformers stores all experts of a layer in one tensor, which no adapter
  of this library changes. Attention layers are targets, routers are refused.
- **MobileNet, ConvNeXt**: convolutions in groups (depthwise ones) are refused. The suggested names leave them out.
- **T5**: `model.pooling: mean` classifies with the encoder alone. Without it, Transformers' classifier runs the
  decoder, too. Models of other families with an encoder and a decoder do not pool.
- **mBART, M2M100, NLLB** mark texts with their language: set `task_options.source_language` and `target_language`
  ([sequence to sequence](tasks.md#sequence-to-sequence)).
- **Whisper** and other models of speech: no built-in task accepts audio. [Your own trainer](your-trainer.md) and [a
  task of your own](your-task.md) can. The task's head is then
  `Head("AutoModelForAudioClassification", ("ForAudioClassification",), outputs="labels", is_new=True)`.
- **`nn.MultiheadAttention`**: its `out_proj` is refused, because its weight is used without a call of the layer.

## Any PyTorch module

```python
report = fedspan.run(config, args.out, data=signals, model=model, task=SIGNALS, resume=True)
```

`model=` takes any `nn.Module` and `task=` the definition of [a task of your own](your-task.md), which calls the module
with its expected arguments. The run trains a copy.

- `model.target_modules` names layers (`nn.Linear`, `nn.Conv2d`, `nn.Embedding`) as in PEFT; there is no default.
  `classifier`, `score`, `qa_outputs` and `model.modules_to_save` train whole where the task's head is new.
- Dropout of layers is 0, as for all models. Dropout in the forward itself (`F.dropout`) stays, and clients then train
  one by one.
- A target layer whose weight the forward uses without calling the layer, as in `F.linear(x, self.embed.weight)`, is
  refused before the first round: an adapter would have no effect there.
- A Transformers model that reads neither tokens nor images, such as one of signals, needs no tokenizer. A feature
  extractor passed as `tokenizer=` is exported with it. Its head starts with the weights that it has.
- Of another module, the folder `adapter` holds a PEFT adapter and `state_dict.safetensors` with all weights: without
  fedspan, `model.load_state_dict(load_file("adapter/state_dict.safetensors"))` loads them.
- `resume=True` continues an interrupted run, on the weights with which it began. In a new process, register the task
  first (`fedspan.register_task`).
- `predict` and `evaluate` take a module of the same class as `model=`, with any weights: they load those of
  `state_dict.safetensors` into a copy. `export(form="merged")` needs no module. What the run did not export, such as
  another round, and an adapter cut to a smaller rank need the module with the weights with which the run began; others
  are refused. So are those of a Transformers model passed as `model=`, unless its layers are quantized.
- No weights are loaded by the name of a class: `predict` without `model=` is refused for a module, and for a
  Transformers model that was built from a config without a name.

`examples/plain_pytorch.py` is a whole run.

`python docs/generate_models.py` writes this page. `tests/models/test_families.py` checks each family with RoLoRA, too,
and that PEFT loads the exported adapter with equal logits.
"""


def measure() -> tuple[list[str], list[str]]:
    """Train all families; return the rows of the table, and what a user reads where not everything works."""
    torch.set_num_threads(1)
    rows, sentences = list[str](), list[str]()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        tiny_families.save_data(folder)
        for key, family in FAMILIES.items():
            tiny_families.save_family(key, folder)
            default = "yes"
            try:
                outcome = tiny_families.compare(folder, key)
            except FedspanError as error:
                sentences.append(f"- {family.title}: {str(error).replace(f'{folder}/', '')}")
                if error.field != "model.target_modules":
                    rows.append(f"| {family.title} | `{family.task}` | | | refused |")
                    continue
                default, outcome = "no", tiny_families.compare(folder, key, targets=family.targets)
            if outcome.alone is not None:
                sentences.append(f"- {family.title}: clients train one by one, because {outcome.alone}.")
            targets = ", ".join(f"`{target}`" for target in family.targets or outcome.targets)
            result = "stacks" if outcome.alone is None else "one by one"
            rows.append(f"| {family.title} | `{family.task}` | {targets} | {default} | {result} |")
    return rows, sentences


def page() -> str:
    """The page."""
    rows, sentences = measure()
    head = ["| family | task | target modules | PEFT's default | engine `batched` |", "|---|---|---|---|---|"]
    return "\n".join([INTRO, *head, *rows, SENTENCES, *sentences]) + "\n" + REMARKS


if __name__ == "__main__":
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    PAGE.write_text(page(), encoding="utf-8")
