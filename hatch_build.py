"""For hatchling: README.md as a package index shows it, without the repository's other files."""

import re
from pathlib import Path
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface

LINK = re.compile(r"\[([^\]]+)\]\((?!https?:|#)([^)\s]+)\)")


class CustomMetadataHook(MetadataHookInterface):
    """Makes relative links absolute; they become plain text while no repository is set."""

    def update(self, metadata: dict[str, Any]) -> None:
        repository = self.config["repository"]
        link = r"\1"
        if repository:
            link = rf"[\1]({repository}/blob/v{metadata['version']}/\2)"
        text = (Path(self.root) / "README.md").read_text(encoding="utf-8")
        metadata["readme"] = {"content-type": "text/markdown", "text": LINK.sub(link, text)}
