"""Write docs/diagnostics.md: ``python docs/generate_diagnostics.py``."""

from __future__ import annotations

from pathlib import Path

from fedspan.diagnostics.measures import MEASURES

PAGE = Path(__file__).parent / "diagnostics.md"
INTRO = """# Diagnostics: how the clients' updates fit together

When a federation trains badly, the scores do not say why. `fedspan diagnose RUN` plays one more round from a run's
checkpoint (`--round last`, `best`, or a number), keeps nothing of it, and looks at what the clients' updates are and
at what the server made of them:

```bash
fedspan diagnose runs/first
fedspan diagnose runs/first --round best --pairs 6 --examples 1000 --json > diagnosis.json
```

In Python, `fedspan.diagnose("runs/first")` gives the same by layer and by pair of clients. It works for every method
and every engine on one machine (of a deployment's run the data are elsewhere); it is no part of a run, so a run that
nobody looks at pays nothing, and the command prints what looking cost beside the round itself.

During a run, `evaluation.diagnostics: 5` looks at every fifth round as it is played: the measures of every layer, and
the alignment of all of them as one vector, go into `metrics.jsonl`, and `fedspan report` draws the layers' by round.
The model is the same as without; what looking took is said at the end.

A client's update is the change of a layer's whole weight in the round, whatever the method trains: base, factors,
projected gradients. Updates are taken before compression, clipping and noise, and means are weighted as the clients
are. Tables show the mean over the target layers, the least, the most, and the layer at the worrying end.

| measure | how to read it | source |
|---|---|---|
"""
REST = """
Between the models of two clients (`--pairs`, 3 unless told otherwise), the loss on held-out examples is measured at
five points of the straight line, heads and all: the *barrier* is the most by which it exceeds the line between its ends
(Frankle et al., 2020; FedGaLore, arXiv:2602.01746, figure 3c). Near 0, the two models are in one basin, and their
average is as good as they are; a high barrier says that averaging them loses what they learnt.
"""


def page() -> str:
    """The whole page."""
    rows = [f"| {one.title} (`{one.key}`) | {one.reads} | {one.source} |" for one in MEASURES]
    return INTRO + "\n".join(rows) + "\n" + REST


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
