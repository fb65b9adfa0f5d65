"""The values that the tasks of a step read and write, as names."""

from collections import Counter

from jaxtyping import PyTree

from fddp.wording import leaf_names

# The replicated arrays of the state that a step takes.
STATE = "state"
# The shards of the state that a step takes.
SHARDS = "shards"
# The shards of the next state.
NEW = "new"
# The result of a step: the next state, then its report.
RESULT = "result"
# A message of one replica.
MESSAGE = "message"
# A replicated value that a stage of an update passes to the next stage.
HANDED = "handed on"
# The slices that an update has written so far, each replica's own.
WRITTEN = "written"
# The offset of the first slice of some rounds of a loop.
BEGIN = "round"
# The kinds of values that are equal on all replicas; of other kinds each replica has its own value.
EQUAL = frozenset({STATE, RESULT, HANDED, BEGIN, "sum", "whole", "bytes"})


class Value(str):
    """A value of a list: a record that prints as its name, and is identified by it.

    Example:
      >>> Value("message", 2), Value("state", path="params/w").path
      ('message 2', 'params/w')
    """

    kind: str
    """Its kind: "state", "message", "sum", "stage" …"""
    number: int | None
    """The number of the message, or of the stage that computes it."""
    path: str
    """Its path in a tree."""

    def __new__(cls, kind: str, number: int | None = None, path: str = "") -> "Value":
        text = kind
        if number is not None:
            text += f" {number}"
        if path:
            text += f"/{path}"
        value = super().__new__(cls, text)
        value.kind = kind
        value.number = number
        value.path = path
        return value

    @property
    def equal_everywhere(self) -> bool:
        """True if all replicas have the same value."""
        return self.kind in EQUAL

    @property
    def replaces(self) -> "Value | None":
        """The array of the state that this result replaces in the next step, if any."""
        if self.kind == NEW:
            return Value(SHARDS, path=self.path)
        head, _, path = self.path.partition("/")
        if self.kind == RESULT and head == "0":
            return Value(STATE, path=path)
        return None


# The bytes sent for each message of a list, in order; known once the last message has arrived.
BYTES = Value("bytes")


def names_of(kind: str, tree: PyTree) -> list[Value]:
    """A value of a kind for each leaf of a tree, by its path."""
    paths = leaf_names(tree)
    counts = Counter(paths)
    values = list[Value]()
    for at, path in enumerate(paths):
        if counts[path] > 1:  # two paths may read alike: {"a/b": …} and {"a": {"b": …}}
            path += f" {at}"
        values.append(Value(kind, path=path))
    return values
