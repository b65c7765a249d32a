"""Write docs/diagnostics.md: ``python docs/generate_diagnostics.py``."""

from __future__ import annotations

from pathlib import Path

from fedspan.diagnostics.measures import MEASURES

PAGE = Path(__file__).parent / "diagnostics.md"
INTRO = """# Diagnostics

This page explains the measures of `fedspan diagnose`, which show how well the clients' updates fit together.

`fedspan diagnose RUN` starts from a checkpoint of the run (`--round last`, `best`, or a number) and runs one more
round. It compares the clients' updates with each other and with the server's result, and then discards the round:

```bash
fedspan diagnose runs/first
fedspan diagnose runs/first --round best --pairs 6 --examples 1000 --json > diagnosis.json
```

In Python, `fedspan.diagnose("runs/first")` returns the measures by layer and by pair of clients. Every method and every
engine on one machine is supported. Runs of a deployment are not, because their data are on the nodes. The command
prints how long it took; the run itself is not slowed down.

To measure during a run, set `evaluation.diagnostics: 5` for every fifth round. `metrics.jsonl` then contains the
measures of every layer and the alignment of all layers as one vector, and `fedspan report` plots them by round. The
trained model does not change. The run reports the time that the measures took.

A client's update is the change of a layer's full weight in the round, whether the method trains the base, factors or
projected gradients. Updates are measured before compression, clipping and noise. Means are weighted by the clients'
weights. The tables show the mean, minimum and maximum over the target layers, and the layer with the worst value.

| measure | interpretation | source |
|---|---|---|
"""
REST = """
The aggregation error of other methods is the cost of averaging factors instead of products. Fewer local steps or a
lower learning rate reduce the client drift.

For some pairs of clients (`--pairs`, default 3), the command also measures the loss on held-out examples at five points
of the straight line between the two models, heads included. The *barrier* is the largest excess of this loss over the
linear interpolation of the losses at the ends (Frankle et al., 2020; FedGaLore, arXiv:2602.01746, figure 3c). If it is
near 0, both models are in one basin, and their average is as good as they are. If it is high, averaging loses what the
clients learned.
"""


def page() -> str:
    """The page."""
    rows = [f"| {one.title} (`{one.key}`) | {one.reads} | {one.source} |" for one in MEASURES]
    return INTRO + "\n".join(rows) + "\n" + REST


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
