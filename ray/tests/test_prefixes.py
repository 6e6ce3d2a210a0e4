"""Which replica gets a prompt: the one that has read it, unless others have much less to do."""

from __future__ import annotations

from outrider_ray.prefixes import BLOCK, PrefixIndex, hashes, ranked


def test_blocks_cover_all_before_them() -> None:
    one, two = "a" * BLOCK + "b" * BLOCK, "c" * BLOCK + "b" * BLOCK
    assert len(hashes(one + "rest")) == 2
    assert hashes(one)[1] != hashes(two)[1]
    assert hashes(one) == hashes(one + "d" * BLOCK)[:2]
    assert hashes("short") == []


def test_a_session_stays_where_its_turns_are_although_all_share_a_system_prompt() -> None:
    index, system = PrefixIndex(), "s" * (3 * BLOCK)
    mine, other = system + "m" * (2 * BLOCK), system + "o" * (2 * BLOCK)
    index.add(mine, "one")
    index.add(other, "two")
    shares = index.shares(mine + "n" * BLOCK)
    assert shares["one"] == 5 / 6
    assert shares["two"] == 3 / 6  # it has the system prompt, read later than the first
    assert ranked(mine, {"one": 1, "two": 0}, shares)[0] == "one"
    assert ranked(mine, {"one": 3, "two": 0}, shares)[0] == "two"
    assert ranked(mine, {"one": 3, "two": 0}, shares, weight=100.0)[0] == "one"
    assert ranked(mine, {"one": 1, "two": 0}, shares, weight=0.0)[0] == "two"


def test_new_prompts_go_where_least_is_to_do_and_equals_are_spread_alike_by_all_fronts() -> None:
    assert ranked("x", {"one": 2, "two": 1, "three": 4}, {}) == ["two", "one", "three"]
    firsts = [ranked(f"prompt {i}", {"one": 0, "two": 0}, {})[0] for i in range(40)]
    assert 8 < firsts.count("one") < 32
    assert firsts == [ranked(f"prompt {i}", {"two": 0, "one": 0}, {})[0] for i in range(40)]


def test_the_index_forgets_dead_replicas_and_what_is_old() -> None:
    index = PrefixIndex(limit=4)
    index.add("a" * (3 * BLOCK), "one")
    index.add("b" * BLOCK, "two")
    index.add("c" * BLOCK, "two")
    assert index.shares("a" * BLOCK) == {}  # the oldest
    index.forget("two")
    assert index.shares("b" * BLOCK) == {}
    assert index.shares("a" * BLOCK + "x") == {}
