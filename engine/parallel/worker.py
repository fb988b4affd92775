"""The process of a rank other than 0: `python -m engine.parallel.worker REPORTS`, started by `RankProcess`.

It is told what to load through its standard input, then computes its share of every step that comes there,
and ends with it: when rank 0 closes it, or is gone. Signals that ask a server to stop are left to rank 0,
which has requests to end first. `REPORTS` is the descriptor of the pipe for reports.
"""

import logging
import os
import select
import signal
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path

import msgspec
import torch

from engine.errors import EngineError, ModelError
from engine.model.check import open_model
from engine.model.config import ModelConfig
from engine.model.decoder import Decoder, DecoderWeights
from engine.model.shards import Shard
from engine.model.weights import load_weights
from engine.parallel.fingerprint import find_fingerprint
from engine.parallel.group import RankGroup
from engine.parallel.messages import (
    PoolSpec,
    RankReport,
    RankSpec,
    Stage,
    read_frame,
    unpack_inputs,
)
from engine.runner.arithmetic import make_arithmetic

logger = logging.getLogger("engine.parallel.worker")

_INPUT = 0
_LEFT_TO_RANK_0 = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_SHARE_STEP = 0.01
_MAX_MESSAGE_CHARS = 600
"""Lines of up to 4,096 bytes are written to a pipe whole, and a character takes six at most in JSON."""


class Reports:
    """The pipe to rank 0. Any thread may send; a report that finds no room in it is lost."""

    def __init__(self, file_descriptor: int) -> None:
        """Take the pipe."""
        os.set_blocking(file_descriptor, False)
        self._file_descriptor = file_descriptor
        self._share = 0.0

    def send(self, report: RankReport) -> None:
        """Write a line, whole or not at all."""
        with suppress(BlockingIOError, BrokenPipeError):  # rank 0 does not run at the moment, or ends
            os.write(self._file_descriptor, msgspec.json.encode(report) + b"\n")

    def send_share(self, share: float) -> None:
        """Tell how much of the weights is loaded, now and then."""
        if share - self._share >= _SHARE_STEP:
            self._share = share
            self.send(RankReport(Stage.LOADING, share))

    def keep_beating(self, interval_s: float) -> None:
        """Send signs of life until the standard input is closed; then end the process, whatever it does."""
        poller = select.poll()
        poller.register(_INPUT, 0)  # without an event: its end is reported in any case
        while not poller.poll(1000 * interval_s):
            self.send(RankReport())
        os._exit(0)


def main() -> None:
    """Serve until rank 0 has enough; ends the process."""
    for signal_number in _LEFT_TO_RANK_0:
        signal.signal(signal_number, signal.SIG_IGN)
    reports = Reports(int(sys.argv[1]))
    code = 0
    try:
        frame = read_frame(_INPUT)
        if frame is not None:
            _serve(msgspec.json.decode(frame, type=RankSpec), reports)
    except Exception as error:
        if not isinstance(error, EngineError):
            logger.exception("The rank ends")
        reports.send(RankReport(Stage.FAILED, message=_describe(error)))
        code = 1
    # Not through the end of the interpreter: threads of torch may wait there for ranks that are gone.
    os._exit(code)


def _serve(spec: RankSpec, reports: Reports) -> None:
    _configure_logging(spec)
    beating = threading.Thread(target=reports.keep_beating, args=(spec.beat_s,), name="beat", daemon=True)
    beating.start()
    if spec.num_threads:
        torch.set_num_threads(spec.num_threads)
    if torch.device(spec.device).type == "cuda":
        torch.cuda.set_device(spec.device)
    with torch.inference_mode():
        _compute_steps(spec, reports)


def _compute_steps(spec: RankSpec, reports: Reports) -> None:
    """Load, wait for the size of the pool, connect; then compute what comes, until nothing comes any more."""
    group = RankGroup(Shard(spec.rank, spec.size))
    device, dtype = torch.device(spec.device), getattr(torch, spec.dtype)
    config, weights = _load(spec, dtype, group.shard, reports)
    frame = read_frame(_INPUT)
    if frame is None:
        return
    pool = msgspec.json.decode(frame, type=PoolSpec)
    arithmetic = make_arithmetic(spec.attention, config, dtype, device, group)
    decoder = Decoder(config, weights, pool.num_positions, arithmetic)
    cache = decoder.make_cache(pool.num_blocks, pool.block_size)
    reports.send(RankReport(Stage.READY))
    group.connect(Path(pool.store_path), spec.backend)
    while (frame := read_frame(_INPUT)) is not None:
        decoder.forward(decoder.make_batch(unpack_inputs(frame)), cache)


def _load(
    spec: RankSpec, dtype: torch.dtype, shard: Shard, reports: Reports
) -> tuple[ModelConfig, DecoderWeights]:
    """Return the whole model's configuration and this rank's share of the weights."""
    reports.send(RankReport(Stage.LOADING))
    started_s = time.monotonic()
    files = open_model(Path(spec.model_path))
    if find_fingerprint(files) != spec.fingerprint:
        raise ModelError(f"{spec.model_path}: the model was changed after the server had loaded it.")
    weights = load_weights(files, dtype, torch.device(spec.device), reports.send_share, shard)
    logger.info("Loaded a share of the weights in %.1f s", time.monotonic() - started_s)
    reports.send(RankReport(Stage.LOADED, 1.0))
    return files.config, weights


def _configure_logging(spec: RankSpec) -> None:
    """Log as the server does (app/telemetry.py), and say which rank it is."""
    formatter = logging.Formatter(
        f"%(asctime)s.%(msecs)03dZ %(levelname)s rank {spec.rank} %(name)s: %(message)s", "%Y-%m-%dT%H:%M:%S"
    )
    formatter.converter = time.gmtime
    handler = logging.StreamHandler()
    handler.setFormatter(formatter)
    logging.basicConfig(level=spec.log_level, handlers=[handler])


def _describe(error: Exception) -> str:
    """Say it in one line that a pipe takes whole."""
    text = " ".join(str(error).split())[:_MAX_MESSAGE_CHARS]
    if isinstance(error, EngineError):
        return text
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


if __name__ == "__main__":
    main()
