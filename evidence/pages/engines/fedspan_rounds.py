"""A fedspan federation, round by round as the driver asks; the config comes as JSON.

python fedspan_rounds.py CONFIG.json
"""

import json
import sys
from pathlib import Path

from peers_answers import Answers
from watch import Watch
from work import CHECKED

from fedspan.assembly.run import prepare
from fedspan.config import parse_config


def main() -> None:
    """Serve the driver."""
    answers = Answers()
    prepared = prepare(parse_config(json.loads(Path(sys.argv[1]).read_text())))
    federation, watch = prepared.federation, Watch(prepared.engine)
    examples = sum(len(client_data.train) for client_data in federation.clients.values())
    progress, first = federation.begin(), dict[str, float]()

    def record_loss(client: str, loss: float) -> None:
        first.setdefault(client, loss)

    def run_numbered(round: int) -> dict[str, float]:
        nonlocal progress
        result = federation.run_round(progress, record_loss)
        progress = result.progress
        return {"loss": result.loss, "examples": examples, "training": watch.take()}

    def report() -> dict[str, object]:
        stacking = getattr(prepared.engine, "stacking", None)
        chosen = None if stacking is None else {"clients": stacking.clients_per_pass, "workers": stacking.workers}
        return {"first": first[min(federation.clients)], "stacking": chosen}

    answers.serve(run_numbered, CHECKED, report)


if __name__ == "__main__":
    main()
