"""The profile as one HTML page: heat maps of the experts' loads, curves, and what they say.

The page holds everything it needs; it asks no other host for anything.
"""

from __future__ import annotations

import html
from typing import Any

import numpy as np
import plotly.graph_objects as go
from plotly.io import to_html

from app.profile_report import ProfileReport

_STYLE = (
    "body{font-family:sans-serif;max-width:70rem;margin:2rem auto;padding:0 1rem}"
    "table{border-collapse:collapse;font-size:.85rem}td,th{padding:.2rem .5rem;text-align:right}"
    "td:first-child,th:first-child{text-align:left}tr:nth-child(even){background:#f4f4f4}"
)


def page(title: str, report: ProfileReport) -> str:
    """The page's text."""
    figures = [_heat_map(label, load) for label, load in report.loads.items()]
    figures.append(_curve(report.distinct_by_batch()))
    drawn = [
        to_html(figure, full_html=False, include_plotlyjs=at == 0)
        for at, figure in enumerate(figures)
    ]
    sentences = "".join(f"<li>{html.escape(text)}</li>" for text in report.reading())
    return (
        f"<!doctype html><html><head><meta charset='utf-8'><title>{html.escape(title)}</title>"
        f"<style>{_STYLE}</style></head><body><h1>{html.escape(title)}</h1>"
        f"<ul>{sentences}</ul>{_table(report)}{''.join(drawn)}</body></html>"
    )


def _heat_map(label: str, load: Any) -> go.Figure:
    """A row a layer, a column an expert; 1 is an even share."""
    even = load / np.maximum(load.mean(axis=1, keepdims=True), 1e-9)
    figure = go.Figure(
        go.Heatmap(
            z=even,
            colorscale="Viridis",
            colorbar={"title": "x even"},
            hovertemplate="layer %{y}, expert %{x}: %{z:.2f} x even<extra></extra>",
        )
    )
    figure.update_layout(
        title=f"Load of experts: {label}",
        xaxis_title="expert",
        yaxis_title="MoE layer",
        height=max(260, 16 * len(load) + 160),
    )
    return figure


def _curve(rows: list[dict[str, float]]) -> go.Figure:
    batches = [row["batch"] for row in rows]
    figure = go.Figure()
    for key, name in (("distinct", "seen"), ("even", "if drawn evenly")):
        figure.add_scatter(x=batches, y=[row[key] for row in rows], name=name, mode="lines+markers")
    figure.update_layout(
        title="Distinct experts a layer in one step",
        xaxis={"title": "tokens in the step", "type": "log"},
        yaxis_title="experts",
    )
    return figure


def _table(report: ProfileReport) -> str:
    rows = list(report.as_dict()["rows"])
    heads = "".join(f"<th>{html.escape(name.replace('_', ' '))}</th>" for name in rows[0])
    cells = "".join(
        "<tr>"
        + "".join(f"<td>{html.escape(_text(value))}</td>" for value in row.values())
        + "</tr>"
        for row in rows
    )
    return f"<table><tr>{heads}</tr>{cells}</table>"


def _text(value: Any) -> str:
    return "" if value is None else f"{value:,}" if isinstance(value, int) else str(value)
