"""For mkdocs: pages and pictures that lie beside docs/, where a link in a page finds them without
mkdocs too."""

import re
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files, InclusionLevel
from mkdocs.structure.pages import Page

BESIDE = ("CHANGELOG.md", "CONTRIBUTING.md", "bench/README.md", "bench/results/*.png")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Adds them under the names by which pages link to them: `../bench/README.md`."""
    root = Path(config.config_file_path).parent
    for path in sorted(path for pattern in BESIDE for path in root.glob(pattern)):
        name = path.relative_to(root).as_posix()
        file = File.generated(
            config, f"../{name}", abs_src_path=str(path), inclusion=InclusionLevel.INCLUDED
        )
        file.dest_uri = File.generated(config, name, content="").dest_uri
        vars(file)["edit_uri"] = file.src_uri  # mkdocs has none for a generated file
        files.append(file)
    return files


def on_page_markdown(markdown: str, page: Page, **others: Any) -> str:
    """Their own links into docs/ start, in the site, at its top."""
    del others
    return (
        re.sub(r"\]\((\.\./)*docs/", "](/", markdown)
        if page.file.src_uri.startswith("../")
        else markdown
    )
