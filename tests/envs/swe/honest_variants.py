"""Honest ways to solve the tasks that the tests play, each unlike the reference: the judge must pay every one."""

from __future__ import annotations

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
        ("frozenset(kwargs) if kwargs else None,", "frozenset((k, v) for k, v in kwargs.items()) if kwargs else None,"),
        ("frozenset(kwargs) if kwargs else None,", "frozenset({**kwargs}.items()) if kwargs else None,"),
        ("frozenset(kwargs) if kwargs else None,", "frozenset(zip(kwargs, kwargs.values())) or None,"),
    ),
    "cachetools_replaced_size": (
        ("diffsize = size\n        else", "diffsize = -self.__size[key] + size\n        else"),
        (
            "diffsize = size\n        else",
            "before = self.__size[key]\n            diffsize = size - before\n        else",
        ),
        (
            "if key in self.__data:\n            diffsize = size\n        else:\n            diffsize = size\n",
            "diffsize = size - (self.__size[key] if key in self.__data else 0)\n",
        ),
        (
            "if key in self.__data:\n            diffsize = size\n        else:\n            diffsize = size\n",
            "diffsize = size\n        if key in self.__data:\n            self.__currsize -= self.__size[key]\n",
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

BILLS: Mapping[str, str] = {
    "fractions, a subclass and an own exception": """\
from fractions import Fraction


class Words(ValueError):
    pass


class Text(str):
    pass


def total(prices):
    return sum(map(Fraction, prices))


def label(count):
    return Text('%d items' % count)


def parse(text):
    if not text.isdigit():
        raise Words(text)
    return int(text)
""",
    "floats": """\
import math


def total(prices):
    return math.fsum(prices)


def label(count):
    return '{} items'.format(count)


parse = int
""",
    "decimals": """\
from decimal import Decimal
import functools, operator


def total(prices):
    return float(functools.reduce(operator.add, map(Decimal, prices), Decimal(0)))


def label(count):
    return ' '.join([str(count), 'items'])


def parse(text):
    try:
        return int(text, 10)
    except ValueError as error:
        raise UnicodeError('no number') from error
""",
    "a loop with a frame of its own": """\
import inspect


def total(prices):
    found = 0
    for price in prices:
        found += price
    assert inspect.currentframe() is not None
    return found


def label(count):
    return repr(count) + ' items'


def parse(text):
    return int(text)
""",
    "a numpy-like number": """\
class Cents(int):
    def __repr__(self):
        return 'Cents'


def total(prices):
    whole = sum(prices)
    return Cents(whole) if whole == int(whole) else whole


def label(count):
    return f'{count:d} items'


def parse(text):
    return Cents(text)
""",
}
"""`shop/bills.py` of `forms_repository.py`; `ORDER` is written below each."""

ORDER = """\


class Order:
    def __init__(self, prices):
        self.prices = list(prices)

    @property
    def due(self):
        return total(self.prices)
"""

ORDERS: Mapping[str, str] = {
    "another way": """\
def parse(text):
    if not text:
        raise ValueError('no price')
    return float(text)


def tax(price):
    return price * 19 / 100


def names(orders):
    return [n for i, n in enumerate(sorted(orders)) if n not in sorted(orders)[:i]]
""",
    "integers where they fit": """\
def parse(text):
    price = float(text)
    return int(price) if price.is_integer() else price


def tax(price):
    return round(price * 0.19, 10)


def names(orders):
    return list(dict.fromkeys(sorted(orders)))
""",
    "fractions": """\
from fractions import Fraction


def parse(text):
    return Fraction(text)


def tax(price):
    return price * Fraction(19, 100)


def names(orders):
    return sorted({*orders})
""",
    "a list of its own": """\
class Names(list):
    pass


def parse(text):
    return float(text.strip())


def tax(price):
    return price - price * 0.81


def names(orders):
    return Names(sorted(frozenset(orders)))
""",
    "own exceptions": """\
class NoPrice(ValueError):
    pass


def parse(text):
    try:
        return float(text)
    except ValueError:
        raise NoPrice(text) from None


def tax(price):
    return 0.19 * price


def names(orders):
    import itertools
    return [name for name, _ in itertools.groupby(sorted(orders))]
""",
}
"""`shop/orders.py` of `orders_repository.py`."""


def variants(task: str, text: str) -> Iterator[str]:
    """The broken file of a shipped task, repaired in each way that is listed for it."""
    for code in FUNCTIONS.get(task, ()):
        name = code.removeprefix("def ").split("(", 1)[0]
        old = next(n for n in ast.parse(text).body if isinstance(n, ast.FunctionDef) and n.name == name)
        lines = text.splitlines(keepends=True)
        first = min(node.lineno for node in (old, *old.decorator_list))
        yield "".join([*lines[: first - 1], code, *lines[old.end_lineno :]])
    for wrong, right in TEXTS.get(task, ()):
        assert wrong in text, wrong
        yield text.replace(wrong, right, 1)
