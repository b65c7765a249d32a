"""Values separated by commas and tabs."""

from __future__ import annotations

from pathlib import Path

from fedspan.data.loading import load
from helpers.written_data import config_for, written


def test_a_csv_quotes_fields_and_a_tsv_does_not_unless_asked(tmp_path: Path) -> None:
    quoted = 'text,label\n"one, ""two""\nthree",a\nNA,b\n'
    train = load(config_for(written(tmp_path, "t.csv", quoted), test_fraction=0)).train
    assert train["text"][:] == ['one, "two"\nthree', "NA"]
    unbalanced = 'text\tlabel\n"one\ta\ntwo "\tb\n'
    train = load(config_for(written(tmp_path, "t.tsv", unbalanced), test_fraction=0)).train
    assert train["text"][:] == ['"one', 'two "']
    config = config_for(written(tmp_path, "q.tsv", quoted.replace(",", "\t")), test_fraction=0, quoting="double")
    assert load(config).train["text"][0] == 'one\t "two"\nthree'


def test_a_file_without_a_header_is_read_with_the_names_given(tmp_path: Path) -> None:
    path = written(tmp_path, "cola.tsv", "gj04\t1\t\tThe boat sank.\nbc01\t0\t*\tBoat the sank.\n")
    config = config_for(path, columns=["source", "label", "mark", "text"], test_fraction=0)
    data = load(config)
    assert data.train.column_names == ["text", "label", "source", "mark"]
    assert data.train[0] == {"text": "The boat sank.", "label": 1, "source": "gj04", "mark": ""}
