"""The results in words: a table's rows for each part, and one sentence for the first page."""

import datetime
from collections.abc import Callable
from typing import Any

import jax

from bench.on_gpu.machine import RANKED, Machine


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


def sentence(machine: Machine, results: dict[str, Any]) -> str:
    """A sentence for the first page about the measured quantities, and no others."""
    clauses = [words for words in (_same(results), _ranks(results), _cost(results)) if words]
    bad = [f"{name} ({what})" for name, what in unsound(results)]
    where = (
        f"{machine.gpus} × {machine.kind}"
        if machine.on_gpu
        else "CPUs, in a rehearsal of what a GPU is asked"
    )
    date = datetime.datetime.now(datetime.UTC).date()
    measured = "; ".join(clauses) or "nothing was measured"
    failed = f" Not so: {', '.join(bad)}." if bad else ""
    return f"On {where} (JAX {jax.__version__}, {date}): {measured}.{failed}"


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


def _same(results: dict[str, Any]) -> str:
    entries = _sound(results, "same")
    if not entries:
        return ""
    equal = sum(entry["fddp"]["bits_equal"] for entry in entries.values())
    most = max(entry["fddp"]["loss"] for entry in entries.values())
    return (
        f"a step trains {len(entries)} models as plain JAX does ({equal} to the bit, losses "
        f"within {most:.0e})"
    )


def _ranks(results: dict[str, Any]) -> str:
    entry = _sound(results, "ranks").get(RANKED)
    if entry is None:
        return ""
    subject = (
        f"{entry['ranks']} ranks over "
        f"{entry['backend'].upper() if entry['backend'] == 'nccl' else entry['backend'].title()}"
    )
    return f"{subject} have one replica's losses within {entry['largest_difference']:.0e}"


def _cost(results: dict[str, Any]) -> str:
    ratios = [entry["fddp / by hand"]["median"] for entry in _sound(results, "cost").values()]
    return (
        f"a step takes {min(ratios):.2f} to {max(ratios):.2f} of a step by hand" if ratios else ""
    )


def _sound(results: dict[str, Any], name: str) -> dict[str, Any]:
    figures = results.get(name, {}).get("figures", {})
    return {what: entry for what, entry in figures.items() if verdict(entry) == "ok"}


def _in_words(figures: dict[str, Any], tell: Callable[[dict[str, Any]], str]) -> str:
    if "failed" in figures:
        return _end_of(figures["failed"])
    wrong = f"{figures['wrong']}: " if "wrong" in figures else ""
    return wrong + tell(figures)


def _end_of(text: str) -> str:
    """The end of an error on one line."""
    return " ".join(text.split())[-400:]
