"""The hypotheses that ``reasons.py`` tests: possible reasons why a run at the small scale contradicts a paper."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Row:
    """One row of a comparison.

    Args:
        name: Name on the page.
        label: Label of the preset's row.
        changes: Changes to that row's config, each ``section.field=value``; ``{data}`` is the folder with data sets.
        key: Registry key of the method that runs with that row's config, if it is another one than the row's.
    """

    name: str
    label: str
    changes: tuple[str, ...]
    key: str | None = None

    def list_changes(self, data: str) -> list[str]:
        """Return the changes with the name of a folder with data sets filled in."""
        return [change.replace("{data}", data) for change in self.changes]


@dataclass(frozen=True)
class Hypothesis:
    """One possible reason for a contradiction.

    Args:
        preset: The preset whose statement is contradicted.
        cell: Cell of its small scale.
        reason: The suspected reason, in Markdown.
        statement: The claim that is judged: the first row is better than each of the others.
        rows: The rows that are compared.
        partitions: Whether each seed draws its own partition, too; else all seeds have the first one's.
    """

    preset: str
    cell: str
    reason: str
    statement: str
    rows: tuple[Row, ...]
    partitions: bool = False


def _set_rate(lr: float, *changes: str) -> tuple[str, ...]:
    """Return the changes that set a row's learning rate, with further changes."""
    return (f"training.lr={lr}", *changes)


MORE = "federation.rounds={}".format
GRADIENT = "method.adaptive_refreshes=1000"
EACH_ROUND = ("method.adaptive_in=round", "method.steps=12", "method.period=6")
EVERYWHERE = (
    "model.layers_to_transform=null",
    "model.target_modules=[query,key,value,dense]",
    "method.r=32",
    "method.lora_alpha=64",
)
TWO_STEPS = ("training.batch_size=32", "training.local_epochs=2")
RESNET_10 = (
    "model.name=builtin:resnet-10",
    r"model.target_modules=layer([234]\.\d\.conv[12]|[34]\.0\.downsample\.0)",
    "method.r=128",
)
PACS = (
    *RESNET_10,
    "data.dataset=pacs",
    "data.train={data}/pacs/{domain}.tar",
    "data.test=null",
    "data.max_examples=4000",
    "partition.test=0.2",
    "model.image_size=24",
    "training.batch_size=32",
    "training.local_epochs=5",
    "training.cycle_rounds=20",
    "evaluation.every=20",
    MORE(60),
)

HYPOTHESES: dict[str, Hypothesis] = {
    "rolora-clients": Hypothesis(
        "rolora-table1",
        "sst-2-20-clients-rank-4",
        "RoLoRA is below LoRA with ten clients after nine rounds, four of which train its other factor. With as many "
        "rounds as with three clients:",
        "With ten clients RoLoRA is above LoRA after 30 rounds",
        (
            Row("RoLoRA, 30 rounds", "RoLoRA", _set_rate(0.004, MORE(30))),
            Row("LoRA, 30 rounds", "LoRA", _set_rate(0.004, MORE(30))),
        ),
    ),
    "rolora-exact": Hypothesis(
        "rolora-table1",
        "sst-2-20-clients-rank-4",
        "RoLoRA is meant to avoid the error of LoRA, which averages factors where products should be averaged. "
        "FedEx-LoRA averages the same products exactly:",
        "With ten clients exact averages of the products outperform averages of the factors",
        (
            Row("FedEx-LoRA", "LoRA", _set_rate(0.004), "fedex-lora"),
            Row("LoRA", "LoRA", _set_rate(0.004)),
        ),
    ),
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
    ),
    "rolora-enough": Hypothesis(
        "rolora-figure4",
        "sst-2-p3",
        "The budget may be too small. With eight times the rank, on all linear layers, for the page's 20 rounds; "
        "learning rates are lower, and several are shown for each method:",
        "With rank 32 on every linear layer FFA-LoRA at its better rate outperforms the others",
        (
            Row("FFA-LoRA at 0.001", "FFA-LoRA", _set_rate(0.001, *EVERYWHERE)),
            Row("RoLoRA at 0.002", "RoLoRA", _set_rate(0.002, *EVERYWHERE)),
            Row("RoLoRA at 0.001", "RoLoRA", _set_rate(0.001, *EVERYWHERE)),
            Row("FFA-LoRA at 0.002", "FFA-LoRA", _set_rate(0.002, *EVERYWHERE)),
            Row("RoLoRA at 0.0005", "RoLoRA", _set_rate(0.0005, *EVERYWHERE)),
        ),
    ),
    "rolora-77-classes": Hypothesis(
        "rolora-figure6",
        "banking77-p3",
        "RoLoRA is far below FFA-LoRA on 77 classes with the largest budget. With three times as many rounds, at the "
        "page's rate and at a quarter of it:",
        "After 60 rounds RoLoRA at a quarter of its rate outperforms FFA-LoRA, and itself at the page's rate",
        (
            Row("RoLoRA at a quarter of the rate", "RoLoRA", _set_rate(0.004, MORE(60))),
            Row("FFA-LoRA", "FFA-LoRA", _set_rate(0.016, MORE(60))),
            Row("RoLoRA at the page's rate", "RoLoRA", _set_rate(0.016, MORE(60))),
        ),
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
    ),
    "fedgalore-projectors": Hypothesis(
        "fedgalore-table3",
        "non-iid-sst",
        "FedGaLore is below FedIT on non-IID data. After its first refreshes, its projectors are random. With "
        "projectors from the gradient in all rounds, or from the gradient again at the start of every round, and "
        "FedGaLore at four times the page's rate:",
        "With projectors from the gradient in all rounds FedGaLore outperforms the others",
        (
            Row("FedGaLore, gradient in all rounds", "FedGaLore", _set_rate(0.016, GRADIENT)),
            Row("FedGaLore", "FedGaLore", _set_rate(0.016)),
            Row("FedGaLore, gradient first in every round", "FedGaLore", _set_rate(0.016, *EACH_ROUND)),
            Row("FedIT", "FedIT", _set_rate(0.004)),
        ),
    ),
    "fedgalore-domains": Hypothesis(
        "fedgalore-table11",
        "non-iid-reviews",
        "The same with a domain of reviews for each client:",
        "With projectors from the gradient in all rounds FedGaLore outperforms the others, by domain",
        (
            Row("FedGaLore, gradient in all rounds", "FedGaLore", _set_rate(0.004, GRADIENT)),
            Row("FedGaLore", "FedGaLore", _set_rate(0.004)),
            Row("FedIT", "FedIT", _set_rate(0.016)),
        ),
    ),
    "florg-exact": Hypothesis(
        "florg-table1",
        "sst-2-minilm",
        "FLoRG is meant to avoid the error of FedIT, which averages factors where products should be averaged. "
        "FedEx-LoRA averages the same products exactly:",
        "Exact averages of the products outperform averages of the factors",
        (
            Row("FedEx-LoRA", "FedIT", _set_rate(0.001), "fedex-lora"),
            Row("FedIT", "FedIT", _set_rate(0.001)),
        ),
    ),
    "fedloru-steps": Hypothesis(
        "fedloru-table7",
        "100",
        "The paper's FedAvg loses 15 points from 20 to 100 clients, the page's hardly any. At the paper's scale all "
        "numbers of clients have the same local epochs and batches, so that a client with fewer images takes fewer "
        "steps; the page has more epochs and smaller batches with 100 clients. Here 100 clients have the epochs and "
        "batches of 20. The learning rate is 0.3, on the first seed's test set better than 0.1 for both rows:",
        "With 100 clients that take two steps a round FedLoRU outperforms FedAvg",
        (
            Row("FedLoRU, two steps", "FedLoRU", _set_rate(0.3, *TWO_STEPS)),
            Row("FedAvg, two steps", "FedAvg", _set_rate(0.3, *TWO_STEPS)),
        ),
    ),
    "fedloru-rounds": Hypothesis(
        "fedloru-table7",
        "100",
        "FedLoRU is below FedAvg with 100 clients, after 20 rounds with two accumulations; at the paper's scale "
        "there are 300 rounds and six. With six accumulations in 60 rounds:",
        "With 100 clients FedLoRU outperforms FedAvg after 60 rounds",
        (
            Row("FedLoRU, 60 rounds", "FedLoRU", _set_rate(0.1, MORE(60))),
            Row("FedAvg, 60 rounds", "FedAvg", _set_rate(0.1, MORE(60))),
        ),
    ),
    "fedloru-clients": Hypothesis(
        "fedloru-table7",
        "200",
        "On the page FedLoRU is closer to FedAvg with 200 clients than with 100, but all seeds share one partition. "
        "With a partition of its own for each seed:",
        "With 200 clients FedLoRU outperforms the others on other partitions",
        (
            Row("FedLoRU", "FedLoRU", _set_rate(0.1)),
            Row("FedAvg", "FedAvg", _set_rate(0.3)),
            Row("FedLoRA", "FedLoRA", _set_rate(0.1)),
        ),
        partitions=True,
    ),
    "fedloru-model": Hypothesis(
        "fedloru-table7",
        "100",
        "The page's ResNet-8 has a sixtieth of the parameters of a ResNet-10, the smaller of the paper's two, and "
        "adapters of rank 16. In a ResNet-10 at the paper's highest rank, 128, where the product is multiplied by 1/2 "
        "as in the published code, with a partition of its own for each of two seeds (FedAvg's third run was out of "
        "memory). The rate is the page's; on the first seed FedAvg was ahead at 0.03 (82.3 against 77.8 %) and 0.3 "
        "(81.7 against 80.4 %), too, by `--seeds 0 --set training.lr=0.03` and 0.3:",
        "With 100 clients FedLoRU outperforms FedAvg in a ResNet-10 (two seeds)",
        (
            Row("FedLoRU, ResNet-10", "FedLoRU", _set_rate(0.1, *RESNET_10)),
            Row("FedAvg, ResNet-10", "FedAvg", _set_rate(0.1, *RESNET_10)),
        ),
        partitions=True,
    ),
    "fedloru-pacs": Hypothesis(
        "fedloru-table7",
        "100",
        "The paper's CIFAR-100 is harder than Fashion-MNIST. On photographs, paintings, cartoons and sketches of seven "
        "kinds of things (PACS), about 29 training images a client, in the same ResNet-10 for 60 rounds. FedAvg was "
        "ahead at 0.03 (49.6 against 45.2 %) and 0.3 (51.5 against 47.6 %), too, by `--seeds 0 --set "
        "training.lr=0.03` and 0.3. One seed is finished for both:",
        "With 100 clients FedLoRU outperforms FedAvg on PACS (one seed)",
        (
            Row("FedLoRU on PACS", "FedLoRU", _set_rate(0.1, *PACS, "method.tau=20")),
            Row("FedAvg on PACS", "FedAvg", _set_rate(0.1, *PACS)),
        ),
        partitions=True,
    ),
}
