"""Which version of the package this is."""

from importlib.metadata import PackageNotFoundError, version


def package_version() -> str:
    """Return the installed version, for people and for the history."""
    try:
        return version("pageglass")
    except PackageNotFoundError:
        return "unknown (not installed)"
