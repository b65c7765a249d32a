"""How good a first config is: federated training with `fedspan init`'s untouched config beside centralized training.

    python -m evidence.pages.defaults --data PATH/data --models PATH/models --page docs/results/defaults.md

For every data set, partition and seed, the script writes a subset of the data as a user would have it (a csv file, or a
folder of images by class), lets ``fedspan init`` write the config, and runs it. Only what belongs to the experiment is
set: the seed, the partition, and the baselines. A subset is drawn by its seed; train and test rows come from the set's
own train and test parts.

Finished cells are not run again, so the script can be stopped at any moment; cells run seed by seed, so that an
unfinished table covers all sets. ``--only`` names sets, ``--leave-one-out`` chooses settings on all other sets and
tests them on the left-out one. ``--unclipped`` runs again without clipping what had a clipped reply, and shows what
clipping changed. ``--page`` writes the tables.
"""

import argparse
import csv
import gzip
import io
import json
import multiprocessing
import platform
import random
import struct
import tarfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import mean
from typing import Any

SEEDS = (0, 1, 2)
PARTITIONS = {"IID": (), "Dirichlet 0.3": ("partition.partitioner=dirichlet", "partition.alpha=0.3")}
GOAL = 0.97
"""Share of centralized training's accuracy that the goal requires."""
WORDS = 40
"""Length of the longest product reviews that are used: training on long texts takes long."""
DOMAINS = ("airline", "books", "dvd", "electronics", "kitchen")
UNCLIPPED = "replies not clipped"
SETTINGS: dict[str, tuple[str, ...]] = {
    "as init writes it": (),
    "rate x 1/4": ("training.lr=/4",),
    "rate x 4": ("training.lr=*4",),
}
"""The settings that ``--leave-one-out`` chooses from, as changes of init's config."""

Rows = list[tuple[str, ...]]
Images = list[tuple[str, bytes]]


@dataclass(frozen=True)
class TextSet:
    """A data set of texts.

    Args:
        columns: Column names of the csv files.
        read: Reads the part ``train`` or ``test`` from the folder of all data sets.
        train: Number of training rows; None: all.
        test: Number of test rows, at most.
        split: Whether the set has a test part of its own; False: ``read`` returns all rows, which are then split.
    """

    columns: tuple[str, ...]
    read: Callable[[Path, str], Rows]
    train: int | None = 800
    test: int = 400
    split: bool = True


@dataclass(frozen=True)
class ImageSet:
    """A data set of images; arguments as for ``TextSet``, and the settings that its files need.

    Args:
        read: Reads ``(class, file content)`` of a part.
        train: Number of training images.
        test: Number of test images, at most.
        split: As for ``TextSet``.
        size: Number of rows and columns that images are resized to.
    """

    read: Callable[[Path, str], Images]
    train: int = 400
    test: int = 300
    split: bool = True
    size: int = 64


def tsv(path: Path) -> list[list[str]]:
    """The rows of a file with tabs, without its header."""
    return [line.rstrip("\n").split("\t") for line in path.read_text(encoding="utf-8").splitlines()][1:]


def banking77(labels: int | None) -> Callable[[Path, str], Rows]:
    """Banking77 with its first labels by name, or all."""

    def read(data: Path, part: str) -> Rows:
        with (data / "banking77" / f"{part}.csv").open(newline="", encoding="utf-8") as file:
            rows = [(row["text"], row["category"]) for row in csv.DictReader(file)]
        first = set(sorted({label for _, label in rows})[:labels])
        return [row for row in rows if row[1] in first]

    return read


def sst2(data: Path, part: str) -> Rows:
    """SST-2; its development set is the test part, as the labels of the test set are secret."""
    names = ("negative", "positive")
    rows = tsv(data / "glue" / "SST-2" / f"{'train' if part == 'train' else 'dev'}.tsv")
    return [(text.strip(), names[int(label)]) for text, label in rows]


def reviews(data: Path, part: str) -> Iterator[tuple[str, str, str]]:
    """Text, sentiment and domain of the product reviews of at most ``WORDS`` words."""
    for domain in DOMAINS:
        name = "train" if part == "train" else "dev"
        with (data / "blitzer_sentiment" / domain / f"{name}.tsv").open(newline="", encoding="utf-8") as file:
            for row in csv.DictReader(file, delimiter="\t"):
                if len(row["sentence"].split()) <= WORDS:
                    yield row["sentence"], row["label"], domain


def sentiments(data: Path, part: str) -> Rows:
    """Product reviews with their sentiment."""
    return [(text, sentiment) for text, sentiment, _ in reviews(data, part)]


def domains(data: Path, part: str) -> Rows:
    """Product reviews with their domain."""
    return [(text, domain) for text, _, domain in reviews(data, part)]


def fashion_mnist(data: Path, part: str) -> Images:
    """Fashion-MNIST as PNG files."""
    from PIL import Image

    stem, names = (
        "train" if part == "train" else "t10k",
        "top trouser pullover dress coat sandal shirt sneaker bag boot",
    )
    folder = data / "fashion-mnist"
    with gzip.open(folder / f"{stem}-images-idx3-ubyte.gz") as file:
        count, rows, columns = struct.unpack(">4xIII", file.read(16))
        pixels = file.read()
    with gzip.open(folder / f"{stem}-labels-idx1-ubyte.gz") as file:
        labels = file.read()[8:]
    images: Images = []
    for index in range(min(count, 12_000)):  # enough to draw a subset from
        content = io.BytesIO()
        Image.frombytes("L", (columns, rows), pixels[index * rows * columns : (index + 1) * rows * columns]).save(
            content, "PNG"
        )
        images.append((names.split()[labels[index]], content.getvalue()))
    return images


def pacs(data: Path, part: str) -> Images:
    """PACS: photographs, paintings, cartoons and sketches."""
    images: Images = []
    for path in sorted((data / "pacs").glob("*.tar")):
        with tarfile.open(path) as tar:
            for client_data in tar.getmembers():
                file = tar.extractfile(client_data)
                if file is not None:
                    images.append((client_data.name.split("/")[-2], file.read()))
    return images


SETS: dict[str, TextSet | ImageSet] = {
    "Banking77": TextSet(("text", "category"), banking77(None), train=1200, test=1000),
    "Banking77, 20 classes": TextSet(("text", "category"), banking77(20), train=None, test=800),
    "SST-2": TextSet(("sentence", "label"), sst2),
    "reviews, sentiment": TextSet(("review", "sentiment"), sentiments, train=400),
    "reviews, domain": TextSet(("review", "topic"), domains, train=None),
    "PACS": ImageSet(pacs, split=False),
    "Fashion-MNIST": ImageSet(fashion_mnist),
}


@dataclass(frozen=True)
class Cell:
    """One run.

    Args:
        name: Name of the data set.
        partition: Name of the partition.
        seed: Seed of subset and run.
        setting: Name of the setting, one of ``SETTINGS`` or ``UNCLIPPED``.
    """

    name: str
    partition: str
    seed: int
    setting: str = next(iter(SETTINGS))

    @property
    def changes(self) -> tuple[str, ...]:
        """The setting's changes of init's config."""
        return SETTINGS.get(self.setting, ("federation.clip_ratio=null",))

    @property
    def stem(self) -> str:
        """Name of the cell's files."""
        parts = (self.name, self.partition, f"seed {self.seed}", *([self.setting] if self.changes else []))
        return "-".join("".join(c if c.isalnum() else "_" for c in part).lower() for part in parts)


def write_rows(path: Path, columns: Sequence[str], rows: Rows) -> None:
    """Write a csv file."""
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(columns)
        writer.writerows(rows)


def draw(kind: TextSet | ImageSet, data: Path, rng: random.Random) -> tuple[list[Any], list[Any]]:
    """Draw the training and the test examples of a subset."""
    if kind.split:
        parts = kind.read(data, "train"), kind.read(data, "test")
        sizes = min(kind.train or len(parts[0]), len(parts[0])), min(kind.test, len(parts[1]))
        return rng.sample(parts[0], sizes[0]), rng.sample(parts[1], sizes[1])
    drawn = rng.sample(kind.read(data, "all"), kind.train + kind.test)
    return drawn[: kind.train], drawn[kind.train :]


def write_data(cell: Cell, args: argparse.Namespace) -> tuple[Path, Path]:
    """Write a cell's subset; return the paths of its train and test parts."""
    kind = SETS[cell.name]
    folder = args.out / "data" / f"{''.join(c if c.isalnum() else '_' for c in cell.name).lower()}-{cell.seed}"
    ending = ".csv" if isinstance(kind, TextSet) else ""
    paths, marker = (folder / f"train{ending}", folder / f"test{ending}"), folder / "done"
    if marker.exists():
        return paths
    folder.mkdir(parents=True, exist_ok=True)
    drawn = draw(kind, args.data, random.Random(f"{cell.name} {cell.seed}"))
    for path, examples in zip(paths, drawn, strict=True):
        if isinstance(kind, TextSet):
            write_rows(path, kind.columns, examples)
            continue
        for number, (label, content) in enumerate(examples):
            (path / label).mkdir(parents=True, exist_ok=True)
            (path / label / f"{number:05}.{'png' if content[1:4] == b'PNG' else 'jpg'}").write_bytes(content)
    marker.touch()
    return paths


def config_of(cell: Cell, args: argparse.Namespace) -> Any:
    """Let init write the cell's config, and set what belongs to the experiment."""
    from fedspan.config import load_config
    from fedspan.config.starter import write_starter_config

    kind = SETS[cell.name]
    train, test = write_data(cell, args)
    path = args.out / "configs" / f"{cell.stem}.yaml"
    path.parent.mkdir(parents=True, exist_ok=True)
    model = None if isinstance(kind, TextSet) else str(args.models / "mobilenet_v2")
    write_starter_config(train, path, test=test, force=True, model=model)
    changes = [f"seed={cell.seed}", "threads=1", *PARTITIONS[cell.partition]]
    if isinstance(kind, ImageSet):
        changes.append(f"model.image_size={kind.size}")
    first = load_config(path, changes)
    for change in cell.changes:
        field, _, value = change.partition("=")
        if value[0] in "*/":
            factor = float(value[1:]) if value[0] == "*" else 1 / float(value[1:])
            value = repr(first.build_training_settings().optimizer.lr * factor)
        changes.append(f"{field}={value}")
    if not cell.changes:
        changes.append("baselines=[centralized]")
    return load_config(path, changes)


def run_cell(work: tuple[Cell, argparse.Namespace]) -> tuple[Cell, float]:
    """Run a cell, or continue it."""
    import fedspan

    cell, args = work
    began = time.monotonic()
    fedspan.run(config_of(cell, args), folder_of(cell, args), resume=True)
    return cell, time.monotonic() - began


def folder_of(cell: Cell, args: argparse.Namespace) -> Path:
    """The folder of a cell's run."""
    return args.out / "runs" / cell.stem


def is_finished(cell: Cell, args: argparse.Namespace) -> bool:
    """Whether a cell has a report."""
    return (folder_of(cell, args) / "report.json").is_file()


def run_cells(cells: Sequence[Cell], args: argparse.Namespace) -> None:
    """Run the cells that are not finished, in ``args.workers`` processes of one thread."""
    missing = [cell for cell in cells if not is_finished(cell, args)]
    with multiprocessing.get_context("spawn").Pool(args.workers) as pool:
        for number, (cell, seconds) in enumerate(pool.imap(run_cell, [(cell, args) for cell in missing]), 1):
            print(f"{number}/{len(missing)} {cell.stem} {seconds:.0f} s", flush=True)


@dataclass(frozen=True)
class Result:
    """What a cell's run reports; accuracies are on the test part.

    Args:
        start: Accuracy before the first round.
        federated: Accuracy of the exported round.
        centralized: Accuracy of centralized training; NaN for a cell without it.
        validation: Accuracy of the exported round on the validation parts.
        rounds: Number of rounds that were run.
        seconds: Seconds of the rounds.
    """

    start: float
    federated: float
    centralized: float
    validation: float
    rounds: int
    seconds: float


def result_of(cell: Cell, args: argparse.Namespace) -> Result:
    """Read a finished cell."""
    report = json.loads((folder_of(cell, args) / "report.json").read_text())
    centralized = report["baselines"].get("centralized")
    return Result(
        start=report["start"]["test"]["accuracy"],
        federated=report["scores"]["test"]["accuracy"],
        centralized=float("nan") if centralized is None else centralized["scores"]["test"]["accuracy"],
        validation=report["scores"]["validation"]["accuracy"],
        rounds=report["rounds"],
        seconds=report["seconds"],
    )


def is_reached(start: float, federated: float, centralized: float) -> bool:
    """Whether mean accuracies reach the goal."""
    # A tolerance for sums of floats, far below the accuracy of one example.
    return federated >= GOAL * centralized and federated >= start - 1e-9


def default_table(args: argparse.Namespace) -> str:
    """The table of the goal: means over the finished seeds."""
    lines = [
        "| data | partition | seeds | start | federated | centralized | federated / centralized % "
        "| rounds | seconds | goal |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for name in args.only:
        for partition in PARTITIONS:
            finished = [cell for seed in args.seeds if is_finished(cell := Cell(name, partition, seed), args)]
            if not finished:
                continue
            results = [result_of(cell, args) for cell in finished]
            start, federated, centralized = (
                mean(getattr(one, field) for one in results) for field in ("start", "federated", "centralized")
            )
            reached = is_reached(start, federated, centralized)
            cells = [
                name,
                partition,
                str(len(finished)),
                *(f"{100 * value:.1f}" for value in (start, federated, centralized)),
                f"{100 * federated / centralized:.1f}",
                ", ".join(str(one.rounds) for one in results),
                f"{mean(one.seconds for one in results):.0f}",
                "reached" if reached else "missed",
            ]
            lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def verdict(table: str, seeds: int) -> str:
    """Say how many rows of ``default_table`` reach the goal, and how many do not have all seeds yet."""
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in table.splitlines()[2:]]
    reached, short = sum(row[-1] == "reached" for row in rows), sum(int(row[2]) < seeds for row in rows)
    text = f"**{reached} of {len(rows)} rows reach the goal.**"
    return f"{text} {short} of the rows have fewer than {seeds} seeds." if short else text


def left_out_table(args: argparse.Namespace) -> str:
    """For every set: the setting that is best on all others by validation, and its test accuracy on this one."""
    partition, seed = "Dirichlet 0.3", args.seeds[0]

    def result(name: str, setting: str) -> Result:
        return result_of(Cell(name, partition, seed, setting), args)

    lines = [
        "| left-out set | chosen on the others | its test accuracy here | as init writes it | best setting here |",
        "|---|---|---|---|---|",
    ]
    best = {name: max(result(name, setting).validation for setting in SETTINGS) for name in args.only}
    for name in args.only:
        others = [other for other in args.only if other != name]

        def share(setting: str, others: list[str] = others) -> float:
            return mean(result(other, setting).validation / best[other] for other in others)

        chosen = max(SETTINGS, key=share)
        own_setting = max(SETTINGS, key=lambda setting: result(name, setting).federated)
        default = next(iter(SETTINGS))
        cells = [
            name,
            chosen,
            *(f"{100 * result(name, setting).federated:.1f}" for setting in (chosen, default)),
            f"{100 * result(name, own_setting).federated:.1f} ({own_setting})",
        ]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def count_clipped_rounds(cell: Cell, args: argparse.Namespace) -> int:
    """Count the rounds of a finished cell in which a reply was clipped."""
    rows = (folder_of(cell, args) / "metrics.jsonl").read_text().splitlines()
    return sum(bool(json.loads(row).get("clipped")) for row in rows)


def find_unclipped(cell: Cell, args: argparse.Namespace) -> Cell | None:
    """Return the finished cell with the result without clipping: a finished one itself, if it clipped nothing."""
    if is_finished(cell, args) and not count_clipped_rounds(cell, args):
        return cell
    other = replace(cell, setting=UNCLIPPED)
    return other if is_finished(other, args) else None


def run_unclipped(cells: Sequence[Cell], args: argparse.Namespace) -> None:
    """Run cells again without clipping, where it changed something."""
    for cell in cells:
        if find_unclipped(cell, args) is None:
            other = replace(cell, setting=UNCLIPPED)
            print(f"{other.stem} {run_cell((other, args))[1]:.0f} s", flush=True)


def clipping_table(args: argparse.Namespace) -> str:
    """What clipping changes in the accuracy of federations without hostile clients, paired by seed."""
    from fedspan.config.federation import FederationConfig

    clip = f"clip {FederationConfig.model_fields['clip_ratio'].default:g}"
    lines = [f"| data | partition | seeds | {UNCLIPPED} | {clip} | rounds, {clip} |", "|---|---|---|---|---|---|"]
    for name in args.only:
        for partition in PARTITIONS:
            cells = [cell for seed in args.seeds if is_finished(cell := Cell(name, partition, seed), args)]
            pairs = [(cell, other) for cell in cells if (other := find_unclipped(cell, args)) is not None]
            if not pairs:
                continue
            clipped, plain = (
                [100 * result_of(one, args).federated for one in part] for part in zip(*pairs, strict=True)
            )
            changes = [one - other for one, other in zip(clipped, plain, strict=True)]
            shown = f"{mean(changes):+.1f} ({min(changes):+.1f} to {max(changes):+.1f})"
            few = sum(count_clipped_rounds(cell, args) for cell, _ in pairs)
            rounds = f"{few} of {sum(result_of(cell, args).rounds for cell, _ in pairs)}"
            lines.append(f"| {name} | {partition} | {len(pairs)} | {mean(plain):.1f} | {shown} | {rounds} |")
    return "\n".join(lines) + "\n"


def size_table(args: argparse.Namespace) -> str:
    """The sizes of the subsets."""
    lines = ["| data | training examples | test examples |", "|---|---|---|"]
    for name in args.only:
        parts = write_data(Cell(name, next(iter(PARTITIONS)), args.seeds[0]), args)
        lines.append(f"| {name} | " + " | ".join(str(count_examples(part)) for part in parts) + " |")
    return "\n".join(lines) + "\n"


def count_examples(path: Path) -> int:
    """Count the examples of a part that ``write_data`` wrote."""
    if path.is_dir():
        return sum(1 for _ in path.glob("*/*"))
    with path.open(newline="", encoding="utf-8") as file:
        return sum(1 for _ in csv.reader(file)) - 1


ABOUT_DEFAULTS = (
    "# The defaults of `fedspan init`\n\n"
    "This page compares federated training with the config that `fedspan init` writes to centralized training with "
    f"the same config. The rows of images have {ImageSet.train} training images of {ImageSet.size} x {ImageSet.size} "
    "pixels.\n\n"
    "Accuracies are in per cent on the test part, means over the seeds. *Start* is the model before the first "
    "round, whose [head starts from statistics](../head-start.md). *Centralized* training has the same model, "
    "start, rate, batch size, early stopping and final rounds. It trains on all clients' training examples together "
    "for as many epochs as the federation may have rounds, and the same rule chooses its best epoch. *Rounds* are "
    "those until early stopping, by seed: in a run of four rounds, none lowered the validation loss. The goal is "
    f"reached if federated training has at least {GOAL:.0%} of centralized training's accuracy and no less than the "
    "start."
)
ABOUT_COSTS = (
    "All clients are honest. The column of the clip has the difference between the config as `init` writes it and the "
    "same run without clipping, in points, paired by seed: mean (smallest to largest). The last column counts the "
    "rounds of all seeds in which a reply was clipped."
)


def page(tables: str, args: argparse.Namespace) -> str:
    """The tables with the command, the machine and the date."""
    import torch

    flags = ("leave_one_out", "unclipped")
    more = [f"--{flag.replace('_', '-')}" for flag in flags if getattr(args, flag)]
    command = " ".join(["python -m evidence.pages.defaults --data PATH/data --models PATH/models", *more])
    size = next(kind.size for kind in SETS.values() if isinstance(kind, ImageSet))
    whole = ", ".join(f"*{name}*" for name, kind in SETS.items() if kind.train is None)
    return (
        f"{ABOUT_DEFAULTS}\n\n"
        f"Command: `{command}`  \n"
        f"Date: {time.strftime('%Y-%m-%d')}. Machine: {platform.machine()}, {multiprocessing.cpu_count()} cores, torch "
        f"{torch.__version__}. Seconds are those of a run's rounds on one thread, beside other work on the machine."
        f"\n\n{tables}\n"
        "## Data\n\n"
        f"The small sets ({whole}) have all their training examples. To keep the table affordable on a CPU, the others "
        "are subsets, drawn by the seed. Ten clients share the training examples; `init` sets up to a fifth of them "
        f"aside for validation until the final rounds. Product reviews have at most {WORDS} words, images are resized "
        f"to {size} x {size} pixels. Differences of about one per cent are within the noise of a seed.\n\n"
        f"{size_table(args)}"
    )


def main() -> None:
    """Run the cells, print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="folder of the data sets")
    parser.add_argument("--models", type=Path, required=True, help="folder with mobilenet_v2")
    parser.add_argument("--out", type=Path, default=Path("runs/defaults"), help="folder of the runs")
    parser.add_argument("--only", nargs="+", choices=list(SETS), default=list(SETS), metavar="SET")
    parser.add_argument("--seeds", type=int, nargs="+", default=list(SEEDS))
    parser.add_argument("--leave-one-out", action="store_true", help="the other settings, too, and their table")
    parser.add_argument("--unclipped", action="store_true", help="what clipped replies change, too")
    parser.add_argument("--no-run", action="store_true", help="only the tables of what is finished")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--page", type=Path, help="write the tables to this file")
    args = parser.parse_args()
    cells = [Cell(name, partition, seed) for seed in args.seeds for name in args.only for partition in PARTITIONS]
    other = [Cell(name, "Dirichlet 0.3", args.seeds[0], setting) for setting in SETTINGS for name in args.only]
    if not args.no_run:
        run_cells([*cells, *(other if args.leave_one_out else [])], args)
        if args.unclipped:
            run_unclipped(cells, args)
    tables = default_table(args)
    tables = f"{verdict(tables, len(args.seeds))}\n\n{tables}"
    if args.leave_one_out and all(is_finished(cell, args) for cell in other):
        partition_text = f"Dirichlet 0.3, seed {args.seeds[0]}."
        tables += (
            "\n## Settings chosen on the other sets\n\nThe settings are the config as `init` writes it, and the same "
            "with a fourth and with four times its learning rate. Every setting is compared on all sets but one, by "
            f"its validation accuracy over the best setting's, and tested on the left-out set. {partition_text}\n\n"
            f"{left_out_table(args)}"
        )
    if args.unclipped:
        tables += f"\n## Cost of clipping\n\n{ABOUT_COSTS}\n\n{clipping_table(args)}"
    print(tables)
    if args.page:
        args.page.write_text(page(tables, args), encoding="utf-8")


if __name__ == "__main__":
    main()
