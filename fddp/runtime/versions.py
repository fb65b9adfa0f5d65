"""Versions of installed packages."""

from importlib.metadata import PackageNotFoundError, version


def installed(name: str) -> str | None:
    """Returns the version of a package, or None if it is not installed."""
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def fddp_version() -> str:
    """Returns the version of fddp, or words for a checkout without one."""
    return installed("fddp") or "a checkout, not installed"
