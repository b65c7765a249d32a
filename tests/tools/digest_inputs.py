"""The models, texts and images that the cases of ``digests.py`` share: those of the tests, the same every time."""

from pathlib import Path

LABELS = ("admin", "billing", "lab", "symptom")
SITES = ("east", "north", "west")
"""Clients by id."""
TAGS = ("O", *(f"{place}-{label}" for label in LABELS[:2] for place in "BI"))


def save_inputs(folder: Path) -> None:
    """Write models with random weights (an encoder, one for masked words, a decoder, and one of both) and the data."""
    from helpers import (
        tiny,
        tiny_decoders,
        tiny_images,
        tiny_masked,
        tiny_pairs,
        tiny_preferences,
        tiny_seq2seq,
        tiny_tags,
        tiny_topics,
    )

    tiny.save_model("deep-bert", folder)
    tiny_masked.save_masked(folder / "masked-bert")
    tiny_decoders.save_decoder("gpt2", folder)
    tiny_seq2seq.save_model("t5", folder / "t5")
    tiny_images.save_pictures(folder)
    for path in (
        tiny.save_corpus(folder),
        tiny_decoders.save_questions(folder),
        tiny_masked.save_texts(folder / "texts.jsonl"),
        tiny_pairs.save_pairs(folder / "pairs.csv"),
        tiny_pairs.save_scored_pairs(folder / "scored.csv"),
        tiny_preferences.save_preferences(folder / "preferences.jsonl"),
        tiny_seq2seq.save_pairs(folder / "translations.csv"),
        tiny_tags.save_sentences(folder / "sentences.jsonl"),
        tiny_topics.save_topics(folder / "topics.jsonl"),
    ):
        _split(path)


def _split(path: Path) -> None:
    """Write the rows of each site, and those of all sites, to files in a folder with the name of the file."""
    import pandas

    rows = pandas.read_csv(path) if path.suffix == ".csv" else pandas.read_json(path, lines=True)
    path.with_suffix("").mkdir()
    for site in (*SITES, "all"):
        own = rows[rows["site"].isin(SITES if site == "all" else [site])]
        target = path.with_suffix("") / f"{site}{path.suffix}"
        if path.suffix == ".csv":
            own.to_csv(target, index=False)
        else:
            own.to_json(target, orient="records", lines=True)
