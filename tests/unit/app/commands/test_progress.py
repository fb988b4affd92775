import io

from app.commands.progress import ProgressLine


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


class Clock:
    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def test_plain_output_gets_one_line_a_second() -> None:
    stream, clock = io.StringIO(), Clock()
    line = ProgressLine(stream, clock)

    for tenth in range(21):
        clock.now_s = tenth / 10
        line.update(f"at {tenth}")
    line.close()

    assert stream.getvalue() == "at 0\nat 10\nat 20\n"


def test_terminal_line_is_rewritten_and_ended() -> None:
    stream, clock = Terminal(), Clock()
    line = ProgressLine(stream, clock)

    line.update("one")
    clock.now_s = 1
    line.update("two")
    line.close()
    line.close()

    assert stream.getvalue() == "\r\x1b[2Kone\r\x1b[2Ktwo\n"


def test_forced_update_is_always_shown() -> None:
    stream = io.StringIO()
    line = ProgressLine(stream, Clock())

    line.update("first")
    line.update("hidden")
    line.update("last", force=True)

    assert stream.getvalue() == "first\nlast\n"
