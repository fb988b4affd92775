from sqlalchemy import insert, update

from app.db.models import BookmarkRow, SessionRow
from app.db.writes import Put, Turn, Write, merge


def test_rows_of_one_turn_go_together_and_nothing_passes_a_write_without_one() -> None:
    first, second = insert(SessionRow), insert(BookmarkRow)
    barrier = Write(update(SessionRow).values(note=""))
    puts = [
        Put(
            (Write(first, [{"id": name}], turn=Turn.REQUEST), Write(second, [{"id": name}], turn=Turn.EVENT)),
            1,
        )
        for name in "abcd"
    ]
    puts.insert(2, Put((barrier,), 1))

    merged = [(statement, [row["id"] for row in rows]) for statement, rows in merge(puts)]
    assert merged == [
        (first, ["a", "b"]),
        (second, ["a", "b"]),
        (barrier.statement, []),
        (first, ["c", "d"]),
        (second, ["c", "d"]),
    ]
