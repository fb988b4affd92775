"""`pageglass serve` as it is, but for a probe of its threads: `python -m bench.recorded serve …`.

The same command line; see `bench.server_probe` and `bench.overhead`.
"""

from app.__main__ import run
from bench.server_probe import install

if __name__ == "__main__":
    install()
    run()
