"""Write docs/diagnostics.md: ``python docs/generate_diagnostics.py``."""

from __future__ import annotations

from pathlib import Path

from fedspan.diagnostics.measures import MEASURES

PAGE = Path(__file__).parent / "diagnostics.md"
INTRO = """# Diagnostics

This page explains the measures of `fedspan diagnose`, which show how well the clients' updates fit together.

`fedspan diagnose RUN` runs one more round from a checkpoint of a run (`--round last`, `best`, or a number), compares
the clients' updates with each other and with the server's result, and discards the round:

```bash
fedspan diagnose runs/first
fedspan diagnose runs/first --round best --pairs 6 --examples 1000 --json > diagnosis.json
```

In Python, `fedspan.diagnose("runs/first")` returns the measures by layer and by pair of clients. It supports every
method and every engine on one machine, but not runs of a deployment, whose data are on the nodes. It costs nothing in
the run itself; the command prints its own cost.

During a run, `evaluation.diagnostics: 5` measures every fifth round: the measures of every layer, and the alignment of
all layers as one vector, are written to `metrics.jsonl`, and `fedspan report` plots them by round. The trained model
does not change. The run reports the time that this took.

A client's update is the change of a layer's whole weight in the round, whether the method trains the base, factors or
projected gradients. Updates are measured before compression, clipping and noise; means use the clients' weights. Tables
show the mean, minimum and maximum over the target layers, and the layer with the worst value.

| measure | interpretation | source |
|---|---|---|
"""
REST = """
For pairs of clients (`--pairs`, default 3), the loss on held-out examples is measured at five points of the straight
line between the two models, heads included. The *barrier* is the largest excess over the linear interpolation of the
losses at the ends (Frankle et al., 2020; FedGaLore, arXiv:2602.01746, figure 3c). Near 0, the two models are in one
basin, and their average is as good as they are. A high barrier means that averaging loses what the clients learned.
"""


def page() -> str:
    """The page."""
    rows = [f"| {one.title} (`{one.key}`) | {one.reads} | {one.source} |" for one in MEASURES]
    return INTRO + "\n".join(rows) + "\n" + REST


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
