"""The tiny corpus on three nodes, and the same on one machine."""

import csv
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from . import tiny

SITES = ("north", "south", "west")


def site_files(corpus: Path, folder: Path, sites: Sequence[str] = SITES) -> dict[str, Path]:
    """The corpus as a file for each site, and one of all these sites together under ``all``."""
    with corpus.open(newline="") as file:
        rows = [row for row in csv.DictReader(file) if row["site"] in sites]
    found: dict[str, Path] = {}
    for site in (*sites, "all"):
        found[site] = folder / f"{site}.csv"
        with found[site].open("w", newline="") as file:
            writer = csv.DictWriter(file, ["text", "label", "site"])
            writer.writeheader()
            writer.writerows(row for row in rows if site in (row["site"], "all"))
    return found


def run_values(
    tiny_folder: Path, method: Mapping[str, Any], sites: Sequence[str] = SITES, **changes: Any
) -> dict[str, Any]:
    """A run on the sites' files, as plain values, without its data."""
    training = {"optimizer": "sgd", "lr": 0.02, **changes.pop("training", {})}
    values = tiny.settings(tiny_folder, method=method, training=training, **changes)
    del values["data"], values["engine"], values["device"]
    values["data"] = {"labels": list(tiny.LABELS)}
    values["partition"] = {"partitioner": "iid", "clients": len(sites), "validation": 0.0, "test": 0.0}
    values["federation"] = {"rounds": 2, "deadline": 60.0, **changes.get("federation", {})}
    return values


def local_values(values: Mapping[str, Any], data: Path, engine: Mapping[str, Any]) -> dict[str, Any]:
    """The same run with all sites' data on one machine."""
    partition = {"partitioner": "natural", "column": "site", "validation": 0.0, "test": 0.0}
    own = {**values["data"], "train": str(data), "test_fraction": 0.0}
    return {**values, "data": own, "partition": partition, "engine": dict(engine), "device": "cpu", "threads": 1}
