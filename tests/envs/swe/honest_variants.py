"""Honest ways to solve the tests' own small tasks, each unlike the reference: the judge must pay
every one."""

from collections.abc import Mapping

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
