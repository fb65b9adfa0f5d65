"""For mkdocstrings: docstrings as a page shows them, and names as Python finds them."""

import re
from typing import Any

import griffe

# Sections are named in the plural, and a page has the options themselves where help(fddp.train_step) lists them.
SHOWN = {
    r"^Example:$": "Examples:",
    r", and their defaults:$": "",
    r"`fddp\.(\w+)`": r"[`fddp.\1`][fddp.\1]",
}


class Shown(griffe.Extension):
    """What griffe does beside reading the sources."""

    def on_instance(self, *, obj: griffe.Object, **others: Any) -> None:
        """Rewrites each docstring before it is parsed."""
        del others
        if obj.docstring:
            for pattern, shown in SHOWN.items():
                obj.docstring.value = re.sub(pattern, shown, obj.docstring.value, flags=re.MULTILINE)

    def on_package(self, *, pkg: griffe.Module, **others: Any) -> None:
        """Of a module and a function of one name, `fddp.step.whole` say, a room's name is the function."""
        del others
        for room in [module for module in pkg.modules.values() if not module.is_alias]:
            for name, source in room.imports.items():
                if source != f"{room.path}.{name}.{name}":
                    continue
                function = room[name][name]
                room[name] = griffe.Alias(name, function, parent=room)
                if pkg.imports.get(name) == f"{room.path}.{name}":
                    pkg[name] = griffe.Alias(name, function, parent=pkg)
