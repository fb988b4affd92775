#!/usr/bin/env bash
# Make sure that a Chromium for the browser tests exists; with PAGEGLASS_NO_BROWSER=1 do nothing.
# Installs Debian's package when run as root, and says what to do otherwise.
set -euo pipefail

[ "${PAGEGLASS_NO_BROWSER:-}" != 1 ] || exit 0
for name in chromium chromium-browser google-chrome; do
    if command -v "$name" >/dev/null; then exit 0; fi
done
if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
    echo "Installing chromium for the browser tests ..."
    apt-get update -qq
    DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends chromium fonts-dejavu-core
    exit 0
fi
echo "The browser tests need Chromium. Install it (Debian: sudo apt-get install chromium)," >&2
echo "or run without them: PAGEGLASS_NO_BROWSER=1 make test" >&2
exit 1
