"""Scores of generated texts against references: BLEU and chrF by sacrebleu, ROUGE by rouge-score.

Papineni et al., "BLEU: a Method for Automatic Evaluation of Machine Translation", ACL 2002; Popović, "chrF: character
n-gram F-score for automatic MT evaluation", WMT 2015; Lin, "ROUGE: A Package for Automatic Evaluation of Summaries",
ACL 2004 workshop; Post, "A Call for Clarity in Reporting BLEU Scores", WMT 2018, arXiv:1804.08771.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from importlib import import_module
from typing import Any, Literal

from fedspan.errors import FedspanError, build_install_command
from fedspan.tasks.metrics import Metric

BleuTokenizer = Literal["13a", "intl", "char", "zh", "none"]
"""Tokenizers of sacrebleu that need no further package."""

TEXT_METRICS: Mapping[str, Metric] = {
    "bleu": Metric("BLEU", True, maximum=100.0),
    "chrf": Metric("chrF", True, maximum=100.0),
    "rouge_1": Metric("ROUGE-1", True, is_percentage=True),
    "rouge_2": Metric("ROUGE-2", True, is_percentage=True),
    "rouge_l": Metric("ROUGE-L", True, is_percentage=True),
}
"""The scores by name. BLEU and chrF are from 0 to 100 as sacrebleu prints them, ROUGE's F-measures are shares."""
_ROUGE = {"rouge_1": "rouge1", "rouge_2": "rouge2", "rouge_l": "rougeL"}


def require_text_scores() -> None:
    """Require the packages that compute the scores."""
    try:
        for package in ("sacrebleu", "rouge_score.rouge_scorer"):
            import_module(package)
    except ImportError as error:
        command = build_install_command("seq2seq")
        problem = f"a package that scores generated texts is missing ({error}). Run: {command}"
        raise FedspanError("evaluation.generate", True, problem=problem) from None


def compute_text_scores(
    predictions: Sequence[str], references: Sequence[str], tokenizer: BleuTokenizer = "13a"
) -> dict[str, float]:
    """Compute the scores in `TEXT_METRICS` over all texts.

    BLEU and chrF are those of the corpus, not means over texts; ROUGE is the mean F-measure, without stemming.
    """
    require_text_scores()
    import sacrebleu
    from rouge_score.rouge_scorer import RougeScorer

    scorer: Any = RougeScorer([*_ROUGE.values()])
    rows = [scorer.score(reference, text) for text, reference in zip(predictions, references, strict=True)]
    return {
        "bleu": sacrebleu.corpus_bleu(predictions, [references], tokenize=tokenizer).score,
        "chrf": sacrebleu.corpus_chrf(predictions, [references]).score,
        **{name: sum(row[kind].fmeasure for row in rows) / len(rows) for name, kind in _ROUGE.items()},
    }


def is_exact_match(prediction: str, reference: str, pattern: str | None = None) -> bool:
    """Check whether two answers are equal: as numbers if both are (1,000 is 1000.0), else as texts without whitespace.

    Args:
        pattern: Regex of the part that is compared: the first group of its first match, or the whole match without
            groups; None: the whole texts. Answers without a match are not equal.
    """
    left, right = (_extract(text, pattern) for text in (prediction, reference))
    if left is None or right is None:
        return False
    try:
        return float(left.replace(",", "")) == float(right.replace(",", ""))
    except ValueError:
        return left.split() == right.split()


def _extract(text: str, pattern: str | None) -> str | None:
    if pattern is None:
        return text
    match = re.search(pattern, text)
    return None if match is None else match[1 if match.re.groups else 0]
