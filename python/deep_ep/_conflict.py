"""Another distribution that installs a package of this name in the same place."""

from __future__ import annotations

from importlib import metadata
from pathlib import Path

#: The distribution of this name on PyPI, and what DeepEP's own build is called.
OTHER = "deep_ep"


def check() -> None:
    """Fails if the files of this package may be a mixture of two distributions.

    Raises:
        ImportError: with what to do.
    """
    try:
        other = metadata.distribution(OTHER)
    except metadata.PackageNotFoundError:
        return
    here = Path(__file__).resolve().parent
    if Path(str(other.locate_file("deep_ep"))).resolve() != here:
        return
    raise ImportError(
        f"deep_ep {other.version} (distribution {OTHER!r}) is installed in {here}, over or under "
        "this package (distribution 'deep-ep-rs'). Uninstall both, then install one: "
        "pip uninstall deep_ep deep-ep-rs"
    )
