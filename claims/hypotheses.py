"""The hypotheses that ``reasons.py`` tests: possible reasons why a run at the small scale contradicts a paper."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Row:
    """One row of a comparison.

    Args:
        name: Name on the page.
        label: Label of the preset's row.
        changes: Changes to that row's config, each ``section.field=value``.
    """

    name: str
    label: str
    changes: tuple[str, ...]


@dataclass(frozen=True)
class Hypothesis:
    """One possible reason for a contradiction.

    Args:
        preset: The preset whose statement is contradicted.
        cell: Cell of its small scale.
        reason: The suspected reason, in Markdown.
        statement: The claim that is judged: the first row is better than each of the others.
        rows: The rows that are compared.
        result: The result in words; the table has the numbers.
        measure: Quantity that is compared (``statements.Claim``).
    """

    preset: str
    cell: str
    reason: str
    statement: str
    rows: tuple[Row, ...]
    result: str
    measure: str = "score"


def _set_rate(lr: float, *changes: str) -> tuple[str, ...]:
    """Return the changes that set a row's learning rate, with further changes."""
    return (f"training.lr={lr}", *changes)


MORE = "federation.rounds={}".format
GRADIENT = "method.adaptive_refreshes=1000"
AT_ONCE = "training.cycle_rounds=null"
EACH_ROUND = ("method.adaptive_in=round", "method.steps=12", "method.period=6")
EVERYWHERE = (
    "model.layers_to_transform=null",
    "model.target_modules=[query,key,value,dense]",
    "method.r=32",
    "method.lora_alpha=64",
)

HYPOTHESES: dict[str, Hypothesis] = {
    "rolora-budgets": Hypothesis(
        "rolora-figure4",
        "sst-2-p3",
        "In the paper FFA-LoRA is level with RoLoRA if it has enough parameters; here it stays below it after 20 "
        "rounds. With three times as many rounds:",
        "With enough parameters RoLoRA is still above FFA-LoRA after 60 rounds",
        (
            Row("RoLoRA, 60 rounds", "RoLoRA", _set_rate(0.004, MORE(60))),
            Row("FFA-LoRA, 60 rounds", "FFA-LoRA", _set_rate(0.016, MORE(60))),
        ),
        "Both gain equally: too few rounds are not the reason.",
    ),
    "rolora-enough": Hypothesis(
        "rolora-figure4",
        "sst-2-p3",
        "The budget may be too small. With eight times the rank, on all linear layers, for the page's 20 rounds; "
        "learning rates are lower, and several are shown for each method:",
        "With rank 32 on every linear layer FFA-LoRA at its better rate is above the others",
        (
            Row("FFA-LoRA at 0.001", "FFA-LoRA", _set_rate(0.001, *EVERYWHERE)),
            Row("RoLoRA at 0.002", "RoLoRA", _set_rate(0.002, *EVERYWHERE)),
            Row("RoLoRA at 0.001", "RoLoRA", _set_rate(0.001, *EVERYWHERE)),
            Row("FFA-LoRA at 0.002", "FFA-LoRA", _set_rate(0.002, *EVERYWHERE)),
            Row("RoLoRA at 0.0005", "RoLoRA", _set_rate(0.0005, *EVERYWHERE)),
        ),
        "It is: the page's largest budget is too small. With this one the two are within a point of each other, each "
        "at its best rate.",
    ),
    "rolora-77-classes": Hypothesis(
        "rolora-figure6",
        "banking77-p3",
        "RoLoRA is far below FFA-LoRA on 77 classes with the largest budget. With three times as many rounds, at the "
        "page's rate and at a quarter of it:",
        "After 60 rounds RoLoRA at a quarter of its rate is above FFA-LoRA, and above itself at the page's rate",
        (
            Row("RoLoRA at a quarter of the rate", "RoLoRA", _set_rate(0.004, MORE(60))),
            Row("FFA-LoRA", "FFA-LoRA", _set_rate(0.016, MORE(60))),
            Row("RoLoRA at the page's rate", "RoLoRA", _set_rate(0.016, MORE(60))),
        ),
        "The rate that is best for 20 rounds is too high for longer training of RoLoRA, and 20 rounds are few for 77 "
        "classes with a frozen random head.",
    ),
    "rolora-instructions": Hypothesis(
        "rolora-table12",
        "alpaca",
        "RoLoRA's loss is above LoRA's after 20 rounds, in which each of its factors trains in ten. With twice as "
        "many rounds, which transmit as many bytes as LoRA's 20:",
        "RoLoRA's loss after 40 rounds is below LoRA's",
        (
            Row("RoLoRA, 40 rounds", "RoLoRA", _set_rate(0.016, MORE(40))),
            Row("LoRA, 20 rounds", "LoRA", _set_rate(0.016)),
            Row("LoRA, 40 rounds", "LoRA", _set_rate(0.016, MORE(40))),
        ),
        "Each factor trains in half of the rounds: with as many bytes RoLoRA is ahead, with as many rounds LoRA is.",
    ),
    "rolora-questions": Hypothesis(
        "rolora-table10",
        "boolq",
        "RoLoRA's loss at rank 2 is above LoRA's, too, after ten rounds, five for each factor. With twice as many "
        "rounds:",
        "At rank 2 RoLoRA's loss after 20 rounds is below LoRA's",
        (
            Row("RoLoRA, 20 rounds", "RoLoRA", _set_rate(0.016, MORE(20))),
            Row("LoRA, 10 rounds", "LoRA", _set_rate(0.016)),
            Row("LoRA, 20 rounds", "LoRA", _set_rate(0.016, MORE(20))),
        ),
        "The two are level with as many bytes; with as many rounds LoRA's lead is within two standard errors.",
    ),
    "florg-rounds": Hypothesis(
        "florg-table2",
        "sst-2-r-8",
        "FLoRG is below FedIT after ten rounds. With three times as many rounds:",
        "FLoRG is above FedIT after 30 rounds",
        (
            Row("FLoRG, 30 rounds", "FLoRG", _set_rate(0.016, MORE(30))),
            Row("FedIT, 30 rounds", "FedIT", _set_rate(0.004, MORE(30))),
        ),
        "Ten rounds were too few: after 30 the two are level.",
    ),
    "florg-heterogeneity": Hypothesis(
        "florg-table3",
        "sst-2-rho-0.1",
        "FLoRG is further below FeDeRA the more the clients differ. With the most heterogeneous clients and three "
        "times as many rounds:",
        "With Dirichlet 0.1 FLoRG is above FeDeRA after 30 rounds",
        (
            Row("FLoRG, 30 rounds", "FLoRG", _set_rate(0.016, MORE(30))),
            Row("FeDeRA, 30 rounds", "FeDeRA", _set_rate(0.004, MORE(30))),
        ),
        "Too few rounds are most of the reason: FLoRG gains much in the other 20, FeDeRA nothing, and the difference "
        "between the two is no longer significant.",
    ),
    "florg-drift": Hypothesis(
        "florg-procrustes",
        "sst-2",
        "The statement is not contradicted, but the page's rows differ in the learning rate, on which the drift of A "
        "depends. With both at FLoRG's rate:",
        "At one rate alignment keeps the drift of A from round to round small",
        (
            Row("FLoRG", "FLoRG", _set_rate(0.004)),
            Row("without alignment", "without alignment", _set_rate(0.004)),
        ),
        "On average, A moves less with alignment, but without it the seeds differ too much for a verdict: the page's "
        "verdict is partly due to the rates.",
        measure="state_step",
    ),
    "fedgalore-projectors": Hypothesis(
        "fedgalore-table3",
        "non-iid-sst",
        "FedGaLore is below FedIT on non-IID data. After its first refreshes, its projectors are random. With "
        "projectors from the gradient in all rounds, or from the gradient again at the start of every round, and "
        "FedGaLore at four times the page's rate:",
        "With projectors from the gradient in all rounds FedGaLore is above the others",
        (
            Row("FedGaLore, gradient in all rounds", "FedGaLore", _set_rate(0.016, GRADIENT)),
            Row("FedGaLore", "FedGaLore", _set_rate(0.016)),
            Row("FedGaLore, gradient first in every round", "FedGaLore", _set_rate(0.016, *EACH_ROUND)),
            Row("FedIT", "FedIT", _set_rate(0.004)),
        ),
        "The gain from the gradient's projectors is within the seeds' spread, and FedIT stays ahead: random "
        "projectors are not the reason, or not the only one.",
    ),
    "fedgalore-domains": Hypothesis(
        "fedgalore-table11",
        "non-iid-reviews",
        "The same with a domain of reviews for each client:",
        "With projectors from the gradient in all rounds FedGaLore is above the others, by domain",
        (
            Row("FedGaLore, gradient in all rounds", "FedGaLore", _set_rate(0.004, GRADIENT)),
            Row("FedGaLore", "FedGaLore", _set_rate(0.004)),
            Row("FedIT", "FedIT", _set_rate(0.016)),
        ),
        "By domain, these projectors bring it level with FedIT.",
    ),
    "pfedloru-rate": Hypothesis(
        "fedloru-table4",
        "psi-0.5",
        "The rate of pFedLoRU was selected on one seed, and the others are unstable with it. At a third of it:",
        "At a lower rate pFedLoRU is above both variants of pFedLoRA",
        (
            Row("pFedLoRU at a third of the rate", "pFedLoRU", _set_rate(0.1)),
            Row("pFedLoRA(1)", "pFedLoRA(1)", _set_rate(0.1)),
            Row("pFedLoRA(2)", "pFedLoRA(2)", _set_rate(0.3)),
        ),
        "The seeds then agree, well below both: the rate is not the reason, or not the only one. Both variants of "
        "pFedLoRA train and share whole weights.",
    ),
    "fedloru-rounds": Hypothesis(
        "fedloru-table1",
        "fashion-mnist-iid-20-clients-rank-128",
        "FedLoRU is below FedLoRA after 20 rounds. With four times as many rounds under one cosine, and cycles of "
        "twenty:",
        "FedLoRU with cycles of 20 rounds is above FedLoRA after 80",
        (
            Row("FedLoRU, cycles of 20", "FedLoRU", _set_rate(0.3, MORE(80), AT_ONCE, "method.tau=20")),
            Row("FedLoRA", "FedLoRA", _set_rate(0.3, MORE(80), AT_ONCE)),
        ),
        "FedLoRU gains more in the other 60 rounds, and stays below: too few rounds are a large part of the reason.",
    ),
}
