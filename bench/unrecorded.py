"""`pageglass serve` without a live view and without a history, to measure what these cost.

`python -m bench.unrecorded serve …` takes the same command line. Records of steps and requests are still
made, by the engine and by the services; nobody folds them, shows them or writes them down. There is no such
setting, since a server that records nothing is of no use to anybody. Its threads can be probed
(`bench.server_probe`).
"""

from app.__main__ import run
from app.db.writer import HistoryWriter
from app.db.writes import Write
from app.realtime.hub import EventHub
from bench.server_probe import install
from engine.records import StepRecord


def main() -> None:
    """Cut the two places that all records pass through, then serve."""

    def publish_nothing(_hub: EventHub, _records: list[StepRecord]) -> None:
        return

    def put_nothing(_writer: HistoryWriter, *_writes: Write) -> bool:
        return True

    EventHub.publish = publish_nothing  # type: ignore[method-assign, assignment]
    HistoryWriter.put = put_nothing  # type: ignore[method-assign, assignment]
    install()
    run()


if __name__ == "__main__":
    main()
