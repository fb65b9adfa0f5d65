"""For hatchling: README.md as a package index shows it, and the compiled part of fddp."""

import os
import re
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface
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


class CustomBuildHook(BuildHookInterface):
    """Compiles the custom calls of `fddp/comm/lane.cc`, where a C++ compiler is.

    Without them messages inside a program do not overlap; `python -m fddp doctor` says so. The
    library has no Python ABI, and XLA's calls are stable: one serves all versions of both.
    """

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        compiler = shutil.which(os.environ.get("CXX", "c++"))
        if compiler is None or sys.platform != "linux":
            return
        import jax

        # Without assertions and symbols the library does not name the folders of its build.
        options = "-O2", "-std=c++17", "-fPIC", "-shared", "-w", "-DNDEBUG", "-s"
        library = Path(self.root) / "fddp" / "comm" / "liblane.so"
        new = library.with_suffix(f".{os.getpid()}")
        files = "-I", jax.ffi.include_dir(), "fddp/comm/lane.cc", "-o", new
        built = subprocess.run([compiler, *options, *files], cwd=self.root, check=False)
        if built.returncode == 0:
            new.replace(library)  # in one move: a process may use or load the old one
            build_data["artifacts"].append("fddp/comm/liblane.so")
            build_data["pure_python"] = False
            machine = sysconfig.get_platform().replace("-", "_").replace(".", "_")
            build_data["tag"] = f"py3-none-{machine}"
