"""Every method on convolutions, embeddings and narrow bases."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from fedspan.assembly.run import Prepared, prepare
from fedspan.config import RunConfig, parse_config
from fedspan.core.base import to_dense
from fedspan.methods.registry import METHODS
from fedspan.run_folder import RunFolder
from fedspan.runs.trained_models import write_adapters
from helpers import tiny_convolutions
from helpers.claim_measures import errors, require_declared_traffic
from helpers.exported_models import predict_with_engine, predict_with_peft
from helpers.families import UNLIKE, methods_by_family
from helpers.method_checks import require_exactness
from helpers.watched_rounds import MethodRun, RunMethod, method_config, run_watched

KINDS = ("convolution", "embedding")
SHAPES = {
    "convolution": {"tall": (5, 9), "wide": (6, 30), "point": (7, 6)},
    "embedding": {"bert.embeddings.word_embeddings": (16, 48)},
}
GLOBAL = [key for key, cls in METHODS.items() if not cls.claims.personal]
each = pytest.mark.parametrize("kind", KINDS)


@pytest.fixture(scope="module")
def folder(tiny_folder: Path) -> Path:
    """Also holds ``convolutions`` and ``pictures``."""
    tiny_convolutions.save_model(tiny_folder)
    tiny_convolutions.save_pictures(tiny_folder)
    return tiny_folder


def layers_config(folder: Path, kind: str, key: str, **changes: Mapping[str, Any]) -> RunConfig:
    """Three rounds, three of four clients."""
    changes = {
        "federation": {"rounds": 3, "clients_per_round": 3},
        "training": {"lr": 0.05, "weight_decay": 0},  # no adapter can say that the base itself has decayed
        **changes,
    }
    if kind == "embedding":
        model = {"target_modules": ["word_embeddings"], **changes.pop("model", {})}
        return method_config(folder, key, model=model, **changes)
    model = {
        "name": str(folder / "convolutions"),
        "target_modules": tiny_convolutions.LAYERS,
        **changes.pop("model", {}),
    }
    config = method_config(
        folder, key, model=model, data={"train": str(folder / "pictures")}, partition={"column": "domain"}, **changes
    )
    return parse_config({**config.model_dump(mode="json"), "task": "image-classification"})


@pytest.fixture(scope="module")
def loaded(folder: Path) -> dict[str, Prepared]:
    """A model of each kind, for all methods."""
    return {kind: prepare(layers_config(folder, kind, "fedit")) for kind in KINDS}


@pytest.fixture(scope="module")
def runs(folder: Path, loaded: dict[str, Prepared]) -> RunMethod:
    """``runs(kind, key)``: a method's rounds; the same object every time."""
    known: dict[tuple[str, str], MethodRun] = {}

    def get(kind: str, key: str) -> MethodRun:
        if (kind, key) not in known:
            known[kind, key] = run_watched(loaded[kind], layers_config(folder, kind, key))
        return known[kind, key]

    return get


@each
def test_the_layers_are_those_meant(kind: str, loaded: dict[str, Prepared]) -> None:
    layers = loaded[kind].engine.adapted.spec.layers
    assert {layer.name: layer.shape for layer in layers} == SHAPES[kind]


@each
@pytest.mark.parametrize("key", methods_by_family(GLOBAL, UNLIKE))
def test_exact_where_claimed_and_measurably_not_elsewhere(kind: str, key: str, runs: RunMethod) -> None:
    require_exactness(key, lambda key: runs(kind, key))


@each
@pytest.mark.parametrize("key", methods_by_family(quick=UNLIKE))
def test_bytes_sent_are_bytes_declared(kind: str, key: str, runs: RunMethod) -> None:
    require_declared_traffic(runs(kind, key), METHODS[key].claims.extras)


@each
@pytest.mark.parametrize("key", methods_by_family(quick=UNLIKE))
def test_what_is_exported_gives_the_engine_s_logits(kind: str, key: str, runs: RunMethod, tmp_path: Path) -> None:
    run = runs(kind, key)
    made, progress = run.prepared, run.rounds[-1].after
    folders = write_adapters(made, progress, RunFolder(tmp_path))
    assert set(folders) == (set(made.federation.clients) if METHODS[key].claims.personal else {"global"})
    gained = 0.0
    for id, adapter in folders.items():
        client = None if id == "global" else id
        expected = predict_with_engine(made, progress, client)
        assert torch.allclose(predict_with_peft(made, adapter), expected, rtol=0, atol=1e-4)
        gained = max(gained, float((expected - predict_with_engine(made, run.rounds[0].before, client)).abs().max()))
    assert gained > 0.01, "training changed nothing"


@each
@pytest.mark.parametrize("key", methods_by_family(quick=UNLIKE))
def test_a_rank_equal_to_a_layer_s_side_is_taken_for_nothing_else(
    kind: str, key: str, folder: Path, loaded: dict[str, Prepared]
) -> None:
    """A (r, I) and B (O, r) cannot be told apart by a side of length r, as code that looks for one does."""
    rank = min(min(shape) for shape in SHAPES[kind].values())
    run = run_watched(loaded[kind], layers_config(folder, kind, key, method={"r": rank, "lora_alpha": rank}))
    assert all(loss.result.loss > 0 for loss in run.rounds)
    if METHODS[key].claims.exact and key in GLOBAL:
        stepped = [round for round in run.rounds if any(local.trained.steps for local in round.trained)]
        assert max(max(errors(run, round).values()) for round in stepped) < 1e-6
    require_declared_traffic(run, METHODS[key].claims.extras)


@pytest.fixture(scope="module", params=["bfloat16", pytest.param("float16", marks=pytest.mark.slow)])
def narrow(request: pytest.FixtureRequest, tiny_folder: Path, prepared: Prepared) -> Prepared:
    return prepare(method_config(tiny_folder, "fedit", model={"dtype": request.param}), prepared.partition)


@pytest.mark.parametrize("key", methods_by_family(quick=UNLIKE))
def test_a_narrow_base_is_never_written_to_nor_anything_narrow_sent(
    key: str, narrow: Prepared, tiny_folder: Path
) -> None:
    """No SVD, QR or eigenvalue comes in 16 bits, and a weight of so few loses a step's change."""
    training = {"weight_decay": 0}  # a base that decays needs float32, and says so
    model = {"dtype": narrow.config.model.dtype}
    before = {name: layer.stored_weight.detach().clone() for name, layer in narrow.engine.adapted.layers.items()}
    run = run_watched(narrow, method_config(tiny_folder, key, model=model, federation={"rounds": 3}, training=training))
    adapted = run.prepared.engine.adapted
    for round in run.rounds:
        state = round.after.state
        for value in (*state.tensors.values(), *state.memory.values()):
            assert value.dtype not in (torch.bfloat16, torch.float16)
            assert not value.is_floating_point() or value.isfinite().all()
        for layer, delta in state.base.total.items():
            assert to_dense(delta).dtype == torch.float32, layer
    for name, layer in adapted.layers.items():
        assert layer.stored_weight.dtype == getattr(torch, model["dtype"])
        assert torch.equal(layer.stored_weight, before[name])
    losses = [round.result.loss for round in run.rounds]
    assert len(set(losses)) == len(losses)
