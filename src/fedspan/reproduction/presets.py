"""The papers' experiments as data: one YAML file for each table and figure, checked against the schema here.

A preset is a config at the paper's size, axes whose combinations are the cells of its table, the methods of its rows,
and the paper's statements about them. ``small`` retains the protocol and scales everything down to two CPU cores.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from importlib.resources import files
from typing import Annotated, Any, Literal, Self

import yaml
from pydantic import BaseModel, ConfigDict, Field, model_validator

from fedspan.config.validation_errors import convert_validation_errors
from fedspan.errors import FedspanError, suggest_nearest
from fedspan.methods.registry import METHODS

ClaimMeasure = Literal[
    "score",
    "bytes_up",
    "bytes_down",
    "rounds_to",
    "bytes_to",
    "seconds_to",
    "exact_match",
    "alignment",
    "barrier",
    "state_step",
]
"""Measures of claims, defined in ``reports.curves`` and ``reproduce``; ``verdicts`` defines which end is better."""


class PresetPart(BaseModel):
    """Part of a preset, without extra fields and immutable."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class Gap(PresetPart):
    """A loss of score between two values of an axis, in place of the score itself."""

    axis: str
    before: str
    """Value of the axis at which the score is expected to be higher."""
    after: str
    """Value of the axis at which the score is expected to have dropped."""


class Claim(PresetPart):
    """A statement of the paper: one row of the table is better than others."""

    statement: str
    better: str
    worse: list[str] = Field(min_length=1)
    """Labels of the methods that it is better than."""
    cells: dict[str, list[str]] = Field(default_factory=dict)
    """Values to which the claim applies, by axis; an axis left out: all of its values."""
    measure: ClaimMeasure = "score"
    """Quantity that is compared: the held-out metric; bytes of a run; the rounds, the bytes in both directions or the
    seconds of its rounds until a score (``reports.curves.compute_target`` of the two rows); the exact matches of
    generated answers; the alignment of the clients' updates with the global one, the barrier between their models, or
    the last round's step of the server's tensors."""
    gap: Gap | None = None
    """Comparison of the loss of score between two cells; the smaller loss is better."""
    within: float | None = Field(default=None, gt=0)
    """Tolerance, in the metric's own unit (shares, not percent), within which the two are level."""
    needs: str | None = None
    """Quantity that is required but not measured; such a claim is never judged."""


Scale = Literal["full", "small"]
SCALES: tuple[Scale, ...] = ("full", "small")


Protocol = Literal["best", "matched"]
"""``best``: swept values are selected for each row; ``matched``: all rows have the same values."""


def require_scale(scale: str) -> None:
    """Check that a scale exists."""
    if scale not in SCALES:
        raise FedspanError("--scale", scale, f"one of {', '.join(SCALES)}")


Values = dict[str, Any]
"""Part of a config as plain values, section by section."""


class MethodEntry(PresetPart):
    """A row of the table."""

    key: str
    set: Values = Field(default_factory=dict)
    """Changes to the config for this row, including its options under ``method``."""


class Where(PresetPart):
    """Changes for some of the cells, where two axes affect one field."""

    cells: dict[str, list[str]] = Field(default_factory=dict)
    """Values that the changes apply to, by axis; an axis left out: all of its values."""
    methods: list[str] = Field(default_factory=list)
    """Labels that the changes apply to; empty: all."""
    set: Values


class Small(PresetPart):
    """Changes of the small scale."""

    config: Values = Field(default_factory=dict)
    axes: dict[str, dict[str, Values]] = Field(default_factory=dict)
    """Replacements of the full axes, by axis; an axis left out stays unchanged."""
    methods: dict[str, Values] = Field(default_factory=dict)
    """Changes to the full methods, by label."""
    leave_out: list[str] = Field(default_factory=list)
    """Labels of rows that are not run."""
    skip: list[Annotated[dict[str, list[str]], Field(min_length=1)]] = Field(default_factory=list)
    """Combinations of the axes' values that are not run, each by axis as in ``Where.cells``."""
    where: list[Where] = Field(default_factory=list)
    sweep: dict[str, list[Any]] | None = None
    """Replacement of the full sweep; None leaves it unchanged."""
    matched: dict[str, Any] = Field(default_factory=dict)
    """Values of the swept paths that all rows share under the protocol ``matched``; empty: there is none."""
    seeds: list[int] | None = Field(default=None, min_length=1)
    """Replacement of the full seeds; None leaves them unchanged."""


class Preset(PresetPart):
    """One table or figure."""

    id: str
    """Id such as ``rolora-table1``."""
    paper: str
    item: str
    """Item of the paper, such as ``Table 1``."""
    title: str
    config: Values
    """Config of all cells and methods, at the paper's size."""
    axes: dict[str, dict[str, Values]] = Field(default_factory=dict)
    """Values of each axis by name, with the changes of each value; the cells are all combinations."""
    methods: dict[str, MethodEntry] = Field(min_length=1)
    where: list[Where] = Field(default_factory=list)
    sweep: dict[str, list[Any]] = Field(default_factory=dict)
    """Values to try by path in the config, selected by validation under the first seed."""
    seeds: list[int] = Field(min_length=1)
    claims: list[Claim] = Field(min_length=1)
    small: Small
    notes: list[str] = Field(min_length=1)
    """Points where the paper is silent or a config cannot express it, and what is done instead."""

    @model_validator(mode="after")
    def _require_consistent(self) -> Self:
        for label, entry in self.methods.items():
            if entry.key not in METHODS:
                raise ValueError(
                    f"methods.{label}.key {entry.key!r} is not a method. {suggest_nearest(entry.key, METHODS)}"
                )
        for axis in self.small.axes:
            self._require("small.axes", axis, self.axes)
        if self.small.matched:
            swept = self.sweep if self.small.sweep is None else self.small.sweep
            if set(self.small.matched) != set(swept):
                raise ValueError(f"small.matched has {', '.join(self.small.matched)}, the sweep {', '.join(swept)}")
        for label in (*self.small.methods, *self.small.leave_out):
            self._require("small", label, self.methods)
        for where in (*self.where, *self.small.where):
            self._require_cells("where", where.cells)
            for label in where.methods:
                self._require("where.methods", label, self.methods)
        for skipped in self.small.skip:
            self._require_cells("small.skip", skipped)
        for claim in self.claims:
            self._require_cells("claims", claim.cells)
            for label in (claim.better, *claim.worse):
                self._require("claims", label, self.methods)
            if claim.gap is not None:
                if claim.measure not in ("score", "bytes_up", "bytes_down"):
                    raise ValueError(f"claims: a gap of {claim.measure} means nothing")
                self._require_cells("claims.gap", {claim.gap.axis: [claim.gap.before, claim.gap.after]})
        return self

    def _require_cells(self, field: str, cells: Mapping[str, list[str]]) -> None:
        for axis, values in cells.items():
            self._require(field, axis, self.axes)
            for value in values:
                self._require(f"{field}.{axis}", value, {**self.axes[axis], **self.small.axes.get(axis, {})})

    @staticmethod
    def _require(field: str, name: str, names: Mapping[str, object]) -> None:
        if name not in names:
            raise ValueError(f"{field}: {name!r} is not one of {', '.join(names)}")

    def get_axes(self, scale: Scale) -> dict[str, dict[str, Values]]:
        """Return the axes at a scale."""
        return self.axes if scale == "full" else {**self.axes, **self.small.axes}

    def get_labels(self, scale: Scale) -> tuple[str, ...]:
        """Return the rows at a scale."""
        left_out = () if scale == "full" else self.small.leave_out
        return tuple(label for label in self.methods if label not in left_out)

    def get_sweep(self, scale: Scale) -> dict[str, list[Any]]:
        """Return the values to try at a scale."""
        return self.sweep if scale == "full" or self.small.sweep is None else self.small.sweep

    def get_candidates(self, scale: Scale, protocol: Protocol, overrides: Sequence[str] = ()) -> dict[str, list[Any]]:
        """Return the values to try at a scale under a protocol.

        Args:
            overrides: Changes to all configs, each ``section.field=value``; their fields are not swept.
        """
        if protocol == "best":
            candidates = self.get_sweep(scale)
        elif protocol != "matched" or scale == "full" or not self.small.matched:
            expected = "best, or matched at the small scale of a preset that names `small.matched`"
            raise FedspanError("protocol", protocol, expected)
        else:
            candidates = {path: [value] for path, value in self.small.matched.items()}
        fixed = {text.partition("=")[0].strip() for text in overrides}
        return {path: values for path, values in candidates.items() if path not in fixed}

    @property
    def timed(self) -> bool:
        """Whether seconds are compared: then no run is reused, since its seconds are from another time."""
        return any(claim.measure == "seconds_to" for claim in self.claims)

    def get_seeds(self, scale: Scale) -> tuple[int, ...]:
        """Return the seeds at a scale."""
        return tuple(self.seeds if scale == "full" or self.small.seeds is None else self.small.seeds)


def merge(base: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Merge the values of ``changes`` over ``base``, section by section."""
    result = dict(base)
    for key, value in changes.items():
        previous = result.get(key)
        result[key] = merge(previous, value) if isinstance(previous, Mapping) and isinstance(value, Mapping) else value
    return result


@cache
def _read_texts() -> Mapping[str, str]:
    folder = files("fedspan").joinpath("presets")
    return {
        entry.name.removesuffix(".yaml"): entry.read_text(encoding="utf-8")
        for entry in sorted(folder.iterdir(), key=lambda entry: entry.name)
        if entry.name.endswith(".yaml")
    }


def _parse(name: str) -> Any:
    """Return the values in a file; libyaml, where PyYAML has it, reads all of them in a tenth of the time."""
    return yaml.load(_read_texts()[name], Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))


@cache
def read_architectures() -> Mapping[str, Mapping[str, Any]]:
    """Return the Transformers configs of the models that presets name, as plain values, by name."""
    return _parse("_architectures")


def _read_values(name: str) -> Values:
    """Return a file's values over those of the file that it extends; notes are appended.

    Files that begin with ``_`` are not presets themselves.
    """
    values = _parse(name)
    base = values.pop("extends", None)
    if base is None:
        return values
    base_values = _read_values(base)
    result: Values = {**merge(base_values, values), "notes": [*base_values.get("notes", []), *values.get("notes", [])]}
    for part in (result, result.get("small", {})):  # a null removes an axis, one of its values or a row
        if "axes" in part:
            present = {axis: option for axis, option in part["axes"].items() if option is not None}
            part["axes"] = {axis: _drop_none(option) for axis, option in present.items()}
        if "methods" in part:
            part["methods"] = _drop_none(part["methods"])
    return result


def _drop_none(values: Values) -> Values:
    return {key: value for key, value in values.items() if value is not None}


@cache
def load_preset(id: str) -> Preset:
    """Return a preset."""
    ids = [name for name in _read_texts() if not name.startswith("_")]
    if id not in ids:
        raise FedspanError("ID", id, problem=f"no preset is named {id!r}. {suggest_nearest(id, ids)}")
    return read_preset({"id": id, **_read_values(id)}, id)


def read_preset(values: Mapping[str, Any], name: str) -> Preset:
    """Read a preset from plain values."""
    with convert_validation_errors(name, Preset):
        return Preset.model_validate(values)


def list_presets() -> tuple[Preset, ...]:
    """Return all presets, by id."""
    return tuple(load_preset(name) for name in _read_texts() if not name.startswith("_"))
