"""Where the browser is that the browser tests drive."""

import shutil

CHROMIUM_NAMES = ("chromium", "chromium-browser", "google-chrome")
"""As scripts/ensure_chromium.sh looks for them, in this order."""


def find_chromium() -> str:
    """Return the path of the first Chromium on PATH; fails if there is none."""
    for name in CHROMIUM_NAMES:
        found = shutil.which(name)
        if found is not None:
            return found
    raise AssertionError(f"None of {', '.join(CHROMIUM_NAMES)} is on PATH; run scripts/ensure_chromium.sh.")
