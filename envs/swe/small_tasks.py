"""Small real tasks: released packages from the package index, each with one planted bug.

The packages are fetched by pip when a task is first played, pinned by checksum, and turned into repositories in
SWE-Gym's form. The reference solution takes the bug out again.
"""

from __future__ import annotations

import difflib
import functools
import hashlib
import json
import os
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from envs.errors import ConfigError, EnvironmentFault
from envs.swe.instances import Instance, read_instance
from envs.swe.verdict.pristine import building, commit_all
from envs.swe.verdict.runs import JudgeSettings, build_tree, run_tests


@dataclass(frozen=True)
class Package:
    """A source release, known by its checksum."""

    name: str
    version: str
    sha256: str

    @property
    def label(self) -> str:
        return f"{self.name}-{self.version}"


@dataclass(frozen=True)
class SmallTask:
    """One bug: in `path`, `right` (which occurs once there) becomes `wrong`. `turns_green` are the tests that it
    breaks; `hidden_test` is a test file of ours that the agent does not see."""

    package: Package
    path: str
    right: str
    wrong: str
    statement: str
    turns_green: tuple[str, ...]
    hidden_test: tuple[str, str] | None = None
    left_out: tuple[str, ...] = ()
    """Tests that the bug breaks too, and that are not judged."""


TOOLZ = Package("toolz", "1.0.0", "2c86e3d9a04798ac556793bced838816296a2f085017664e4995cb40a1047a02")
CACHETOOLS = Package("cachetools", "5.3.3", "ba29e2dfa0b8b556606f097407ed1aa62080ee108ab0dc5ec9d6a723a007d105")

_NESTED_TEST = """\
from toolz import assoc_in, update_in


def test_nested_input_is_left_alone():
    order = {"id": 7, "items": {"apple": 1, "pear": 2}}
    changed = update_in(order, ["items", "apple"], lambda n: n + 1)
    assert changed == {"id": 7, "items": {"apple": 2, "pear": 2}}
    assert repr(order) == "{'id': 7, 'items': {'apple': 1, 'pear': 2}}"


def test_three_levels():
    deep = {"a": {"b": {"c": 1}}}
    assert assoc_in(deep, ["a", "b", "c"], 2) == {"a": {"b": {"c": 2}}}
    assert repr(deep) == "{'a': {'b': {'c': 1}}}"
"""

_FIRST_OF_EACH_TEST = """\
from toolz import unique


def test_first_of_each_length():
    assert list(unique(["kiwi", "fig", "plum", "apple"], key=len)) == ["kiwi", "fig", "apple"]
    assert list(unique(range(20, 40), key=lambda n: n % 7)) == [20, 21, 22, 23, 24, 25, 26]
"""
_MANY_KEYS_TEST = """\
from toolz import dissoc


def test_all_keys_but_one():
    assert dissoc({"a": 1, "b": 2, "c": 7}, "a", "b") == {"c": 7}
    assert dissoc({"p": 4, "q": 5, "r": 6, "s": 9}, "s", "p", "q") == {"r": 6}
"""
_TWO_KEYWORDS_TEST = """\
from toolz import memoize


def test_values_of_keywords_are_told_apart():
    spell = memoize(lambda word, times=1, end="": word * times + end)
    spelt = [spell("ab", times=2), spell("ab", times=3), spell("c", end="!"), spell("c", end="?")]
    assert spelt == ["abab", "ababab", "c!", "c?"]
"""
_SIZES_TEST = """\
from cachetools import LRUCache


def test_sizes_after_replacements():
    cache, sizes = LRUCache(maxsize=50, getsizeof=len), []
    for word in ("pear", "apple", "fig", "pineapple", "kiwi"):
        cache["fruit"] = word
        cache[len(word)] = word
        sizes.append(cache.currsize)
    assert sizes == [8, 14, 15, 30, 25]
    assert sorted(map(str, cache)) == ["3", "4", "5", "9", "fruit"]
"""
_MEMBERS_TEST = """\
from cachetools import TTLCache


def test_members_as_time_goes_by():
    clock = [0]
    cache = TTLCache(maxsize=9, ttl=4, timer=lambda: clock[0])
    for key in range(7):
        clock[0] = key
        cache[key] = key * key
    assert [key for key in range(9) if key in cache] == [3, 4, 5, 6]
    clock[0] = 8
    assert [key for key in range(9) if key in cache] == [5, 6]
"""

_CACHE_TESTS = (
    ("cache", "CacheTest"),
    ("fifo", "LRUCacheTest"),
    ("lfu", "LFUCacheTest"),
    ("lru", "LRUCacheTest"),
    ("mru", "MRUCacheTest"),
    ("rr", "RRCacheTest"),
    ("tlru", "TLRUCacheTest"),
    ("ttl", "TTLCacheTest"),
)

SMALL_TASKS: Mapping[str, SmallTask] = {
    "toolz_interleave": SmallTask(
        TOOLZ,
        "toolz/itertoolz.py",
        "iters = itertools.cycle(itertools.takewhile(predicate, iters))",
        "return",
        "`interleave` loses elements when its inputs differ in length. `list(interleave(['ABC', 'XY']))` gives "
        "`['A', 'X', 'B', 'Y']`: as soon as one input is used up, the others are cut off as well. They should go "
        "on taking turns until all of them are used up, so the last `'C'` is missing here.",
        ("toolz/tests/test_itertoolz.py::test_interleave",),
    ),
    "toolz_partition_all": SmallTask(
        TOOLZ,
        "toolz/itertoolz.py",
        "yield prev[:len(seq) % n]",
        "yield prev[:len(seq) // n]",
        "The last group of `partition_all` has the wrong length when the input is a list or anything else that has "
        "a length. `list(partition_all(3, [1, 2, 3, 4]))` should end in `(4,)`, and so it does here by luck, but "
        "`list(partition_all(2, [1, 2, 3, 4, 5, 6, 7]))` ends in `(7, '__no__pad__')`. With an iterator as the "
        "input the result is right.",
        ("toolz/tests/test_itertoolz.py::test_partition_all",),
    ),
    "toolz_unique_key": SmallTask(
        TOOLZ,
        "toolz/itertoolz.py",
        "seen_add(val)",
        "seen_add(item)",
        "`unique` ignores what was seen when a `key` is given: `list(unique(['cat', 'mouse', 'dog', 'hen'], "
        "key=len))` returns all four words instead of `['cat', 'mouse']`. Without `key` it works.",
        (
            "toolz/tests/test_itertoolz.py::test_unique",
            "toolz/tests/test_first_of_each.py::test_first_of_each_length",
        ),
        ("toolz/tests/test_first_of_each.py", _FIRST_OF_EACH_TEST),
    ),
    "toolz_dissoc": SmallTask(
        TOOLZ,
        "toolz/dicttoolz.py",
        "remaining.difference_update(keys)",
        "remaining.difference_update(keys[:1])",
        "`dissoc` leaves keys behind when it is told to remove most of a dictionary: `dissoc({'a': 1, 'b': 2}, 'a', "
        "'b')` returns `{'b': 2}` instead of an empty dictionary. Removing few keys from a large dictionary works.",
        (
            "toolz/tests/test_dicttoolz.py::TestDict::test_dissoc",
            "toolz/tests/test_dicttoolz.py::TestDefaultDict::test_dissoc",
            "toolz/tests/test_many_keys.py::test_all_keys_but_one",
        ),
        ("toolz/tests/test_many_keys.py", _MANY_KEYS_TEST),
        # What it compares is a class of its own.
        left_out=("toolz/tests/test_dicttoolz.py::TestCustomMapping::test_dissoc",),
    ),
    "toolz_memoize_keywords": SmallTask(
        TOOLZ,
        "toolz/functoolz.py",
        "frozenset(kwargs.items()) if kwargs else None,",
        "frozenset(kwargs) if kwargs else None,",
        "A function wrapped in `memoize` answers with a stale result when only the value of a keyword argument "
        "differs: after `f(1, y=2)`, a call of `f(1, y=3)` returns what was computed for `y=2`.",
        (
            "toolz/tests/test_functoolz.py::test_memoize_kwargs",
            "toolz/tests/test_keyword_values.py::test_values_of_keywords_are_told_apart",
        ),
        ("toolz/tests/test_keyword_values.py", _TWO_KEYWORDS_TEST),
        # Its answers stand in its own arguments.
        left_out=("toolz/tests/test_functoolz.py::test_memoize_key_signature",),
    ),
    "toolz_update_in_copies": SmallTask(
        TOOLZ,
        "toolz/dicttoolz.py",
        "            dtemp = factory()\n            dtemp.update(d)\n",
        "            dtemp = d\n",
        "`update_in` and `assoc_in` promise to leave their input as it was. With a path of two keys or more they "
        "change the inner dictionaries of the input in place: after `update_in(order, ['items', 'apple'], inc)` "
        "the original `order['items']['apple']` has changed too.",
        (
            "toolz/tests/test_nested_input.py::test_nested_input_is_left_alone",
            "toolz/tests/test_nested_input.py::test_three_levels",
        ),
        ("toolz/tests/test_nested_input.py", _NESTED_TEST),
    ),
    "cachetools_replaced_size": SmallTask(
        CACHETOOLS,
        "src/cachetools/__init__.py",
        "diffsize = size - self.__size[key]",
        "diffsize = size",
        "`currsize` of a cache grows each time that the value of an existing key is replaced, although the number "
        "of items stays the same. After a few replacements the cache throws out items that would still fit.",
        (
            *(
                f"tests/test_{file}.py::{group}::test_getsizeof_{way}"
                for file, group in _CACHE_TESTS
                for way in ("param", "subclass")
            ),
            "tests/test_sizes.py::test_sizes_after_replacements",
        ),
        ("tests/test_sizes.py", _SIZES_TEST),
    ),
    "cachetools_expired_membership": SmallTask(
        CACHETOOLS,
        "src/cachetools/__init__.py",
        "return self.timer() < link.expires",
        "return True",
        "`key in cache` stays true for a `TTLCache` after the item's time has run out, while `cache[key]` raises "
        "`KeyError` for it, as it should. An expired item must not be reported as a member.",
        (
            "tests/test_ttl.py::TTLCacheTest::test_ttl",
            "tests/test_ttl.py::TTLCacheTest::test_ttl_tuple_key",
            "tests/test_members.py::test_members_as_time_goes_by",
        ),
        ("tests/test_members.py", _MEMBERS_TEST),
    ),
}


def small_instance(name: str, cache: Path, settings: JudgeSettings) -> tuple[Instance, Path]:
    """One small task in SWE-Gym's form and its repository, both from the cache once they were made.

    Raises:
        ConfigError: there is no task of this name, or the release does not hold what the task changes.
        EnvironmentFault: the release can be neither found nor fetched, or its checksum is wrong.
    """
    task = SMALL_TASKS.get(name)
    if task is None:
        near = difflib.get_close_matches(name, SMALL_TASKS, n=1)
        hint = f"did you mean {near[0]}?" if near else f"there are {', '.join(SMALL_TASKS)}"
        raise ConfigError(f"unknown SWE task {name!r}; {hint} (for tasks of your own set env.instances)")
    folder = cache / "small" / f"{name}-{_digest(repr(task), settings.python)}"
    with building(folder) as scratch:
        if scratch is not None:
            _make_task(name, task, cache, scratch, settings)
    row = json.loads((folder / "instance.json").read_text(encoding="utf-8"))
    return read_instance(row, name), folder / "repository"


def _digest(*parts: object) -> str:
    """Which tests are green depends on the Python, so what is made with one is not used with another."""
    return hashlib.sha256("\0".join(map(str, parts)).encode()).hexdigest()[:10]


def _make_task(name: str, task: SmallTask, cache: Path, scratch: Path, settings: JudgeSettings) -> None:
    released = released_tree(task.package, cache)
    green = green_tests(task.package, released, cache, settings)
    repository = scratch / "repository"
    scratch.mkdir()
    build_tree(repository, released)
    right = (repository / task.path).read_text(encoding="utf-8")
    if right.count(task.right) != 1:
        raise ConfigError(f"{name}: {task.right!r} occurs {right.count(task.right)} times in {task.path}, not once")
    wrong = right.replace(task.right, task.wrong)
    (repository / task.path).write_text(wrong, encoding="utf-8")
    row = {
        "instance_id": name,
        "repo": f"pypi/{task.package.label}",
        "base_commit": commit_all(repository),
        "problem_statement": task.statement,
        "patch": unified_diff(task.path, wrong, right),
        "test_patch": unified_diff(task.hidden_test[0], None, task.hidden_test[1]) if task.hidden_test else "",
        "FAIL_TO_PASS": list(task.turns_green),
        "PASS_TO_PASS": sorted(set(green) - {*task.turns_green, *task.left_out}),
    }
    (scratch / "instance.json").write_text(json.dumps(row, indent=1), encoding="utf-8")


def released_tree(package: Package, cache: Path) -> Path:
    """The package's files as released, unpacked."""
    target = cache / "released" / package.label
    with building(target) as scratch:
        if scratch is not None:
            archive = _fetch(package, cache / "archives")
            with tempfile.TemporaryDirectory(dir=target.parent) as folder, tarfile.open(archive) as tar:
                tar.extractall(folder, filter="data")
                os.rename(Path(folder) / package.label, scratch)
    return target


def _fetch(package: Package, folder: Path) -> Path:
    """The source archive, from `folder` or through pip.

    Raises:
        EnvironmentFault: pip cannot get it, or it is not the release that was pinned.
    """
    archive = folder / f"{package.label}.tar.gz"
    folder.mkdir(parents=True, exist_ok=True)
    wanted = f"{package.name}=={package.version}"
    if not archive.exists():
        argv = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--no-binary", package.name]
        done = subprocess.run([*argv, "-d", str(folder), wanted], capture_output=True, text=True, check=False)
        if not archive.exists():
            reason = (done.stderr.strip() or "pip said nothing").splitlines()[-1]
            raise EnvironmentFault(f"cannot fetch the source of {wanted}: {reason}; put {archive.name} into {folder}")
    found = hashlib.sha256(archive.read_bytes()).hexdigest()
    if found != package.sha256:
        raise EnvironmentFault(f"{archive} is not the release {wanted} (sha256 {found}); remove it and try again")
    return archive


def green_tests(package: Package, released: Path, cache: Path, settings: JudgeSettings) -> list[str]:
    """Tests of the release that pass with this Python, found by running them once.

    Raises:
        EnvironmentFault: they do not run.
    """
    target = cache / "released" / f"{package.label}-{_digest(settings.python)}.json"
    with building(target) as scratch:
        if scratch is not None:
            run = run_tests(functools.partial(build_tree, pristine=released), (), settings)
            green = sorted(test for test, outcome in run.outcomes.items() if outcome == "passed")
            if run.reason or not green:
                raise EnvironmentFault(f"the tests of {package.label} do not run: {run.reason}\n{run.output[-2000:]}")
            scratch.write_text(json.dumps(green), encoding="utf-8")
    return json.loads(target.read_text(encoding="utf-8"))


def unified_diff(path: str, before: str | None, after: str) -> str:
    """A patch that `git apply` takes; `before` is None for a new file."""
    lines = difflib.unified_diff(
        (before or "").splitlines(keepends=True),
        after.splitlines(keepends=True),
        f"a/{path}" if before is not None else "/dev/null",
        f"b/{path}",
    )
    mode = "" if before is not None else "new file mode 100644\n"
    return f"diff --git a/{path} b/{path}\n{mode}{''.join(lines)}"
