"""The peers' environment: Flower, Ray and pfl-research beside the same torch, Transformers and PEFT as fedspan's."""

import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

from evidence.pages.engines.contenders import get_fedspan_variables

PEERS = ("flwr[simulation]==1.41.0", "pfl==0.6.0")
SAME = ("torch", "transformers", "peft", "numpy", "safetensors")


def make_environment(folder: Path) -> Path:
    """The interpreter of the environment in a folder, made where it is not there or has other versions."""
    python, stamp = folder / "bin" / "python", folder / "peers.txt"
    # torch's local part (+cpu) names an index that pip may not know
    requirements = [*(f"{name}=={version(name).partition('+')[0]}" for name in SAME), *PEERS]
    if stamp.is_file() and stamp.read_text().splitlines() == requirements:
        return python
    if not python.exists():
        subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
    subprocess.run([str(python), "-m", "pip", "install", "--quiet", *requirements], check=True)
    stamp.write_text("\n".join(requirements) + "\n")
    return python


def get_peer_variables(threads: int, home: Path) -> dict[str, str]:
    """Environment variables of a peer's process: as many threads as everybody, no calls home."""
    here = str(Path(__file__).parent)
    return {
        **get_fedspan_variables(threads),
        "PYTHONPATH": here,  # Ray's workers import the client from there
        "FLWR_TELEMETRY_ENABLED": "0",
        "FLWR_DISABLE_UPDATE_CHECK": "1",
        "FLWR_HOME": str(home),
        "RAY_USAGE_STATS_ENABLED": "0",
    }
