"""The results in words: a table's rows for each part."""

from collections.abc import Callable
from typing import Any


def rows(
    name: str, result: dict[str, Any], tell: Callable[[dict[str, Any]], str]
) -> list[tuple[str, ...]]:
    """The rows of one part in the table; `tell` puts figures into words."""
    table_rows = [
        (name, what, verdict(figures), _in_words(figures, tell))
        for what, figures in result["figures"].items()
    ]
    if "failed" in result:
        table_rows.append(
            (name, f"after {result['seconds']:.0f} s", "FAILED", _end_of(result["failed"]))
        )
    return table_rows or [(name, "", "–", "there is nothing to ask on this machine")]


def verdict(figures: dict[str, Any]) -> str:
    """True if figures are present and sound."""
    return "FAILED" if "failed" in figures else "WRONG" if "wrong" in figures else "ok"


def unsound(results: dict[str, Any]) -> list[tuple[str, str]]:
    """The failed and wrong quantities, each with its part."""
    inside = [
        (name, what)
        for name, result in results.items()
        for what, figures in result["figures"].items()
        if verdict(figures) != "ok"
    ]
    return [
        *inside,
        *((name, "ended early") for name, result in results.items() if "failed" in result),
    ]


def _in_words(figures: dict[str, Any], tell: Callable[[dict[str, Any]], str]) -> str:
    if "failed" in figures:
        return _end_of(figures["failed"])
    wrong = f"{figures['wrong']}: " if "wrong" in figures else ""
    return wrong + tell(figures)


def _end_of(text: str) -> str:
    """The end of an error on one line."""
    return " ".join(text.split())[-400:]
