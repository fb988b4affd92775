"""The engine from a plain script: `generate` runs prompts to the end and returns their texts."""

import msgspec

from engine.loading import LoadedEngine
from engine.sampling_params import SamplingParams
from engine.sequence import EngineRequest


def generate(engine: LoadedEngine, prompts: list[str], params: SamplingParams) -> list[str]:
    """Complete all prompts together and return their texts in order.

    ```python
    request = LoadRequest(model_path=path, config=EngineConfig(), cache_dir=folder)
    engine = load_engine(request, on_progress=print)
    print(generate(engine, ["The capital of France is"], SamplingParams(max_tokens=16)))
    ```

    Stop strings are not looked at (that is the server's part). Raises `RequestError` for a prompt that
    cannot be served; nothing runs then.
    """
    seed = params.seed if params.seed is not None else 0
    params = msgspec.structs.replace(params, seed=seed)
    params.validate(engine.tokenizer.vocab_size)
    requests = [
        EngineRequest(
            request_id=str(index), prompt_token_ids=engine.tokenizer.encode(prompt), sampling_params=params
        )
        for index, prompt in enumerate(prompts)
    ]
    token_ids: list[list[int]] = [[] for _ in prompts]
    try:
        for request in requests:
            engine.core.add_request(request)
        while engine.core.has_work:
            for output in engine.core.step().outputs:
                if output.token_id >= 0:
                    token_ids[int(output.request_id)].append(output.token_id)
    finally:
        for request in requests:
            engine.core.abort(request.request_id)
    return [engine.tokenizer.decode(ids) for ids in token_ids]
