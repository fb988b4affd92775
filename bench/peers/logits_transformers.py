"""Writes the logits of transformers in bf16, see `bench.peers.logits`: `… FOLDER`."""

import json
import os
import sys
from typing import Any

import torch
import transformers


def main() -> None:
    """Answer prompts until there are no more."""
    output = os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype=torch.bfloat16).eval()
    with torch.inference_mode():
        for line in sys.stdin:
            logits = model(torch.tensor([json.loads(line)])).logits  # (1, tokens, vocab_size) bfloat16
            output.write(logits.float().numpy().tobytes())
            output.flush()


if __name__ == "__main__":
    main()
