"""What is given to other processes comes back where it belongs."""

from __future__ import annotations

from rannc_backend.planner.search.moves import by_number


def test_items_of_one_number_are_computed_together_and_answered_in_their_sequence() -> None:
    groups: list[list[tuple[str, int]]] = []

    def run_all(function, shared, items):
        groups.extend(items)
        return [function(shared, item) for item in items]

    items = [("a", 1), ("b", 2), ("c", 1), ("d", 1)]
    found = by_number(run_all, lambda search, item: (search, item[0]), "of", items)
    assert found == [("of", "a"), ("of", "b"), ("of", "c"), ("of", "d")]
    assert groups == [[("a", 1), ("c", 1), ("d", 1)], [("b", 2)]]
    assert by_number(run_all, lambda search, item: item, "of", items[2:]) == []
