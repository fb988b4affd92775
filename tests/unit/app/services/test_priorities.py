import pytest

from app.services.priorities import Priorities
from app.setting_values import PriorityClass
from engine.config import MAX_PRIORITY
from engine.errors import RequestError

PRIORITIES = Priorities([PriorityClass("slow", 7), PriorityClass("quick", -3)])


def test_a_priority_is_a_number_or_the_name_of_a_class() -> None:
    assert PRIORITIES.find(None) == 0
    assert PRIORITIES.find("quick") == -3
    assert [PRIORITIES.find(number) for number in (-MAX_PRIORITY, 5, MAX_PRIORITY)] == [-1000, 5, 1000]


@pytest.mark.parametrize("asked", ["premium", "", "7", "QUICK", -1001, 2**70])
def test_anything_else_is_refused_with_the_known_names(asked: int | str) -> None:
    with pytest.raises(
        RequestError, match=r"priority is .*-1000 to 1000.* the names quick, slow\.$"
    ) as caught:
        PRIORITIES.find(asked)
    assert caught.value.param == "priority"


def test_what_is_shown_of_a_wrong_one_is_short() -> None:
    with pytest.raises(RequestError) as caught:
        PRIORITIES.find("x" * 5000)
    assert len(str(caught.value)) < 250
