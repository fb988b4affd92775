"""How close to exact a number format is: `python -m bench.quality --dtype q4`.

The oracle is the plain torch path in fp32 on the weights as the file has them. Prompts: the first question of
each of MT-bench's 80 conversations (app/data), in the model's chat template up to where the answer begins,
7,988 tokens in all with the default model; no answers are generated. At every position of every prompt the
next token's distribution is compared with the oracle's:

  KL         mean over positions of sum p log(p / q), p the oracle's probabilities, in nats
  agreement  share of positions where the most likely token is the same

Both are also given without the beginning that all prompts share (the template's system message), which the
first figures count 80 times. --prompts cuts the number of prompts down to try something out.

With --peer another engine takes our place, run by its own Python from --home (see `python -m bench.peers`):
openvino-… is the exported model itself with its default properties, not the batching pipeline around it;
transformers is the model in bf16; llamacpp-… is libllama, by a small program that is compiled once.
"""

import argparse
import json
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from app.model_store import resolve_model
from bench.common import ROOT, end_on_signal, print_table, versions, write_json
from bench.own_engine import CACHE_DIR, EngineOptions, add_engine_options, engine_options, make_load_request
from bench.peers.install import install
from bench.peers.logits import LOGITS_PEERS, PeerLogits
from bench.peers.table import DEFAULT_HOME, Home
from engine.loading import load_engine
from engine.model.check import ModelFiles, open_model
from engine.model.decoder import Decoder
from engine.model.tokenizer_store import load_tokenizer
from engine.model.weights import load_weights
from engine.runner.batch import make_inputs
from engine.runner.native_runner import NativeRunner
from engine.sampling_params import SamplingParams
from engine.scheduling.output import ScheduledSequence
from engine.sequence import EngineRequest, Sequence

Logits = NDArray[np.float32]
LogitsOf = Callable[[list[int]], Logits]
"""From the token ids of a prompt to the logits (tokens, vocab_size) after each of them."""

MAX_TOKENS = 1024
_BLOCK_SIZE = 16


def read_prompts(files: ModelFiles, limit: int | None) -> list[list[int]]:
    """Return the token ids of the prompts."""
    tokenizer = load_tokenizer(files, Path(CACHE_DIR))
    lines = (ROOT / "app/data/mt-bench.jsonl").read_text(encoding="utf-8").splitlines()[:limit]
    return [
        tokenizer.encode_chat([{"role": "user", "content": json.loads(line)["turns"][0]}]) for line in lines
    ]


class TorchLogits:
    """The torch path without an engine around it."""

    def __init__(self, files: ModelFiles, dtype: torch.dtype) -> None:
        """Load the weights and make room for one prompt."""
        device = torch.device("cpu")
        with torch.inference_mode():
            weights = load_weights(files, dtype, device, lambda _: None)
            self._decoder = Decoder(files.config, weights, MAX_TOKENS)
            self._cache = self._decoder.make_cache(MAX_TOKENS // _BLOCK_SIZE, _BLOCK_SIZE)

    @torch.inference_mode()
    def __call__(self, token_ids: list[int]) -> Logits:
        """Return the logits (tokens, vocab_size)."""
        request = EngineRequest(request_id="", prompt_token_ids=token_ids, sampling_params=SamplingParams())
        sequence = Sequence(0, request, max_tokens=1)
        sequence.block_table = list(range(-(-len(token_ids) // _BLOCK_SIZE)))
        inputs = make_inputs([ScheduledSequence(sequence, 0, len(token_ids))], _BLOCK_SIZE)
        batch = self._decoder.make_batch(inputs)
        batch.logits_rows = torch.arange(len(token_ids))  # (tokens) int64
        logits: Logits = self._decoder.forward(batch, self._cache).float().numpy()
        return logits


def own_logits(options: EngineOptions) -> tuple[LogitsOf, str]:
    """Return what gives our engine's logits, and a description."""
    loaded = load_engine(make_load_request(options), lambda _: None)
    runner = loaded.core.runner
    if isinstance(runner, NativeRunner):
        return runner.logits, str(loaded.info)
    dtype = torch.bfloat16 if loaded.info.dtype == "bf16" else torch.float32
    return TorchLogits(open_model(resolve_model(options.model)), dtype), str(loaded.info)


@dataclass
class Comparison:
    """What was found at each position, prompt by prompt: KL in nats, and whether the greedy token agrees."""

    kl: list[NDArray[np.float64]] = field(default_factory=list)
    agrees: list[NDArray[np.bool_]] = field(default_factory=list)

    def add(self, exact: Logits, tested: Logits) -> None:
        """Compare logits (tokens, vocab_size) of one prompt."""
        log_p = torch.from_numpy(exact).double().log_softmax(-1)  # (tokens, vocab_size) float64
        log_q = torch.from_numpy(tested).double().log_softmax(-1)  # (tokens, vocab_size) float64
        self.kl.append((log_p.exp() * (log_p - log_q)).sum(-1).numpy())
        self.agrees.append(exact.argmax(-1) == tested.argmax(-1))

    def summary(self, start: int) -> dict[str, float]:
        """Return the means over the positions from `start` on of all prompts."""
        kl = np.concatenate([values[start:] for values in self.kl])  # (positions) float64
        agrees = np.concatenate([values[start:] for values in self.agrees])  # (positions) bool
        return {
            "positions": float(len(kl)),
            "kl": float(kl.mean()),
            "kl_p99": float(np.quantile(kl, 0.99)),
            "agreement_percent": float(100 * agrees.mean()),
        }


def compare(prompts: list[list[int]], exact: LogitsOf, tested: LogitsOf) -> Comparison:
    """Compare all prompts, one at a time."""
    comparison = Comparison()
    for token_ids in prompts:
        comparison.add(exact(token_ids), tested(token_ids))
    return comparison


def _shared_length(prompts: list[list[int]]) -> int:
    columns: Iterator[tuple[int, ...]] = zip(*prompts, strict=False)
    return next((index for index, column in enumerate(columns) if len(set(column)) > 1), 0)


def main() -> None:
    """Measure and print."""
    options = _parse()
    end_on_signal()
    engine = replace(engine_options(options), kv_memory="64MiB")
    files = open_model(resolve_model(engine.model))
    prompts = read_prompts(files, options.prompts)
    print(versions())
    with ExitStack() as stack:
        if options.peer is None:
            tested, description = own_logits(engine)
        else:
            home = Home(options.home.expanduser().absolute())
            install(options.peer, home)
            peer = stack.enter_context(PeerLogits(options.peer, home, files.config.vocab_size))
            tested, description = peer.__call__, options.peer
        comparison = compare(prompts, TorchLogits(files, torch.float32), tested)
    starts = {"all positions": 0, "without the shared beginning": _shared_length(prompts)}
    summaries: dict[str, Any] = {name: comparison.summary(start) for name, start in starts.items()}
    rows = [
        [name, int(row["positions"]), f"{row['kl']:.5f}", f"{row['kl_p99']:.4f}", row["agreement_percent"]]
        for name, row in summaries.items()
    ]
    print(f"{description}; {len(prompts)} prompts")
    print_table(["against fp32", "positions", "mean KL", "p99 KL", "agreement %"], rows)
    write_json(options.json, {"tested": description, "prompts": len(prompts), **summaries})


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--prompts", type=int, help="only the first so many prompts")
    parser.add_argument("--peer", choices=LOGITS_PEERS, help="another engine in place of ours")
    parser.add_argument("--home", type=Path, default=DEFAULT_HOME, help="folder of the peers (%(default)s)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures to a file, too")
    add_engine_options(parser)
    return parser.parse_args()


if __name__ == "__main__":
    main()
