"""Growing prompts share one buffer without affecting each other."""

import copy
import pickle
from concurrent.futures import ThreadPoolExecutor

from hypothesis import given
from hypothesis import strategies as st

from rollout.tokens.token_prefix import TokenPrefix

IDS = st.lists(st.integers(0, 200_000), max_size=6)


@given(st.lists(st.tuples(st.integers(0, 100), IDS, st.booleans()), max_size=12))
def test_any_tree_of_continuations_reads_like_plain_lists(
    steps: list[tuple[int, list[int], bool]],
) -> None:
    """In whatever order prompts are sent as JSON."""
    prefixes, lists = [TokenPrefix()], [list[int]()]
    for parent, ids, sent in steps:
        parent %= len(prefixes)
        prefixes.append(prefixes[parent].extended(ids, [7]))
        lists.append([*lists[parent], *ids, 7])
        if sent:
            prefixes[parent].json()
    for prefix, expected in [*zip(prefixes, lists, strict=True)][::-1]:
        assert (
            prefix == expected
            and expected == prefix
            and list(prefix) == expected
            and len(prefix) == len(expected)
        )
        assert (
            prefix[-1:] == expected[-1:]
            and prefix[1:-1] == expected[1:-1]
            and prefix[::-1] == expected[::-1]
        )
        assert prefix.json(b"<", b">") == b"<" + ",".join(map(str, expected)).encode() + b">"
        assert prefix + expected == expected + expected and prefix != [*expected, 3]


def test_two_threads_may_continue_the_same_prompt() -> None:
    start = TokenPrefix(range(5))
    with ThreadPoolExecutor(8) as threads:
        grown = list(threads.map(lambda k: start.extended([k] * 1000), range(64)))
    assert all(prefix == [*range(5), *[k] * 1000] for k, prefix in enumerate(grown))


def test_copies_and_pickles_are_plain_lists() -> None:
    prefix = TokenPrefix([1, 2]).extended([3])
    assert type(pickle.loads(pickle.dumps(prefix))) is list
    assert copy.deepcopy(prefix) == [1, 2, 3]


def test_a_prefix_still_grows_after_its_ids_were_copied_to_an_array() -> None:
    prefix = TokenPrefix([1, 2])
    ids = prefix.to_numpy()
    assert prefix.extended([3], TokenPrefix([4])) == [1, 2, 3, 4]
    ids[0] = 9
    assert prefix == [1, 2] and TokenPrefix().to_numpy().tolist() == []
