"""How long the examples take, each with its defaults as a user would run it, one after another.

    python -m evidence.pages.examples --model PATH --page examples/README.md

``--model`` is a folder with a causal language model, for the examples that train one: their defaults come from a hub.
A page is written from all examples only, because it names one command and one date for all of its numbers.
"""

import argparse
import datetime
import platform
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
ORIGIN = "\nCommand: `python -m evidence.pages.examples"
NEED_MODEL = ("instruction_tuning", "own_trainer")


def time_example(script: Path, out: Path, model: Path | None) -> float:
    """Seconds of an example."""
    words = ["--model", str(model)] if model is not None and script.stem in NEED_MODEL else []
    began = time.monotonic()
    subprocess.run([sys.executable, str(script), "--out", str(out / script.stem), *words], check=True)
    return time.monotonic() - began


def page(text: str, seconds: dict[str, float], command: str, *, busy: bool) -> str:
    """The page with its last column filled in, and where that comes from."""
    for name, value in seconds.items():
        text = re.sub(rf"(\| \[`{name}\.py`\].*\|) [^|]+ \|\n", rf"\g<1> {value:.0f} |\n", text)
    machine = f"{platform.machine()}, {torch.get_num_threads()} threads, torch {torch.__version__}"
    machine += ", beside other work" * busy
    origin = f"{ORIGIN}{command}`  \nDate: {datetime.date.today()}. Machine: {machine}.\n"
    return text.partition(ORIGIN)[0].rstrip() + "\n" + origin


def main() -> None:
    """Time them; write the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="of examples; left out: all")
    parser.add_argument("--model", type=Path, help="folder with a causal language model")
    parser.add_argument("--page", type=Path, help="whose table is filled in")
    parser.add_argument("--busy", action="store_true", help="write on the page that the machine had other work to do")
    args = parser.parse_args()
    if args.page is not None and args.names:
        parser.error("--page needs the times of all examples: leave the names out")
    paths = sorted(path for path in EXAMPLES.glob("*.py") if not args.names or path.stem in args.names)
    seconds: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as name:
        for script in paths:
            seconds[script.stem] = time_example(script, Path(name), args.model)
            print(f"{script.stem}: {seconds[script.stem]:.1f} s", flush=True)
    if args.page is not None:
        model = "" if args.model is None else f" --model PATH/{args.model.name}"
        model += " --busy" if args.busy else ""
        text = page(args.page.read_text(encoding="utf-8"), seconds, model, busy=args.busy)
        args.page.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
