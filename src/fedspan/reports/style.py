"""Style of the figures: colours that most people can distinguish, with dashes, markers and patterns."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import plotly.graph_objects as go

__all__ = [
    "COLOURS",
    "DASHES",
    "MANY",
    "MARKS",
    "PATTERNS",
    "Figure",
    "faint",
    "menu",
    "styled",
    "whole_rounds",
]

Figure = go.Figure
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#8f7a00", "#56b4e9", "#6b4c9a", "#444444")
"""Okabe and Ito's colours, which most colour-blind people can distinguish, darkened where they were pale."""
DASHES = ("solid", "dash", "dot", "dashdot", "longdash", "longdashdot")
MARKS = ("circle", "square", "diamond", "triangle-up", "x", "cross", "star", "triangle-down")
PATTERNS = ("", "/", "x", ".", "-", "|", "+", "\\")
MANY = 60
"""Number of clients above which individual clients are not readable."""


def faint(colour: str) -> str:
    """Return a translucent colour for a band behind a line of the same colour."""
    red, green, blue = (int(colour[at : at + 2], 16) for at in (1, 3, 5))
    return f"rgba({red},{green},{blue},0.15)"


def menu(buttons: Sequence[Mapping[str, Any]], *, y: float = 1.02) -> dict[str, Any]:
    """Return a row of buttons above a figure."""
    place = {"x": 0, "xanchor": "left", "y": y, "yanchor": "bottom", "pad": {"b": 4}}
    return {"type": "buttons", "direction": "right", "buttons": list(buttons), "showactive": True, **place}


def whole_rounds(last: int) -> int:
    """Return the whole number of rounds between two ticks."""
    return max(1, math.ceil(last / 12))


def styled(figure: Figure, height: int = 420) -> Figure:
    """Apply the page's style to a figure and return it."""
    figure.update_layout(
        template="plotly_white",
        height=height,
        margin={"l": 10, "r": 10, "t": 60, "b": 10},
        legend={"orientation": "h", "yref": "container", "y": 0, "yanchor": "bottom", "x": 0},
        font={"size": 13},
        hoverlabel={"namelength": -1},
        paper_bgcolor="rgba(0,0,0,0)",
    )
    figure.update_xaxes(automargin=True)
    figure.update_yaxes(automargin=True)
    return figure
