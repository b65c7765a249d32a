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
INTRO = """# Which models work?

Most Transformers models work; these are the families that we test, and what other models need.

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
## What is refused or slower?

- **DeBERTa** shares no passes with `query_proj`; `target_modules: [value_proj, dense]` does.
- **Mamba**: leave out `dt_proj` and `out_proj` with `exclude_modules`.
- **Mixtral** and other mixtures of experts: attention layers are targets, experts and routers are not.
- **MobileNet, ConvNeXt**: depthwise convolutions are refused. The suggested names leave them out.
- **T5**: `model.pooling: mean` classifies with the encoder alone.
- **Whisper** and other models of speech need [your own trainer](your-trainer.md) or [task](your-task.md), with the head
  `Head("AutoModelForAudioClassification", ("ForAudioClassification",), outputs="labels", is_new=True)`.
- **`nn.MultiheadAttention`**: its `out_proj` is refused, because its weight is used without a call of the layer.

## Can I train any PyTorch module?

```python
report = fedspan.run(config, args.out, data=signals, model=model, task=SIGNALS, resume=True)
```

Yes. `model=` takes any `nn.Module`, of which the run trains a copy, and `task=` the definition of [your
task](your-task.md), which calls it. `examples/plain_pytorch.py` is a whole run.

- `model.target_modules` names layers (`nn.Linear`, `nn.Conv2d`, `nn.Embedding`) as in PEFT; there is no default. A
  layer whose weight is used without a call of the layer is refused.
- The export has a PEFT adapter and `adapter/state_dict.safetensors` with all weights, which
  `model.load_state_dict(load_file(...))` loads without fedspan.
- To resume in a new process, register the task first (`fedspan.register_task`) and pass the module with the weights
  with which the run began. `predict` and `evaluate` take a module of the same class, with any weights.

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
