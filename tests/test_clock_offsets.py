import random

import pytest

from xcloud.record.timeline import MessagePassage, clock_offsets

UNIX = {"a": 5_000_000, "b": 3_000_000, "c": 0}


def passages(
    rng: random.Random, a: str, b: str, b_ahead_us: int, fastest_us: int
) -> list[MessagePassage]:
    """Both ways; at least one each way takes fastest_us, the others longer."""
    found = []
    for extra_us in [0, *(rng.randrange(5000) for _ in range(5))]:
        start = rng.randrange(10**6)
        delay = fastest_us + extra_us
        found.append(MessagePassage(a, b, start, start + delay + b_ahead_us))
        found.append(MessagePassage(b, a, start + b_ahead_us, start + delay))
    return found


def test_one_machine_needs_nothing() -> None:
    assert clock_offsets({"a": 17}, []) == ({"a": 0}, 0)


@pytest.mark.parametrize("b_ahead_us", [0, 123_456, -98_765_432])
def test_messages_both_ways_give_the_offset_exactly_if_delays_are_alike(b_ahead_us: int) -> None:
    found = clock_offsets({"a": 5, "b": 6}, passages(random.Random(1), "a", "b", b_ahead_us, 4000))

    assert found.shift_us == {"a": 0, "b": -b_ahead_us}
    assert found.error_us == 4000


def test_the_error_of_unlike_delays_stays_below_what_is_said() -> None:
    ahead = 1000
    found = clock_offsets(
        {"a": 5, "b": 6},
        [
            MessagePassage("a", "b", 0, 9000 + ahead),
            MessagePassage("b", "a", 50_000 + ahead, 50_200),
        ],
    )

    assert found.error_us is not None
    assert 0 < abs(found.shift_us["b"] + ahead) <= found.error_us == 4600


def test_a_third_machine_is_joined_through_the_second() -> None:
    rng = random.Random(2)
    both = passages(rng, "a", "b", 700, 300) + passages(rng, "b", "c", -40, 100)

    found = clock_offsets(UNIX, both)

    assert found.shift_us == {"a": 0, "b": -700, "c": -660}
    assert found.error_us == 400  # errors add up along the way


def test_without_messages_back_the_wall_clocks_are_believed_and_the_error_is_unknown() -> None:
    found = clock_offsets({"a": 5_000_000, "b": 3_000_000}, [MessagePassage("a", "b", 0, 10)])

    # What b's clock calls 2 s was 5 s by the wall clock, which a's clock calls 0.
    assert found.shift_us == {"a": 0, "b": -2_000_000}
    assert found.error_us is None
