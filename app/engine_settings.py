"""The settings of `pageglass serve` that are about the engine: how the model is run, what goes first."""

from typing import Annotated

import msgspec

from app.setting_values import (
    MAX_SIZE_BYTES,
    Option,
    PriorityClass,
    parse_count,
    parse_priority_class,
    parse_seconds,
    parse_share,
    parse_size,
)
from engine.config import (
    AS_SUITS,
    MAX_AGEING_S,
    MAX_BLOCK_SIZE,
    MAX_NUM_BLOCKS,
    MAX_NUM_SEQS,
    PREEMPTION_MODES,
    STEP_LIMITS,
    EngineConfig,
)
from engine.run_plan import DEVICES, DTYPES, KERNELS, KV_DTYPES, MAX_PROCESSES, RunOptions
from engine.runner.attention_choice import ATTENTIONS
from engine.scheduling.preemption import PREEMPTION_POLICIES
from engine.scheduling.queue import QUEUE_POLICIES

NO_MODEL_LEN_LIMIT = 2**24
"""`max_model_len` when none is asked for: the model and the pool then set the limit."""


def _show_limits(on_cpu: str, on_gpu: str) -> str:
    """Return a default that depends on the device, for people."""
    return f"{on_cpu}; {on_gpu} on a GPU"


class EngineSettings(msgspec.Struct, frozen=True, kw_only=True):
    """The part of `app.settings.Settings` that the engine is made from."""

    device: Annotated[str, Option("Where the model runs.", choices=DEVICES)] = "auto"
    dtype: Annotated[
        str,
        Option(
            "Number format of the weights. auto: as the file has them if it is mostly 4-bit (q4), else int8; "
            "fp32 with --kernels torch; bf16 on a GPU, or fp16 on one that has no bf16. fp16 is for GPUs "
            "only.",
            choices=DTYPES,
        ),
    ] = "auto"
    kv_dtype: Annotated[
        str,
        Option(
            "Number format of the KV cache. auto: bf16; in torch, as on a GPU, that of the weights.",
            choices=KV_DTYPES,
        ),
    ] = "auto"
    kernels: Annotated[
        str,
        Option(
            "What computes on the CPU: native kernels for an instruction set, or plain torch. auto: the best "
            "that the CPU has; torch where none can be had, and for --dtype fp32.",
            choices=KERNELS,
        ),
    ] = "auto"
    attention: Annotated[
        str,
        Option(
            "What computes attention in torch: kernels in Triton, torch's own varlen_attn, or plain torch "
            "(reference). auto: on a GPU the first of them that can be had; on the CPU reference, where "
            "native kernels do not compute it. docs/cuda.md says what each needs.",
            choices=ATTENTIONS,
        ),
    ] = "auto"
    cuda_graphs: Annotated[
        str,
        Option(
            "On a GPU: whether decode steps are captured as CUDA graphs, so that the interpreter does not "
            "launch each kernel.",
            choices=("on", "off"),
        ),
    ] = "on"
    async_scheduling: Annotated[
        str,
        Option(
            "On a GPU: whether it computes the next tokens while the scheduler still books the last ones.",
            choices=("on", "off"),
        ),
    ] = "on"
    tensor_parallel_size: Annotated[
        int,
        Option(
            "Processes that compute the model together, one on each GPU; on the CPU in plain torch. Not "
            "together with --swap-memory.",
            parse=parse_count,
            unit="processes",
            low=1,
            high=MAX_PROCESSES,
        ),
    ] = 1
    threads: Annotated[
        int | None,
        Option(
            "CPU threads of the model, in all processes.",
            parse=parse_count,
            low=1,
            high=1024,
            shown_default="all cores",
        ),
    ] = None
    gpu_memory_utilization: Annotated[
        float,
        Option(
            "On a GPU: the share of its memory that weights, KV cache and working memory may take together; "
            "the KV cache gets what the others leave. Not together with --kv-memory or --num-blocks.",
            parse=parse_share,
            low=0.01,
            high=1,
        ),
    ] = 0.9
    kv_memory: Annotated[
        int | None,
        Option(
            "Memory of the KV cache, such as 512MiB. Not together with --num-blocks.",
            parse=parse_size,
            unit="bytes",
            low=1,
            high=MAX_SIZE_BYTES,
            shown_default=_show_limits("1GiB", "what --gpu-memory-utilization leaves"),
        ),
    ] = None
    num_blocks: Annotated[
        int | None,
        Option(
            "Size of the KV cache in blocks. Not together with --kv-memory.",
            parse=parse_count,
            unit="blocks",
            low=1,
            high=MAX_NUM_BLOCKS,
            shown_default="as many as --kv-memory holds",
        ),
    ] = None
    block_size: Annotated[
        int,
        Option("Tokens in one KV block.", parse=parse_count, unit="tokens", low=1, high=MAX_BLOCK_SIZE),
    ] = 16
    max_num_seqs: Annotated[
        int | None,
        Option(
            "Most sequences computed in one step.",
            parse=parse_count,
            unit="sequences",
            low=1,
            high=MAX_NUM_SEQS,
            shown_default=_show_limits(
                str(STEP_LIMITS["cpu"].max_num_seqs), str(STEP_LIMITS["cuda"].max_num_seqs)
            ),
        ),
    ] = None
    max_num_batched_tokens: Annotated[
        int | None,
        Option(
            "Most tokens computed in one step; longer prompts are computed in chunks. More is a little "
            "quicker in all, but every answer under way waits for the whole step.",
            parse=parse_count,
            unit="tokens",
            low=1,
            high=2**20,
            shown_default=_show_limits(
                str(STEP_LIMITS["cpu"].max_num_batched_tokens),
                str(STEP_LIMITS["cuda"].max_num_batched_tokens),
            ),
        ),
    ] = None
    max_model_len: Annotated[
        int | None,
        Option(
            "Most tokens of one sequence, prompt and answer together; never more than the model knows "
            "or the KV cache holds.",
            parse=parse_count,
            unit="tokens",
            low=2,
            high=NO_MODEL_LEN_LIMIT,
            shown_default="what the model knows",
        ),
    ] = None
    max_waiting: Annotated[
        int,
        Option(
            "Most requests that may wait; more are answered with 429.",
            parse=parse_count,
            unit="requests",
            low=1,
            high=2**20,
        ),
    ] = 1024
    policy: Annotated[
        str,
        Option(
            "Order in which waiting requests are admitted: as they come, or by priority. Can be changed "
            "while the server runs, as the two for preemption can.",
            choices=QUEUE_POLICIES,
        ),
    ] = "fcfs"
    priority_class: Annotated[
        tuple[PriorityClass, ...],
        Option(
            "A name that requests may give as their priority, and its number; lower ones are more urgent. "
            "May be given several times; replaces the default ones. In the environment separate classes by "
            "spaces.",
            parse=parse_priority_class,
            shown_default="premium=-10 standard=0 bulk=10",
        ),
    ] = (PriorityClass("premium", -10), PriorityClass("standard", 0), PriorityClass("bulk", 10))
    priority_ageing: Annotated[
        float,
        Option(
            "With --policy priority: how long a request waits to make up for one step of priority.",
            parse=parse_seconds,
            unit="seconds",
            low=0,
            high=MAX_AGEING_S,
        ),
    ] = 1.0
    preemption: Annotated[
        str,
        Option("Which running sequence gives way when blocks run out.", choices=PREEMPTION_POLICIES),
    ] = "newest-first"
    preemption_mode: Annotated[
        str,
        Option(
            "What becomes of its blocks: computed again (recompute), copied to --swap-memory and back "
            "(swap), or for each victim what costs less (auto).",
            choices=PREEMPTION_MODES,
        ),
    ] = "auto"
    preemption_quantum: Annotated[
        int,
        Option(
            "Tokens that a sequence generates, at least, between two of its preemptions.",
            parse=parse_count,
            unit="tokens",
            low=1,
            high=2**20,
        ),
    ] = 16
    swap_memory: Annotated[
        int,
        Option(
            "Host memory for blocks of preempted sequences and of evicted prefixes, such as 512MiB.",
            parse=parse_size,
            unit="bytes",
            low=0,
            high=MAX_SIZE_BYTES,
            shown_default="0 (none)",
        ),
    ] = 0
    offload: Annotated[
        str,
        Option("Whether evicted prefix blocks are kept in --swap-memory.", choices=("on", "off")),
    ] = "on"
    lookahead: Annotated[
        str,
        Option(
            "Whether a sequence gets its next block a step before it needs it, while there are plenty.",
            choices=("on", "off"),
        ),
    ] = "on"

    @property
    def run_options(self) -> RunOptions:
        """How the model is asked to be run."""
        return RunOptions(
            device=self.device,
            dtype=self.dtype,
            kv_dtype=self.kv_dtype,
            kernels=self.kernels,
            attention=self.attention,
            num_threads=self.threads,
            tensor_parallel_size=self.tensor_parallel_size,
            gpu_memory_utilization=self.gpu_memory_utilization,
            async_scheduling=self.async_scheduling == "on",
            cuda_graphs=self.cuda_graphs == "on",
        )

    def make_engine_config(self) -> EngineConfig:
        """Return the engine's configuration as asked for; loading resolves it against the model."""
        return EngineConfig(
            block_size=self.block_size,
            num_blocks=self.num_blocks or AS_SUITS,
            max_num_seqs=self.max_num_seqs or AS_SUITS,
            max_num_batched_tokens=self.max_num_batched_tokens or AS_SUITS,
            max_model_len=self.max_model_len or NO_MODEL_LEN_LIMIT,
            max_waiting=self.max_waiting,
            policy=self.policy,
            priority_ageing_s=self.priority_ageing,
            preemption=self.preemption,
            preemption_mode=self.preemption_mode,
            preemption_quantum=self.preemption_quantum,
            offload=self.offload == "on",
            lookahead=self.lookahead == "on",
        )
