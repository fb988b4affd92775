"""How a model is run: the facts that a log line, the live view and the API give."""

import msgspec

TORCH = "torch"
"""The kernels of a model that torch runs; all others are native ones."""

NATIVE = "native"
"""The attention of native kernels."""


class EngineInfo(msgspec.Struct, frozen=True, kw_only=True):
    """What was chosen when the model was loaded.

    `kernels` is the instruction set of the native kernels, or "torch". `dtype` is how weights are
    multiplied, `kv_dtype` how keys and values are kept. `threads` compute a step, in each of
    `tensor_parallel_size` processes; 0 on a GPU. `attention` is "native", "triton", "varlen" or "reference";
    empty in recordings of versions that did not say it.
    """

    device: str
    kernels: str
    dtype: str
    kv_dtype: str
    threads: int
    attention: str = ""
    tensor_parallel_size: int = 1

    @property
    def place(self) -> str:
        """Where it runs: how many threads, or on which device, and in how many processes."""
        num_processes = self.tensor_parallel_size
        if not self.threads:
            return self.device if num_processes == 1 else f"{num_processes} {self.device} devices"
        threads = "1 thread" if self.threads == 1 else f"{self.threads} threads"
        return threads if num_processes == 1 else f"{num_processes} processes of {threads}"

    @property
    def means(self) -> str:
        """What computes: the native kernels, or torch and by which attention."""
        if self.kernels != TORCH or not self.attention:
            return self.kernels
        return f"{self.kernels} · {self.attention} attention"

    def __str__(self) -> str:
        """Say it in one line."""
        means = f"native {self.kernels} kernels"
        if self.kernels == TORCH:
            is_plain = not self.attention or (self.attention == "reference" and self.device == "cpu")
            means = "plain torch" if is_plain else f"torch with {self.attention} attention"
        return f"{self.dtype} weights, {self.kv_dtype} KV cache, {means}, {self.place}"
