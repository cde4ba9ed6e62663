"""The program is run as people run it."""

import subprocess
import sys

import pytest


def interest(*arguments):
    return subprocess.run(
        [sys.executable, "/app/interest.py", *arguments], capture_output=True, text=True, timeout=30
    )


@pytest.mark.parametrize(
    ("arguments", "printed"),
    [
        (("1000", "10", "2"), "1210.00"),
        (("1000", "10", "0"), "1000.00"),
        (("250", "4", "10"), "370.06"),
        (("1000", "-10", "2"), "810.00"),
    ],
)
def test_what_a_deposit_is_worth(arguments, printed):
    done = interest(*arguments)
    assert (done.returncode, done.stdout) == (0, printed + "\n")


@pytest.mark.parametrize(
    "arguments", [("1000", "10"), ("a", "10", "2"), ("1000", "10", "-1"), ("1000", "10", "1.5")]
)
def test_wrong_arguments(arguments):
    done = interest(*arguments)
    assert (done.returncode, done.stdout) == (2, "")
