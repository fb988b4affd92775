"""Writes the logits of a model exported for OpenVINO, see `bench.peers.logits`: `… FOLDER [PRECISION]`."""

import importlib
import json
import os
import sys
from typing import Any

import numpy as np

openvino: Any = importlib.import_module("openvino")


def main() -> None:
    """Answer prompts until there are no more."""
    output = os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    precision = {"INFERENCE_PRECISION_HINT": sys.argv[2]} if len(sys.argv) > 2 else {}
    model = openvino.Core().compile_model(f"{sys.argv[1]}/openvino_model.xml", "CPU", precision)
    names = {name for port in model.inputs for name in port.get_names()}
    request = model.create_infer_request()
    for line in sys.stdin:
        token_ids = np.array([json.loads(line)], dtype=np.int64)  # (1, tokens)
        inputs = {
            "input_ids": token_ids,
            "attention_mask": np.ones_like(token_ids),  # (1, tokens)
            "position_ids": np.arange(token_ids.shape[1], dtype=np.int64)[None],  # (1, tokens)
            "beam_idx": np.zeros(1, dtype=np.int32),
        }
        request.reset_state()  # the cache of the prompt before
        outputs = request.infer({name: array for name, array in inputs.items() if name in names})
        logits = outputs["logits"]  # (1, tokens, vocab_size) float32
        output.write(np.ascontiguousarray(logits, dtype=np.float32).tobytes())
        output.flush()


if __name__ == "__main__":
    main()
