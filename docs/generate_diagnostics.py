"""Write docs/diagnostics.md: ``python docs/generate_diagnostics.py``."""

from __future__ import annotations

from pathlib import Path

from fedspan.diagnostics.measures import MEASURES

PAGE = Path(__file__).parent / "diagnostics.md"
INTRO = """# Why do clients disagree, and what does the mean lose?

`fedspan diagnose RUN` tells you: it starts from a checkpoint of a run (`--round last`, `best`, or a number), runs one
more round, compares the clients' updates with each other and with the server's result, and discards the round:

```bash
fedspan diagnose runs/first
fedspan diagnose runs/first --round best --pairs 6 --examples 1000 --json > diagnosis.json
```

In Python, `fedspan.diagnose("runs/first")` returns the measures by layer and by pair of clients. It works with every
method on one machine, and not for deployments, whose data are on the nodes. To measure while you train, set
`evaluation.diagnostics: 5` for every fifth round; `fedspan report` plots the measures.

An update is the change of a layer's full weight in the round, before compression, clipping and noise. The tables show
the mean, minimum and maximum over the target layers, and the layer with the worst value.

| measure | interpretation | source |
|---|---|---|
"""
REST = """
If your aggregation error is large, an exact method may gain. If the client drift is large, try fewer local steps or a
lower learning rate.

For some pairs of clients (`--pairs`, default 3), the command also measures the loss on the straight line between the
two models. The *barrier* is the largest excess of this loss over the linear interpolation of the ends (Frankle et al.,
2020; FedGaLore, arXiv:2602.01746, figure 3c). If it is high, averaging loses what the clients learned.
"""


def page() -> str:
    """The page."""
    rows = [f"| {one.title} (`{one.key}`) | {one.reads} | {one.source} |" for one in MEASURES]
    return INTRO + "\n".join(rows) + "\n" + REST


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
