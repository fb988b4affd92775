"""What the templates of the chat show. Plain data, but for the answers' rendered Markdown."""

from typing import Final

import msgspec
from markupsafe import Markup

from app.services.chat_rules import can_drop_turns
from app.services.chat_types import AnswerStats, Conversation, Message, MessageStatus, Turn
from app.web.markdown import MarkdownRenderer
from app.web.templating import NO_VALUE, format_count
from engine.sequence import FinishReason

BAR_UNITS: Final = 1000

_ENDINGS: Final = {
    FinishReason.STOP: "the model ended it",
    FinishReason.LENGTH: "max tokens reached",
}
_STATUS_WORDS: Final = {
    MessageStatus.STOPPED: "stopped by you",
    MessageStatus.FAILED: "failed",
    MessageStatus.INTERRUPTED: "interrupted",
}


class Figure(msgspec.Struct, frozen=True):
    """One number under an answer."""

    name: str
    value: str
    unit: str
    words: str


class PromptBar(msgspec.Struct, frozen=True):
    """Prompt tokens, cached and computed; `cached_width` in thousandths."""

    num_cached: str
    num_computed: str
    cached_width: float
    words: str


class AnswerFooter(msgspec.Struct, frozen=True, kw_only=True):
    """What stands under an answer that has ended."""

    figures: list[Figure]
    bar: PromptBar | None
    ending: str
    steps: str
    grid_url: str


class AnswerView(msgspec.Struct, frozen=True, kw_only=True):
    """One variant of an answer, the one that is shown. `older` and `newer` are ids, empty at the ends."""

    id: str
    text: str
    html: Markup | None
    is_streaming: bool
    status: str
    error: str
    number: int
    num_variants: int
    older: str
    newer: str
    can_regenerate: bool
    can_drop_turns: bool
    footer: AnswerFooter | None
    request_id: str | None
    num_chars: int


class TurnView(msgspec.Struct, frozen=True, kw_only=True):
    """A question with the answer that is shown. `is_left_out`: the model does not get it."""

    id: str
    question: str
    is_left_out: bool
    left_out_words: str
    answer: AnswerView | None


class ConversationView(msgspec.Struct, frozen=True, kw_only=True):
    """The whole log."""

    id: str
    title: str
    turns: list[TurnView]
    is_streaming: bool
    is_stored: bool
    num_left_out: int


async def make_conversation_view(conversation: Conversation, renderer: MarkdownRenderer) -> ConversationView:
    """Describe a conversation; ended answers are rendered."""
    answers = [turn.answer for turn in conversation.turns]
    texts = [answer.text for answer in answers if answer is not None and not answer.is_streaming]
    html = await renderer.render_all(texts)
    turns = [_turn_view(conversation, turn, html) for turn in conversation.turns]
    return ConversationView(
        id=conversation.id,
        title=conversation.title,
        turns=turns,
        is_streaming=any(turn.answer is not None and turn.answer.is_streaming for turn in turns),
        is_stored=conversation.is_stored,
        num_left_out=sum(turn.is_left_out for turn in turns),
    )


async def make_answer_view(conversation: Conversation, turn: Turn, renderer: MarkdownRenderer) -> TurnView:
    """Describe one turn."""
    answer = turn.answer
    html = {}
    if answer is not None and not answer.is_streaming:
        html = await renderer.render_all([answer.text])
    return _turn_view(conversation, turn, html)


def _turn_view(conversation: Conversation, turn: Turn, html: dict[str, Markup]) -> TurnView:
    answer = turn.answer
    is_newest = turn is conversation.turns[-1]
    return TurnView(
        id=turn.question.id,
        question=turn.question.text,
        is_left_out=turn.is_left_out or not (turn.is_answered or is_newest),
        left_out_words=_say_why_left_out(turn),
        answer=None if answer is None else _answer_view(conversation, turn, answer, html),
    )


def _say_why_left_out(turn: Turn) -> str:
    if turn.is_left_out:
        return "the context is full"
    if any(answer.text for answer in turn.answers):
        return "the variant that is shown has no text"
    return "it has no answer"


def _answer_view(
    conversation: Conversation, turn: Turn, answer: Message, html: dict[str, Markup]
) -> AnswerView:
    index = turn.answers.index(answer)
    is_idle = conversation.streaming is None
    # While rendering was waited for, an answer may have gone on; it is then shown as it was: growing.
    is_streaming = answer.is_streaming or (bool(answer.text) and answer.text not in html)
    return AnswerView(
        id=answer.id,
        text=answer.text,
        html=html.get(answer.text) if answer.text else None,
        is_streaming=is_streaming,
        status=answer.status.value,
        error=_describe_error(answer),
        number=index + 1,
        num_variants=len(turn.answers),
        older=turn.answers[index - 1].id if index and is_idle else "",
        newer=turn.answers[index + 1].id if index + 1 < len(turn.answers) and is_idle else "",
        can_regenerate=is_idle and turn is conversation.turns[-1],
        can_drop_turns=is_idle and can_drop_turns(conversation, turn),
        footer=None if is_streaming else _make_footer(answer),
        request_id=answer.request_id if _has_record(answer) else None,
        num_chars=len(answer.text),
    )


def _has_record(answer: Message) -> bool:
    """Whether the engine had its request, as far as is known: a crash leaves no figures."""
    was_cut = answer.status is MessageStatus.INTERRUPTED and not answer.error
    return bool(answer.text) or answer.stats.num_prompt_tokens > 0 or was_cut


def _describe_error(answer: Message) -> str:
    if answer.error:
        return answer.error
    if answer.status is MessageStatus.INTERRUPTED:
        return "The server ended while this answer was being written."
    return ""


def _make_footer(answer: Message) -> AnswerFooter | None:
    stats = answer.stats
    if not stats.num_prompt_tokens:
        return None
    return AnswerFooter(
        figures=_make_figures(stats),
        bar=_make_bar(stats),
        ending=_describe_ending(answer),
        steps=_describe_steps(stats),
        grid_url=_grid_url(answer),
    )


def _make_figures(stats: AnswerStats) -> list[Figure]:
    preemptions = format_count(stats.num_preemptions)
    figures = [
        Figure(
            "TTFT", _format_ms(stats.ttft_ms), "ms", "Time from the question's arrival to the first token"
        ),
        Figure(
            "prefill",
            _format_rate(stats.prefill_tok_s),
            "tok/s",
            "Prompt tokens computed a second, cached ones not",
        ),
        Figure("decode", _format_rate(stats.decode_tok_s), "tok/s", "Tokens a second after the first one"),
        Figure("output", format_count(stats.num_output_tokens), "tokens", "Tokens of the answer"),
        Figure("preempted", preemptions, "times", "How often it had to give its blocks back"),
    ]
    return figures if stats.num_preemptions else figures[:-1]


def _make_bar(stats: AnswerStats) -> PromptBar:
    cached, computed = format_count(stats.num_cached_tokens), format_count(stats.num_computed_tokens)
    return PromptBar(
        num_cached=cached,
        num_computed=computed,
        cached_width=round(BAR_UNITS * stats.num_cached_tokens / stats.num_prompt_tokens, 1),
        words=f"Prompt: {cached} tokens cached, {computed} computed",
    )


def _describe_ending(answer: Message) -> str:
    if answer.status in _STATUS_WORDS:
        return _STATUS_WORDS[answer.status]
    if answer.stats.is_context_full:
        return "the context is full"
    reason = answer.stats.finish_reason
    return _ENDINGS[FinishReason(reason)] if reason in _ENDINGS else ""


def _describe_steps(stats: AnswerStats) -> str:
    if not stats.first_step:
        return ""
    return f"{format_count(stats.first_step)}\u2013{format_count(max(stats.first_step, stats.last_step))}"


def _grid_url(answer: Message) -> str:
    step = answer.stats.first_token_step or answer.stats.first_step
    if not step or answer.session_id is None:
        return ""
    return f"/s/{answer.session_id}?step={step}&request={answer.request_id}"


def _format_ms(value: float | None) -> str:
    if value is None:
        return NO_VALUE
    return f"{value:,.0f}" if value >= 10 else f"{value:.1f}"


def _format_rate(value: float | None) -> str:
    if value is None:
        return NO_VALUE
    return f"{value:,.0f}" if value >= 10 else f"{value:.1f}"
