"""Honest repairs of the shipped tasks, each unlike the reference: the judge must pay every one."""

import ast
from collections.abc import Iterator, Mapping

FUNCTIONS: Mapping[str, tuple[str, ...]] = {
    "toolz_interleave": (
        """\
def interleave(seqs):
    iters = [iter(seq) for seq in seqs]
    while iters:
        left = []
        for itr in iters:
            try:
                yield next(itr)
            except StopIteration:
                continue
            left.append(itr)
        iters = left
""",
        """\
def interleave(seqs):
    waiting = collections.deque(map(iter, seqs))
    while waiting:
        itr = waiting.popleft()
        for item in itr:
            yield item
            waiting.append(itr)
            break
""",
        """\
def interleave(seqs):
    end = object()
    for row in zip_longest(*seqs, fillvalue=end):
        yield from (item for item in row if item is not end)
""",
        """\
def interleave(seqs):
    end = object()
    return iter([x for row in zip_longest(*seqs, fillvalue=end) for x in row if x is not end])
""",
    ),
    "toolz_partition_all": (
        """\
def partition_all(n, seq):
    itr = iter(seq)
    while True:
        group = tuple(itertools.islice(itr, n))
        if not group:
            return
        yield group
""",
        """\
def partition_all(n, seq):
    group = []
    for item in seq:
        group.append(item)
        if len(group) == n:
            yield tuple(group)
            group = []
    if group:
        yield tuple(group)
""",
        """\
def partition_all(n, seq):
    itr = iter(seq)
    return iter(lambda: tuple(itertools.islice(itr, n)), ())
""",
        """\
def partition_all(n, seq):
    items = list(seq)
    for at in range(0, len(items), n):
        yield tuple(items[at:at + n])
""",
    ),
    "toolz_unique_key": (
        """\
def unique(seq, key=None):
    seen = {}
    for item in seq:
        seen.setdefault(key(item) if key else item, item)
    yield from seen.values()
""",
        """\
def unique(seq, key=None):
    key = key or (lambda item: item)
    seen = set()
    for item in seq:
        val = key(item)
        if val in seen:
            continue
        seen.add(val)
        yield item
""",
        """\
def unique(seq, key=None):
    seen = []
    for item in seq:
        val = item if key is None else key(item)
        if val not in seen:
            seen.append(val)
            yield item
""",
        """\
def unique(seq, key=None):
    seen = set()
    return (i for i, k in ((i, i if key is None else key(i)) for i in seq) if not (k in seen or seen.add(k)))
""",
    ),
    "toolz_dissoc": (
        """\
def dissoc(d, *keys, **kwargs):
    factory = _get_factory(dissoc, kwargs)
    d2 = factory()
    d2.update(d)
    for key in keys:
        if key in d2:
            del d2[key]
    return d2
""",
        """\
def dissoc(d, *keys, **kwargs):
    factory = _get_factory(dissoc, kwargs)
    d2 = factory()
    for key in d:
        if key not in keys:
            d2[key] = d[key]
    return d2
""",
        """\
def dissoc(d, *keys, **kwargs):
    factory = _get_factory(dissoc, kwargs)
    d2 = factory()
    d2.update({k: d[k] for k in set(d) - set(keys)})
    return d2
""",
        """\
def dissoc(d, *keys, **kwargs):
    factory = _get_factory(dissoc, kwargs)
    d2 = factory()
    gone = frozenset(keys)
    d2.update([(k, v) for k, v in d.items() if k not in gone])
    return d2
""",
    ),
    "toolz_update_in_copies": (
        """\
def update_in(d, keys, func, default=None, factory=dict):
    key, *rest = keys
    rv = factory()
    rv.update(d)
    if rest:
        rv[key] = update_in(d[key] if key in d else factory(), rest, func, default, factory)
    else:
        rv[key] = func(d[key]) if key in d else func(default)
    return rv
""",
        """\
def update_in(d, keys, func, default=None, factory=dict):
    keys = list(keys)
    path = []
    for key in keys[:-1]:
        copied = factory()
        copied.update(d)
        path.append(copied)
        d = d[key] if key in d else factory()
    last = factory()
    last.update(d)
    last[keys[-1]] = func(d[keys[-1]] if keys[-1] in d else default)
    for copied, key in zip(reversed(path), reversed(keys[:-1])):
        copied[key] = last
        last = copied
    return last
""",
        """\
def update_in(d, keys, func, default=None, factory=dict):
    def walk(old, at):
        new = factory()
        if old is not None:
            new.update(old)
        key = keys[at]
        if at == len(keys) - 1:
            new[key] = func(new[key] if key in new else default)
        else:
            new[key] = walk(new[key] if key in new else None, at + 1)
        return new

    return walk(d, 0)
""",
        """\
def update_in(d, keys, func, default=None, factory=dict):
    rv = factory()
    rv.update(d)
    inner = rv
    for key in keys[:-1]:
        deeper = factory()
        if key in inner:
            deeper.update(inner[key])
        inner[key] = deeper
        inner = deeper
    last = keys[-1]
    inner[last] = func(inner[last]) if last in inner else func(default)
    return rv
""",
    ),
}
"""For shipped tasks: definitions that replace the function with the bug."""

TEXTS: Mapping[str, tuple[tuple[str, str], ...]] = {
    "toolz_memoize_keywords": (
        (
            "frozenset(kwargs) if kwargs else None,",
            "frozenset((k, v) for k, v in kwargs.items()) if kwargs else None,",
        ),
        (
            "frozenset(kwargs) if kwargs else None,",
            "frozenset({**kwargs}.items()) if kwargs else None,",
        ),
        (
            "frozenset(kwargs) if kwargs else None,",
            "frozenset(zip(kwargs, kwargs.values())) or None,",
        ),
    ),
    "cachetools_replaced_size": (
        ("diffsize = size\n        else", "diffsize = -self.__size[key] + size\n        else"),
        (
            "diffsize = size\n        else",
            "before = self.__size[key]\n            diffsize = size - before\n        else",
        ),
        (
            "if key in self.__data:\n            diffsize = size\n        else:\n            "
            "diffsize = size\n",
            "diffsize = size - (self.__size[key] if key in self.__data else 0)\n",
        ),
        (
            "if key in self.__data:\n            diffsize = size\n        else:\n            "
            "diffsize = size\n",
            "diffsize = size\n        if key in self.__data:\n            self.__currsize -= "
            "self.__size[key]\n",
        ),
    ),
    "cachetools_expired_membership": (
        ("return True", "return not link.expires <= self.timer()"),
        ("return True", "return link.expires > self.timer()"),
        ("return True", "with self.timer as time:\n                return time < link.expires"),
        ("return True", "now = self.timer()\n            return bool(now < link.expires)"),
    ),
}
"""For other shipped tasks: a text with the bug, and what replaces it."""


def variants(task: str, text: str) -> Iterator[str]:
    """The broken file of a shipped task, repaired in each way that is listed for it."""
    for code in FUNCTIONS.get(task, ()):
        name = code.removeprefix("def ").split("(", 1)[0]
        old = next(
            n for n in ast.parse(text).body if isinstance(n, ast.FunctionDef) and n.name == name
        )
        lines = text.splitlines(keepends=True)
        first = min(node.lineno for node in (old, *old.decorator_list))
        yield "".join([*lines[: first - 1], code, *lines[old.end_lineno :]])
    for wrong, right in TEXTS.get(task, ()):
        assert wrong in text, wrong
        yield text.replace(wrong, right, 1)
