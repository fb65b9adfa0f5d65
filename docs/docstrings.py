"""For mkdocstrings: docstrings as a page shows them, and names as Python finds them."""

import re
from typing import Any

import griffe

# Sections are named in the plural.
SHOWN = {
    r"^Example:$": "Examples:",
    r"`fddp\.(\w+)`": r"[`fddp.\1`][fddp.\1]",
}
# Members of public classes that only fddp's own rooms use.
INTERNAL = {
    "comm.communicator.Communicator": ("in_lane", "native16", "sent"),
    "comm.group.Group": (
        "communicator",
        "hosts",
        "journal",
        "make_subgroup",
        "placement",
        "transport",
    ),
    "step.schedules.late_sums.StateInFlight": (
        "accumulated",
        "arrays",
        "late",
        "tree_flatten",
        "tree_unflatten",
    ),
    "training.settled_step.SettledStep": (
        "local_form",
        "optimizer",
        "settle",
        "settled",
        "skips",
        "steps",
        "training",
    ),
    "training.train_step.TrainStep": ("on",),
}


class Shown(griffe.Extension):
    """What griffe does beside reading the sources."""

    def on_instance(self, *, obj: griffe.Object, **others: Any) -> None:
        """Rewrites each docstring before it is parsed."""
        del others
        if obj.docstring:
            for pattern, shown in SHOWN.items():
                obj.docstring.value = re.sub(
                    pattern, shown, obj.docstring.value, flags=re.MULTILINE
                )

    def on_package(self, *, pkg: griffe.Module, **others: Any) -> None:
        """Leaves out what is internal, and lets a room's name be a function that has its module's
        name."""
        del others
        for path, names in INTERNAL.items():
            for name in names:
                del pkg[path].members[name]
        for room in [module for module in pkg.modules.values() if not module.is_alias]:
            inner = {
                name: source.removeprefix(f"{room.path}.")
                for name, source in room.imports.items()
                if source.startswith(f"{room.path}.")
            }
            shadowed = inner.keys() & room.modules.keys()
            sources = {
                name: room[source]
                for name, source in inner.items()
                if name in shadowed or source.split(".")[0] in shadowed
            }
            for name, source in sources.items():
                room[name] = griffe.Alias(name, source, parent=room)
                if pkg.imports.get(name) == f"{room.path}.{name}":
                    pkg[name] = griffe.Alias(name, source, parent=pkg)
