"""The structs of `api.h`, field by field; what they mean is said there."""

from ctypes import Structure, c_char, c_float, c_int32, c_int64, c_void_p

_MESSAGE_BYTES = 256


class PgError(Structure):
    """Why a call failed."""

    _fields_ = (("message", c_char * _MESSAGE_BYTES),)


class PgConfig(Structure):
    """What a model is and how it is run."""

    _fields_ = (
        *((name, c_int32) for name in (
            "hidden_size", "intermediate_size", "num_layers", "num_heads", "num_kv_heads", "head_dim",
            "vocab_size", "num_positions", "block_size", "num_blocks", "kv_type", "number_type",
            "num_threads",
        )),
        ("rms_norm_eps", c_float),
    )  # fmt: skip


class PgTensor(Structure):
    """A tensor as it lies in memory."""

    _fields_ = (
        ("data", c_void_p),
        ("storage", c_int32),
        ("rows", c_int32),
        ("columns", c_int32),
        ("rotary_heads", c_int32),
    )


class PgBatch(Structure):
    """One step."""

    _fields_ = (
        ("num_sequences", c_int32),
        ("num_tokens", c_int32),
        *((name, c_void_p) for name in (
            "token_ids", "num_computed", "num_scheduled", "tables", "table_starts", "wants", "temperatures",
            "top_ks", "top_ps", "uniforms",
        )),
        ("want_all_logits", c_int32),
        ("logits", c_void_p),
        ("next_token_ids", c_void_p),
        ("forward_ns", c_int64),
        ("sample_ns", c_int64),
    )  # fmt: skip
