"""Text embedding across owners with different texts: federated, local-only and centralized training.

    python benchmarks/embedding.py --data PATH/glue/STS-B --out OUT
    python benchmarks/embedding.py --retrieval --data PATH/glue/QNLI --out OUT

Three owners train all-MiniLM-L6-v2. Without ``--retrieval``, each has the scored pairs of one genre of STS-B, a part of
its training set: captions, forums and news; the loss is CoSENT, and the table has Spearman's correlation of cosines and
scores for pairs of the development set, whose scores are public: of all drawn pairs, and of each genre's.

With ``--retrieval``, each has questions of one kind of QNLI with the sentences that answer them: of persons, times and
places; of amounts and ways; others. The loss is multiple negatives, and the table has recall@10 and nDCG@10 among the
answers of all held-out questions. QNLI's development set is cut in two parts for training and for holding out.

All models are measured with sentence-transformers, which loads the exported adapters.
"""

from __future__ import annotations

import argparse
import csv
import random
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

Row = dict[str, Any]
GENRES = {"main-captions": "captions", "main-forum": "forums", "main-forums": "forums", "main-news": "news"}
TRAININGS = ("federated", "centralized", "local")
PERSONS, AMOUNTS, OTHERS = "persons, times, places", "amounts, ways", "others"
KINDS = {"who": PERSONS, "whose": PERSONS, "when": PERSONS, "where": PERSONS, "how": AMOUNTS}
"""The kinds of questions by their first word."""
NUMBERS = ("recall@10", "nDCG@10")


def read_pairs(path: Path) -> dict[str, list[Row]]:
    """Read the scored pairs of each genre of a part of STS-B."""
    owners: dict[str, list[Row]] = {}
    with path.open(encoding="utf-8", newline="") as file:
        for row in csv.DictReader(file, delimiter="\t", quoting=csv.QUOTE_NONE):
            pair = {"first": row["sentence1"], "second": row["sentence2"], "score": float(row["score"])}
            owners.setdefault(GENRES[row["genre"]], []).append(pair)
    return owners


def read_answers(path: Path) -> dict[str, list[Row]]:
    """Read the questions of each kind with the sentence that answers them."""
    owners: dict[str, list[Row]] = {PERSONS: [], AMOUNTS: [], OTHERS: []}
    with path.open(encoding="utf-8", newline="") as file:
        for row in csv.DictReader(file, delimiter="\t", quoting=csv.QUOTE_NONE):
            if row["label"] == "entailment":
                kind = KINDS.get(row["question"].split()[0].lower(), OTHERS)
                owners[kind].append({"first": row["question"], "second": row["sentence"]})
    return owners


def join(owners: Mapping[str, Sequence[Row]]) -> list[Row]:
    return [row for rows in owners.values() for row in rows]


def make_config(args: argparse.Namespace, method: str) -> dict[str, Any]:
    """Return the config of a run by a method."""
    return {
        "task": "text-embedding",
        "seed": args.seed,
        "threads": args.threads,
        "model": {
            "name": args.model,
            "target_modules": ["query", "key", "value", "dense"],
            "layers_to_transform": [4, 5],
            "max_length": 64,
        },
        "data": {
            "train": "python:data",
            "text": "first",
            "text_pair": "second",
            **({} if args.retrieval else {"label": "score"}),
            "test_fraction": 0.0,
        },
        "partition": {"validation": 0.1, "test": 0.0},
        "method": {"name": method, "r": 8, "lora_alpha": 16},
        "federation": {"rounds": args.rounds},
        "training": {"lr": args.lr, "local_epochs": 1, "batch_size": 16},
        "evaluation": {"metric": "ndcg_at_10" if args.retrieval else "spearman"},
    }


def measure(encoder: Any, parts: Mapping[str, Sequence[Row]]) -> list[float]:
    """Compute Spearman's correlation of all held-out pairs, and of each genre's."""
    from scipy.stats import spearmanr

    pairs = join(parts)
    first, second = (encoder.encode([pair[key] for pair in pairs]) for key in ("first", "second"))
    cosines, start = encoder.similarity_pairwise(first, second).tolist(), 0
    scores = [row["score"] for row in pairs]
    values = [float(spearmanr(cosines, scores)[0])]
    for rows in parts.values():
        stop = start + len(rows)
        values.append(float(spearmanr(cosines[start:stop], scores[start:stop])[0]))
        start = stop
    return values


def measure_retrieval(encoder: Any, parts: Mapping[str, Sequence[Row]]) -> list[float]:
    """Compute recall@10 and nDCG@10 of all held-out questions, and of each kind's, among the answers of all."""
    from sentence_transformers.sentence_transformer.evaluation import InformationRetrievalEvaluator

    ids = {text: str(number) for number, text in enumerate(dict.fromkeys(row["second"] for row in join(parts)))}
    corpus = {id: text for text, id in ids.items()}
    values = list[float]()
    for rows in (join(parts), *parts.values()):
        relevant: dict[str, set[str]] = {}
        for row in rows:
            relevant.setdefault(row["first"], set()).add(ids[row["second"]])
        evaluator = InformationRetrievalEvaluator(
            {question: question for question in relevant},
            corpus,
            relevant,
            precision_recall_at_k=[10],
            ndcg_at_k=[10],
            name="x",
            write_csv=False,
        )
        found = evaluator(encoder)
        values += [found["x_cosine_recall@10"], found["x_cosine_ndcg@10"]]
    return values


def load_encoder(folder: str | Path) -> Any:
    from sentence_transformers import SentenceTransformer

    return SentenceTransformer(str(folder), device="cpu")


def show(title: str, values: Sequence[float]) -> None:
    print(f"| {title} | {' | '.join(f'{100 * value:.1f}' for value in values)} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="folder of STS-B or QNLI with its tsv files")
    parser.add_argument("--retrieval", action="store_true", help="QNLI's questions and answers")
    parser.add_argument("--out", type=Path, required=True, help="empty folder for the runs")
    parser.add_argument("--model", default="builtin:all-minilm-l6-v2")
    parser.add_argument("--method", default="fedit")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--examples", type=int, default=200, help="most training pairs of an owner")
    parser.add_argument("--heldout", type=int, default=120, help="held-out pairs of each genre")
    parser.add_argument("--trainings", nargs="+", choices=TRAININGS, default=TRAININGS)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()

    import fedspan

    args.model = fedspan.resolve_model(args.model)  # the exported adapters name it as their base

    def draw(found: Mapping[str, Sequence[Row]], count: int) -> dict[str, list[Row]]:
        rng = random.Random(args.seed)
        return {owner: rng.sample(rows, min(count, len(rows))) for owner, rows in found.items()}

    if args.retrieval:
        both = draw(read_answers(args.data / "dev.tsv"), args.examples + args.heldout)
        owners = {owner: rows[: args.examples] for owner, rows in both.items()}
        parts = {owner: rows[args.examples :] for owner, rows in both.items()}
    else:
        owners = draw(read_pairs(args.data / "train.tsv"), args.examples)
        parts = draw(read_pairs(args.data / "dev.tsv"), args.heldout)
    compute = measure_retrieval if args.retrieval else measure
    names = [f"all ({len(join(parts))})", *(f"{name} ({len(rows)})" for name, rows in parts.items())]
    columns = [f"{name}: {number}" for name in names for number in NUMBERS] if args.retrieval else names
    print(f"| training | {' | '.join(columns)} |")
    print(f"|---{'|---' * len(columns)}|")
    show("none (pretrained)", compute(load_encoder(args.model), parts))
    for training in args.trainings:
        folder, began = args.out / training, time.monotonic()
        train = {"everyone": join(owners)} if training == "centralized" else owners
        report = fedspan.run(
            make_config(args, "local-only" if training == "local" else args.method), folder, data=train
        )
        if training == "local":
            for number, owner in enumerate(owners):
                exported = fedspan.export(folder, args.out / f"alone-{number}", client=owner)
                show(f"{owner} alone", compute(load_encoder(exported), parts))
        else:
            show(training, compute(load_encoder(folder / "adapter"), parts))
        seconds = time.monotonic() - began
        print(f"<!-- {training}: best round {report.best_round} of {report.rounds}, {seconds:.0f} s -->", flush=True)


if __name__ == "__main__":
    main()
