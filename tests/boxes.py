"""The outputs that README and pages show, and the scripts or commands that print them.

A block without a language is an output: the paragraph before it ends in "`command` prints", or
"prints" alone after a block with the script or the command; "ends with" shows the last lines only.
A drawing has an arrow, or the language `text`.
"""

import re
from collections.abc import Iterator
from typing import NamedTuple

import pytest

BLOCK = re.compile(r"^```(\w*)[^\n]*\n(.*?)^```$", re.DOTALL | re.MULTILINE)
PRINTS = re.compile(r"(?:`([^`]+)` |^)(prints|ends with)(, [^`]*)?$")
# Values of this machine: its speed, and the bits of its processor's sums.
OWN_VALUES = re.compile(
    r"[\d,.]+ samples/s|\d+ ms a step \(median\) · \d+ s|(?<=parameters )[0-9a-f]{16}"
)
NUMBER = re.compile(r"(?<![\w.])\d[\d,]*(?:\.\d+)?(?!\w)")
TOLERANCE = 0.1  # of a number that training computes, on other processors and versions of XLA


class Box(NamedTuple):
    """An output on a page."""

    output: str
    """Its text."""
    language: str
    """The language of its source: python for a script, bash for a command."""
    source: str
    """The script or the command; empty if the page does not show it."""
    script: str
    """The last script before it, which the command may start."""
    whole: bool
    """False if the output only ends with the text."""


def boxes(page: str) -> Iterator[Box]:
    """The outputs of a page, in order."""
    end, language, source, script = 0, "", "", ""
    for block in BLOCK.finditer(page):
        before = page[end : block.start()].strip()
        shown = PRINTS.search(before.split("\n\n")[-1].replace("\n", " "))
        if not block[1] and "▶" not in block[2]:
            if shown and shown[1]:
                language, source = "bash", shown[1]
            elif not shown or shown[0] != before.replace("\n", " "):
                language, source = "", ""
            whole = shown is not None and shown[2] == "prints"
            yield Box(block[2], language, source, script, whole)
        end, language, source = block.end(), block[1], block[2]
        if language == "python":
            script = source


def check_output(box: Box, printed: str, tolerance: float = TOLERANCE) -> None:
    """Compares a printed text with a page's; numbers of a training may differ by a share."""
    shown, last = _lines(box.output), _lines(printed)
    if not box.whole:
        last = last[-len(shown) :]
    assert [NUMBER.sub("#", line) for line in last] == [NUMBER.sub("#", line) for line in shown]
    for new, old in zip(last, shown):
        for value, expected in zip(NUMBER.findall(new), NUMBER.findall(old)):
            _, point, decimals = expected.partition(".")
            if point or "%" in old:
                unit = 10.0 ** -len(decimals)  # the last digit may be rounded the other way
                close = pytest.approx(_number(expected), rel=tolerance, abs=1.01 * unit)
                assert _number(value) == close, f"{new}\n{old}"
            else:
                assert value == expected, f"{new}\n{old}"


def _number(text: str) -> float:
    return float(text.replace(",", ""))


def _lines(text: str) -> list[str]:
    """The lines without the values of a machine, and without the spaces that fit them to these."""
    return [
        re.sub(r" +", " ", OWN_VALUES.sub("…", line)).strip() for line in text.strip().splitlines()
    ]
