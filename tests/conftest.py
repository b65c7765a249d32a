"""What all tests share: no network, one thread, and the tiny models in a folder."""

from __future__ import annotations

import os
from pathlib import Path

os.environ["HF_HUB_OFFLINE"] = "1"  # read when huggingface_hub is imported

import pytest
import torch
from transformers.utils import logging

import tiny
import tiny_decoders
import tiny_images
from fedspan import api
from fedspan.runs.build import Prepared, prepare


@pytest.fixture(scope="session", autouse=True)
def quiet() -> None:
    """Small matrices are fastest on one thread, and bits depend on the number of threads."""
    torch.set_num_threads(1)
    logging.set_verbosity_error()
    logging.disable_progress_bar()


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Holds ``bert``, ``roberta``, ``distilbert``, ``gpt2`` and ``corpus.csv``."""
    folder = tmp_path_factory.mktemp("tiny")
    for kind in ("bert", "roberta", "distilbert", "gpt2"):
        tiny.save_model(kind, folder)
    tiny.save_corpus(folder)
    return folder


@pytest.fixture(scope="session")
def decoders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Holds a causal language model of each family (``llama-lm`` ...), ``questions.jsonl`` and ``corpus.csv``."""
    folder = tmp_path_factory.mktemp("decoders")
    for family in tiny_decoders.FAMILIES:
        tiny_decoders.save_decoder(family, folder)
    tiny_decoders.save_questions(folder)
    tiny.save_corpus(folder)
    return folder


@pytest.fixture(scope="session")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Holds the image models ``vit`` and ``resnet``, and the folder ``pictures``."""
    folder = tmp_path_factory.mktemp("images")
    for kind in ("vit", "resnet"):
        tiny_images.save_model(kind, folder)
    tiny_images.save_pictures(folder)
    return folder


@pytest.fixture(scope="session")
def image_runs(images: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Finished runs, not to be changed: ``vit``, ``resnet``, and ``scratch`` on builtin:resnet-8."""
    folder = tmp_path_factory.mktemp("image-runs")
    for name, kind in (("vit", "vit"), ("resnet", "resnet"), ("scratch", "builtin:resnet-8")):
        api.run(tiny_images.settings(images, kind), folder / name)
    return folder


@pytest.fixture(scope="session")
def prepared(tiny_folder: Path) -> Prepared:
    """FedIT on the tiny BERT, whose model tests may share: values of a federation leave nothing behind in it."""
    return prepare(tiny.config(tiny_folder))
