"""How a model is run: the facts that a log line, the live view and the API give."""

import msgspec


class EngineInfo(msgspec.Struct, frozen=True, kw_only=True):
    """What was chosen when the model was loaded.

    `kernels` is the instruction set of the native kernels, or "torch". `dtype` is how weights are
    multiplied, `kv_dtype` how keys and values are kept. `threads` compute a step; 0 on a GPU.
    """

    device: str
    kernels: str
    dtype: str
    kv_dtype: str
    threads: int

    @property
    def place(self) -> str:
        """Where it runs: how many threads, or on which device."""
        if not self.threads:
            return self.device
        return "1 thread" if self.threads == 1 else f"{self.threads} threads"

    def __str__(self) -> str:
        """Say it in one line."""
        kernels = "plain torch" if self.kernels == "torch" else f"native {self.kernels} kernels"
        return f"{self.dtype} weights, {self.kv_dtype} KV cache, {kernels}, {self.place}"
