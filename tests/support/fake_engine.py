"""An engine without a model, for tests of the application: letters in, letters out, and faults on demand."""

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

from engine.core import EngineCore
from engine.errors import RequestError
from engine.runner.base import ModelRunnerOutput
from engine.runner.fake import FakeRunner
from engine.scheduling.output import SchedulerOutput
from tests.builders import make_config

if TYPE_CHECKING:
    from app.engine_thread import Load
    from engine.loading import LoadedEngine

FIRST_LETTER = 32
VOCAB_SIZE = 95
"""Token i is the printable ASCII character 32 + i."""

GATE_TIMEOUT_S = 20.0


class LetterDetokenizer:
    def push(self, token_id: int) -> str:
        return chr(FIRST_LETTER + token_id)

    def finish(self) -> str:
        return ""


class LetterTokenizer:
    """One token a character; has no begin and no end token."""

    vocab_size = VOCAB_SIZE
    eos_token_ids: frozenset[int] = frozenset()
    max_token_chars = 1

    def encode(self, text: str) -> list[int]:
        return [(ord(character) - FIRST_LETTER) % VOCAB_SIZE for character in text]

    def render_chat(self, messages: list[dict[str, str]]) -> list[str]:
        if any(message["content"] == "template error" for message in messages):
            raise RequestError("The template refuses these messages.", param="messages")
        return ["".join(f"{message['role']}: {message['content']} " for message in messages)]

    def encode_rendered(self, pieces: list[str]) -> list[int]:
        return self.encode("".join(pieces))

    def decode(self, token_ids: list[int]) -> str:
        return "".join(chr(FIRST_LETTER + token_id) for token_id in token_ids)

    def make_detokenizer(self) -> LetterDetokenizer:
        return LetterDetokenizer()


class ScriptedRunner(FakeRunner):
    """A `FakeRunner` that can be held up (`gate`), slow (`step_s`), and fail (`failures` steps to come)."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        super().__init__(num_blocks, block_size, vocab_size=VOCAB_SIZE)
        self.gate = threading.Event()
        self.gate.set()
        self.failures = 0
        self.step_s = 0.0
        self.num_steps = 0
        self.num_begun = 0

    def execute(self, scheduler_output: SchedulerOutput) -> ModelRunnerOutput:
        self.num_begun += 1
        self.gate.wait(GATE_TIMEOUT_S)
        time.sleep(self.step_s)
        self.num_steps += 1
        if self.failures:
            self.failures -= 1
            raise RuntimeError("injected fault")
        return super().execute(scheduler_output)


@dataclass(frozen=True)
class FakeProgress:
    stage: str = "weights"
    fraction: float = 0.25


class FakeEngine:
    """What `create_app(settings, load=engine.load)` needs; `runner` and `core` are there to be looked at."""

    def __init__(self, **config: Any) -> None:
        engine_config = make_config(**{"num_blocks": 64, "max_model_len": 128, "max_num_seqs": 8, **config})
        self.runner = ScriptedRunner(engine_config.num_blocks, engine_config.block_size)
        self.core = EngineCore(engine_config, self.runner)
        self.load_gate = threading.Event()
        self.load_gate.set()
        self.load_error: Exception | None = None

    @property
    def load(self) -> "Load":
        return cast("Load", self._load)

    def _load(self, on_progress: Callable[[Any], None]) -> "LoadedEngine":
        progress = FakeProgress()
        on_progress(progress)
        while not self.load_gate.wait(0.02):
            on_progress(progress)  # raises when the server stops
        if self.load_error is not None:
            raise self.load_error
        loaded = SimpleNamespace(
            core=self.core, tokenizer=LetterTokenizer(), model_name="fake", model_info=None, info=None
        )
        return cast("LoadedEngine", loaded)
