"""Columns under other names."""

from __future__ import annotations

from pathlib import Path

from fedspan.data.loading import load
from helpers.written_data import config_for, written


def test_columns_are_renamed_even_where_their_names_collide(tmp_path: Path) -> None:
    path = written(tmp_path, "t.csv", "label,text,b,ward\nhello,x,one,w1\nworld,y,two,w2\n")
    train = load(config_for(path, text="label", text_pair="b", label="text", test_fraction=0)).train
    assert train[1] == {"text": "world", "text_pair": "two", "label": 1, "ward": "w2"}
    train = load(config_for(path, text="b", label="ward", test_fraction=0)).train
    own = {"text": ["one", "two"], "label": [0, 1]}
    assert train.to_dict() == {**own, "source:label": ["hello", "world"], "source:text": ["x", "y"]}
