"""Which turns of a conversation the model gets."""

from app.services.chat_types import (
    Conversation,
    Message,
    MessageStatus,
    Role,
    Turn,
    make_title,
)


def make_message(name: str, role: Role, variant: int = 0) -> Message:
    return Message(
        id=name,
        position=0,
        variant=variant,
        role=role,
        text=name,
        status=MessageStatus.COMPLETE,
        created_ns=1,
    )


def make_conversation(num_turns: int, system_prompt: str = "") -> Conversation:
    turns = [
        Turn(make_message(f"q{number}", Role.USER), [make_message(f"a{number}", Role.ASSISTANT)])
        for number in range(num_turns)
    ]
    return Conversation(
        id="c", created_ns=1, updated_ns=1, title="t", system_prompt=system_prompt, turns=turns
    )


def contents(conversation: Conversation, num_skipped: int = 0) -> list[str]:
    return [message["content"] for message in conversation.make_prompt(num_skipped)]


def test_the_model_gets_all_turns_in_order_and_the_newest_question() -> None:
    conversation = make_conversation(3, "be kind")
    assert contents(conversation) == ["be kind", "q0", "a0", "q1", "a1", "q2"]
    assert [message["role"] for message in conversation.make_prompt()] == [
        "system",
        "user",
        "assistant",
        "user",
        "assistant",
        "user",
    ]


def test_a_blank_system_prompt_is_none() -> None:
    assert contents(make_conversation(1, " \n ")) == ["q0"]


def test_turns_are_left_out_from_the_oldest_on_and_the_system_prompt_stays() -> None:
    conversation = make_conversation(4, "be kind")
    assert contents(conversation, 2) == ["be kind", "q2", "a2", "q3"]
    conversation.turns[0].leave_out()
    assert contents(conversation) == ["be kind", "q1", "a1", "q2", "a2", "q3"]
    assert contents(conversation, 1) == ["be kind", "q2", "a2", "q3"]
    assert contents(conversation, 9) == ["be kind", "q3"]


def test_the_chosen_variant_is_sent() -> None:
    conversation = make_conversation(2)
    turn = conversation.turns[0]
    turn.answers.append(make_message("a0b", Role.ASSISTANT, 1))
    turn.choose(1)
    assert contents(conversation) == ["q0", "a0b", "q1"]
    turn.choose(0)
    assert contents(conversation) == ["q0", "a0", "q1"]


def test_a_turn_whose_shown_answer_has_no_text_is_not_sent() -> None:
    conversation = make_conversation(3)
    turn = conversation.turns[0]
    turn.answers.append(make_message("", Role.ASSISTANT, 1))
    turn.choose(1)
    assert contents(conversation) == ["q1", "a1", "q2"]
    turn.choose(0)
    assert contents(conversation) == ["q0", "a0", "q1", "a1", "q2"]
    conversation.turns[1].answers.clear()
    assert contents(conversation) == ["q0", "a0", "q2"]


def test_a_title_is_the_beginning_on_one_line() -> None:
    assert make_title(" Tell me\n a  story ") == "Tell me a story"
    title = make_title("word " * 40)
    assert len(title) <= 60
    assert title.endswith("\u2026")
