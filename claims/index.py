"""Write docs/claims/index.md, experiments.md and statements.md from saved results: ``python claims/index.py``."""

from __future__ import annotations

import argparse
import json
import re
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from pages import SCORES, format_command, name_page, read_table
from report import FOLDER, build_title, format_table
from scipy import stats

from fedspan.reproduction.presets import list_presets

OPENING = """# Claims

This page says what the papers claim and what this library found. Most experiments were rerun, nearly all at a small
scale, with small models on two cores or one GPU. Some have not been run yet, some statements cannot be run here, and
some results are outdated."""
TERMS = """A statement *holds* if the mean difference, paired by seed, exceeds two standard errors in the paper's
direction, and is *contradicted* if it does so in the other direction. It is *inconclusive* otherwise, also if no row
learned anything. *Outdated* results were measured before a change that their page names, and have not been measured
again; they are counted as outdated only. *Repeated* are statements on runs that another page has judged for the same
two methods. [All experiments](experiments.md) has every page with its scale and the counts of verdicts, and [all
statements](statements.md) every measured number. `claims/` has a script for each experiment; `python claims/index.py`
writes the three pages from the saved results."""
EXPERIMENTS = """# All experiments

This page lists every experiment that was rerun, with its scale, and those that were not. [Claims](index.md) sums them
up by paper and says what the verdicts mean."""
PRECISION = """The counted verdicts are those of runs in float32. What was measured in bfloat16, whose results differ
between processors, counts as outdated; against LoRA, RoLoRA's first headline was contradicted in bfloat16 and is
inconclusive in float32. Between machines, float32 results differ, too, but by rounding: in the one setting that ran on
a GPU ([table 1](florg-table1.md)) and on a CPU ([its ablation](florg-procrustes.md)), FLoRG has the same mean and
deviation. On a GPU rounding differs from run to run, too: one config of [FedAvg with 200 clients](fedloru-table7.md)
gave 79.0 and 78.7 %."""
STRICTER = """The saved verdicts follow this rule, which was fixed before the first measurement, and print one standard
error after ±. With few seeds it is a weak test. New results are judged by the 95 % interval of Student's t, which for
three seeds is 4.3 standard errors to each side, and print half its width after ±. By the saved, rounded figures of the
experiments with several seeds, {weak} of {decided} statements that hold or are contradicted would be inconclusive."""
STATEMENTS = """# All statements

This page lists every statement that was measured, with its number and verdict. [Claims](index.md) sums them up by paper
and says what the verdicts mean."""
NOT_RUN = """## Not run yet

These experiments have no page under this protocol yet. Each command runs one at the small scale and writes its page.
`fedspan reproduce ID --scale full --out FOLDER` runs it at the paper's size."""


SYSTEMS = {"rolora": "RoLoRA", "fedloru": "FedLoRU", "fedgalore": "FedGaLore", "florg": "FLoRG"}
"""Names of the papers' systems by the first word of their pages' file names."""
VARIANTS = {"FedGaLore": "FedGaLore- is FedGaLore without synchronization of the optimizers' second moments."}
"""Explanations of rows whose names the paper gives to variants of its system."""
REST = "All methods"
REASONS = "reasons"
"""The page that examines contradictions; its statements are not those of a paper, and are not counted."""
EXAMINED = """## Examined contradictions

Rows of contradicted statements, run again under a possible reason for the contradiction."""
SEEDS = re.compile(r"^At the small scale, seeds ([\d, ]+);", flags=re.MULTILINE)
"""The line of a page with its seeds."""
DIFFERENCE = re.compile(r"^by [a-z ]*([+-][\d.]+) ± ([\d.]+)")
"""A measured difference with its standard error."""
COMPARED = re.compile(r": (.+) against (.+)$")
"""The end of a statement that compares two methods: the one that the paper favors, and the other."""
VERDICTS = ("holds", "contradicted", "inconclusive", "not runnable here", "not run")
VERBS = {
    "holds": "holds",
    "contradicted": "is contradicted",
    "inconclusive": "is inconclusive",
    "not runnable here": "cannot be run here",
    "not run": "was not run",
}
"""The verdicts as verbs of a sentence."""
OUTDATED, REPEATED = "outdated", "repeated"
COLUMNS = (*VERDICTS, OUTDATED, REPEATED)
"""What statements are counted as."""
HEADLINES = (
    ("rolora-table1", "With 20 or 50 clients RoLoRA keeps the accuracy that LoRA and FFA-LoRA lose"),
    ("rolora-figure5", "Under an equal budget RoLoRA outperforms LoRA and FFA-LoRA on most tasks"),
    ("fedloru-table1", "FedLoRU consistently outperforms FedLoRA"),
    ("fedloru-table7", "From 100 clients FedLoRU outperforms FedAvg"),
    ("fedgalore-table4", "FedGaLore loses less to heterogeneity than federated LoRA"),
    ("fedgalore-table3", "FedGaLore outperforms all other low-rank methods on non-IID data"),
    ("florg-table1", "FLoRG outperforms FedIT, FeDeRA, FFA-LoRA and FedSA-LoRA"),
    ("florg-procrustes", "Alignment makes FLoRG better"),
)
"""Pages and the statements that their papers' abstracts rest on."""
CAUSES = {
    "From 100 clients FedLoRU outperforms FedAvg": (
        "The cause is the data set: on Fashion-MNIST, which was run, the paper's own tables 1 and 6 have FedAvg above "
        "FedLoRU with 100 clients, too (90.2 % against 89.0 % at most), as here ([measured](fedloru-table7.md)); its "
        "table 7 is of CIFAR-100, which was not run. More rounds, fewer steps, other partitions and a ResNet-10 do not "
        "turn it, nor does one seed of PACS ([examined](reasons.md))."
    ),
    "FedGaLore loses less to heterogeneity than federated LoRA": (
        "The cause is the protocol: each row has its own learning rate here, where the paper has one for all "
        "([measured](fedgalore-table4-matched.md))."
    ),
    "FedGaLore outperforms all other low-rank methods on non-IID data": (
        "The cause is the scale: on these non-IID data full fine-tuning, which FedGaLore follows, is not above FedIT "
        "itself ([same page](fedgalore-table3.md))."
    ),
    "FLoRG outperforms FedIT, FeDeRA, FFA-LoRA and FedSA-LoRA": (
        "The protocol decides: each row has its own learning rate here, and at FLoRG's for all rows the difference "
        "from FedIT is inconclusive ([measured](florg-table1-matched.md)). At ranks 2 and 8, each at its best, FLoRG "
        "is below FedIT, too ([table 2](florg-table2.md))."
    ),
}
"""What is known of why a headline is contradicted, and the page whose runs show it."""
NATURAL = "one for each value of a column"
"""How a page's settings give the number of clients of a natural partition (``reproduction.cells``)."""
EXPERIMENT = ("experiment", "first statement", "found here, all statements", "scale")
"""Columns of a paper's experiments."""


def index(folder: Path) -> dict[str, str]:
    """Return the pages in Markdown by file name."""
    parts, examined = read_pages(folder)
    papers = [OPENING, *list_headlines(folder, parts), TERMS, *describe_stricter(folder, parts), PRECISION]
    experiments = [EXPERIMENTS, *([f"## Verdicts\n\n{summarize_papers(parts)}"] if parts else [])]
    statements = [STATEMENTS]
    for title, pages in parts.items():
        paper = [name_paper(pages)] if title != REST else []
        paper += [VARIANTS[title]] if title in VARIANTS else []
        papers += [f"## {title}", *paper, *state_findings(title, pages), link_pages(title, pages)]
        experiments += [f"## {title}", *paper, format_table(EXPERIMENT, list_experiments(folder, title, pages))]
        statements.append(
            f"## {title}\n\n"
            + format_table(("claim", "the paper's statement", "measured", "verdict"), format_rows(pages))
        )
    if examined:
        header = ("page", "statement under the change", "measured", "verdict")
        papers += [EXAMINED, link_pages(REASONS, examined)]
        experiments += [EXAMINED, format_table(EXPERIMENT, list_experiments(folder, REASONS, examined))]
        statements += [EXAMINED, format_table(header, format_rows(examined))]
    experiments += list_missing_pages({page["name"] for pages in parts.values() for page in pages})
    written = {"index.md": papers, "experiments.md": experiments, "statements.md": statements}
    return {name: "\n\n".join(page) + "\n" for name, page in written.items()}


def read_pages(folder: Path) -> tuple[dict[str, list[dict[str, Any]]], list[dict[str, Any]]]:
    """Return the saved results by paper, and the examined contradictions."""
    parts: dict[str, list[dict[str, Any]]] = {title: [] for title in (*SYSTEMS.values(), REST)}
    examined: list[dict[str, Any]] = []
    for path in sorted(folder.glob("*.json"), key=_build_sort_key):
        saved = json.loads(path.read_text(encoding="utf-8"))
        if saved["name"] == REASONS:
            examined.append(saved)
            continue
        parts[SYSTEMS.get(re.split("[-_]", saved["name"])[0], REST)].append(saved)
    for pages in parts.values():
        mark_repeats(folder, pages)
    return {title: pages for title, pages in parts.items() if pages}, examined


def mark_repeats(folder: Path, pages: Sequence[Mapping[str, Any]]) -> None:
    """Mark the findings of a paper's pages that an earlier page has: the same methods, difference and runs.

    Args:
        folder: Folder of the pages; their tables tell whether the runs are the same, down to their seconds.
        pages: Saved results of a paper; a repeated finding gets the name of the earlier page as ``repeats``.
    """
    seen: dict[tuple[str, str, str], list[tuple[str, dict[str, set[tuple[str, ...]]]]]] = {}
    for page in pages:
        runs: dict[str, set[tuple[str, ...]]] = {}
        for row in read_table((folder / f"{page['name']}.md").read_text(encoding="utf-8"), SCORES):
            runs.setdefault(row["method"], set()).add(tuple(value for key, value in row.items() if key != "cell"))
        for finding in page["findings"]:
            pair = COMPARED.search(finding["statement"])
            if pair is None or not {pair[1], pair[2]} <= set(runs):
                continue
            difference = finding["measured"].partition(";")[0]
            earlier = seen.setdefault((pair[1], pair[2], difference), [])
            for name, others in earlier:
                if name != page["name"] and all(runs[method] & others[method] for method in (pair[1], pair[2])):
                    finding["repeats"] = name
                    break
            else:
                earlier.append((page["name"], runs))


def list_headlines(folder: Path, parts: Mapping[str, Sequence[Mapping[str, Any]]]) -> list[str]:
    """Return the table of what each paper says first and what was found, of the pages that there are."""
    saved = {page["name"]: (title, page) for title, pages in parts.items() for page in pages}
    rows: list[tuple[str, ...]] = []
    for name, statement in HEADLINES:
        if name in saved:
            title, page = saved[name]
            compared = _group_findings(page, statement)
            found = "; ".join(f"{verdict} against {', '.join(others)}" for verdict, others in compared.items())
            note = f" ({OUTDATED})" if "outdated" in page else ""
            link = f"[{_name_item(title, page)}]({name}.md)"
            rows.append((title, statement, f"{found}{note}", read_scale(folder, name), link))
    header = ("paper", "the paper says", "found here", "scale", "page")
    return [format_table(header, rows)] if rows else ["No results yet."]


def describe_stricter(folder: Path, parts: Mapping[str, Sequence[Mapping[str, Any]]]) -> list[str]:
    """Describe how many saved verdicts Student's t would change; empty without a page of several seeds."""
    excesses: list[float] = []
    for page in (page for pages in parts.values() for page in pages):
        seeds = SEEDS.search((folder / f"{page['name']}.md").read_text(encoding="utf-8"))
        if seeds is None or "," not in seeds[1]:
            continue
        limit = float(stats.t.ppf(0.975, seeds[1].count(",")))
        for finding in page["findings"]:
            difference = DIFFERENCE.search(finding["measured"])
            if classify(page, finding) in ("holds", "contradicted") and difference is not None:
                excesses.append(abs(float(difference[1])) - limit * float(difference[2]))
    weak = sum(excess <= 0 for excess in excesses)
    return [STRICTER.format(weak=weak, decided=len(excesses))] if excesses else []


def _group_findings(page: Mapping[str, Any], statement: str) -> dict[str, dict[str, str]]:
    """Return a statement's differences by verdict and the method compared with."""
    compared: dict[str, dict[str, str]] = {}
    for finding in page["findings"]:
        if finding["statement"].startswith(f"{statement}: "):
            pair = COMPARED.search(finding["statement"])
            assert pair is not None, f"{finding['statement']} compares no two methods"
            difference = finding["measured"].partition(";")[0].removeprefix("by ").removesuffix(" of accuracy")
            compared.setdefault(finding["verdict"], {})[_name_other(pair[2])] = difference
    return {verdict: compared[verdict] for verdict in VERDICTS if verdict in compared}


def _describe_findings(page: Mapping[str, Any], statement: str) -> str:
    """Return sentences with the verdicts on a statement, the methods compared with and the differences."""
    found = _group_findings(page, statement)
    clauses = [
        f"{VERBS[verdict]} against {_join_words([f'{other} ({difference})' for other, difference in others.items()])}"
        for verdict, others in found.items()
    ]
    note = f" The results are {OUTDATED}." if "outdated" in page else ""
    cause = f" {CAUSES[statement]}" if "contradicted" in found and statement in CAUSES else ""
    return f"Here, this {_join_words(clauses)}.{note}{cause}"


def _describe_matched(page: Mapping[str, Any], statement: str) -> str:
    """Return a sentence with the verdicts on a statement where all rows have one learning rate."""
    clauses = [
        f"{VERBS[verdict]} against {_join_words(list(others))}"
        for verdict, others in _group_findings(page, statement).items()
    ]
    return f"With [one learning rate for all rows]({page['name']}.md), it {_join_words(clauses)}."


def _name_item(title: str, page: Mapping[str, Any]) -> str:
    """Return the short name of a page, such as its table of the paper."""
    name = page["title"].removeprefix(f"{title}, ")
    name = name.removeprefix(f"{title}: ") if name.startswith(f"{title}: ") else name.partition(":")[0]
    return f"{name}, one learning rate" if page["name"].endswith("-matched") else name


def link_pages(title: str, pages: Sequence[Mapping[str, Any]]) -> str:
    """Return a line with links to a paper's experiments."""
    links = ", ".join(f"[{_name_item(title, page)}]({page['name']}.md)" for page in pages)
    return f"Experiments: {links}."


def _name_other(other: str) -> str:
    """Return the name of what a method is compared with, of which its own variants have no other name."""
    return f"the method {other}" if other.startswith("without ") else other


def _join_words(words: Sequence[str]) -> str:
    """Return words as an enumeration."""
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} and {words[-1]}"


def classify(page: Mapping[str, Any], finding: Mapping[str, str]) -> str:
    """Return the column in which a finding is counted."""
    if finding["verdict"] == "not run":
        return "not run"
    if "outdated" in page:
        return OUTDATED
    return REPEATED if "repeats" in finding else finding["verdict"]


def name_paper(pages: Sequence[Mapping[str, Any]]) -> str:
    """Return a line with the paper that most of the pages are about."""
    return f"Paper: {Counter(page['paper'] for page in pages).most_common(1)[0][0]}."


def state_findings(system: str, pages: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return how a paper's statements fared: all of them, its headlines, and those on each other method.

    Args:
        system: Name of the paper's system.
        pages: Its saved results; outdated and repeated ones, and statements without a verdict, are only in the first
            sentence.
    """
    total = Counter(classify(page, finding) for page in pages for finding in page["findings"])
    saved = {page["name"]: page for page in pages}
    sentences = [f"- **All {total.total()} statements:** {_format_counts(total)}."] if total else []
    for name, statement in HEADLINES:
        if name in saved and _group_findings(saved[name], statement):
            matched = saved.get(name_page(name, "matched"))
            other = "" if matched is None else f" {_describe_matched(matched, statement)}"
            sentences.append(f"- **{statement}.** {_describe_findings(saved[name], statement)}{other}")
    counts: dict[str, Counter[str]] = {}
    for page in pages:
        for finding in page["findings"]:
            pair = COMPARED.search(finding["statement"])
            if pair is None or pair[1] != system or classify(page, finding) not in VERDICTS[:3]:
                continue
            counts.setdefault(pair[2], Counter())[finding["verdict"]] += 1
    sentences += [
        f"- **Against {other}:** {sum(count.values())} statements in favor of {system}: {_format_counts(count)}."
        for other, count in sorted(counts.items(), key=lambda item: (-sum(item[1].values()), item[0]))
        if sum(count.values()) > 1
    ]
    return ["\n".join(sentences)] if sentences else []


def _format_counts(count: Mapping[str, int]) -> str:
    words = {column: column.removesuffix(" here") for column in COLUMNS}
    return ", ".join(
        f"{count[column]} {'hold' if column == 'holds' and count[column] > 1 else words[column]}"
        for column in COLUMNS
        if column in count
    )


def list_experiments(folder: Path, system: str, pages: Sequence[Mapping[str, Any]]) -> list[tuple[str, ...]]:
    """Return a row for each page: its link, its first statement, the verdicts on all of them, and the scale."""
    rows: list[tuple[str, ...]] = []
    for page in pages:
        count = Counter(finding["verdict"] for finding in page["findings"])
        fared = _format_counts(count) + (f" ({OUTDATED})" if "outdated" in page else "")
        title = page["title"].removeprefix(f"{system}, ") if ":" in page["title"] else page["title"]
        first = COMPARED.sub("", page["findings"][0]["statement"]) if page["findings"] else ""
        rows.append((f"[{title}]({page['name']}.md)", first, fared, read_scale(folder, page["name"])))
    return rows


def read_scale(folder: Path, name: str) -> str:
    """Return the models, clients, rounds and a single seed of a page; empty if it has no table of settings."""
    text = (folder / f"{name}.md").read_text(encoding="utf-8")
    rows = read_table(text.partition("## Setting\n")[2], "| ")
    if not rows or not {"model", "clients", "rounds"} <= set(rows[0]):
        return ""
    seed = "; one seed" if re.search(r"^At the small scale, seed \d", text, flags=re.MULTILINE) else ""
    models = list(dict.fromkeys(row["model"].removeprefix("builtin:") for row in rows))
    clients, rounds = (_read_numbers(row[column] for row in rows) for column in ("clients", "rounds"))
    size = f"{_format_range(clients)} clients"
    if any(row["clients"].startswith(NATURAL) for row in rows):
        size = f"{size} or {NATURAL}" if clients else f"clients: {NATURAL}"
    return f"{', '.join(models)}; {size}; {_format_range(rounds)} rounds{seed}"


def _read_numbers(cells: Iterable[str]) -> list[int]:
    """Return the numbers of cells such as "20, 10 a round" (the first) and "10 (LoRA); 20 (RoLoRA)" (both)."""
    entries = [entry.strip() for cell in cells for entry in cell.split(",")[0].split(";")]
    return [int(match[0]) for entry in entries if (match := re.match(r"\d+", entry))]


def _format_range(numbers: Sequence[int]) -> str:
    if not numbers:
        return "various"
    low, high = min(numbers), max(numbers)
    return str(low) if low == high else f"{low} to {high}"


def _build_sort_key(path: Path) -> list[str]:
    """Return a sort key that puts table 2 before table 10."""
    return [text.zfill(4) for text in re.split(r"(\d+)", path.stem)]


def summarize_papers(parts: Mapping[str, Sequence[Mapping[str, Any]]]) -> str:
    """Count the verdicts of each paper's statements, with columns for outdated and repeated ones."""
    counts = {
        title: Counter(classify(page, finding) for page in pages for finding in page["findings"])
        for title, pages in parts.items()
    }
    rows = [
        (f"[{title}](#{title.lower().replace(' ', '-')})", sum(count.values()), *(count[column] for column in COLUMNS))
        for title, count in counts.items()
    ]
    total = sum(counts.values(), Counter[str]())
    rows.append(("all", sum(total.values()), *(total[column] for column in COLUMNS)))
    return format_table(("paper", "statements", *(column.removesuffix(" here") for column in COLUMNS)), rows)


def format_rows(pages: Sequence[Mapping[str, Any]]) -> list[tuple[str, ...]]:
    """Return a row for each statement; the first row of a page links to it."""
    rows: list[tuple[str, ...]] = []
    for saved in pages:
        for number, finding in enumerate(saved["findings"]):
            page = f"[{saved['title']}]({saved['name']}.md), {saved['date']}" if number == 0 else ""
            verdict = f"**{finding['verdict']}**" + (f", {OUTDATED}" if "outdated" in saved else "")
            verdict += f", {REPEATED}" if "repeats" in finding else ""
            rows.append((page, finding["statement"], finding["measured"], verdict))
    return rows


def list_missing_pages(existing: Collection[str]) -> list[str]:
    """Return the section of presets without a page; statements that no run can judge have scripts of their own.

    Args:
        existing: Names of the existing pages.
    """
    rows = [
        (build_title(preset), f"{protocol}", format_command(preset, protocol))
        for preset in list_presets()
        for protocol in ("best", *(("matched",) if preset.small.matched else ()))
        if name_page(preset.id, protocol) not in existing and any(claim.needs is None for claim in preset.claims)
    ]
    return [NOT_RUN, format_table(("experiment", "protocol", "command"), rows)] if rows else []


def main() -> None:
    """Write the pages."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, default=FOLDER)
    folder = parser.parse_args().folder
    for name, page in index(folder).items():
        (folder / name).write_text(page, encoding="utf-8")
        print(f"wrote {folder / name}")


if __name__ == "__main__":
    main()
