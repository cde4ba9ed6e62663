"""Preflight around slime's parser: unknown flags are refused, other output is held back."""

import subprocess
import sys
from pathlib import Path

import pytest

from rollout.errors import ConfigError
from rollout.preflight import refuse_unknown

REPO = Path(__file__).parents[3]
KNOWN = {"--lr", "--rollout-batch-size", "--sglang-mem-fraction-static"}


def test_known_flags_with_any_values_and_those_of_an_engine_that_does_not_start_pass() -> None:
    words = ["--lr", "1e-6", "--rollout-batch-size=4", "-1", "spare", "--sglang-anything", "1"]
    refuse_unknown(words, KNOWN, ("--sglang-",))


@pytest.mark.parametrize("word", ["--rollout-batchsize=4", "--rollout-batch"])
def test_a_misspelt_or_shortened_flag_is_refused_with_the_nearest_one(word: str) -> None:
    with pytest.raises(ConfigError, match=r"did you mean --rollout-batch-size\?"):
        refuse_unknown(["--lr", "1", word, "4"], KNOWN)


def test_every_unknown_flag_is_named_once() -> None:
    with pytest.raises(ConfigError, match="knows --lora-rank, --quux;"):
        refuse_unknown(["--lora-rank", "8", "--quux", "--lora-rank", "9"], {"--zzz"})


def run_program(lines: str) -> subprocess.CompletedProcess[str]:
    """Run in a new process, because pytest replaces the streams of this one."""
    program = f"from rollout.preflight import captured_output\n{lines}"
    return subprocess.run([sys.executable, "-c", program], cwd=REPO, capture_output=True, text=True)


def test_output_is_held_back_also_before_an_expected_error() -> None:
    done = run_program(
        "from rollout.errors import ConfigError\ntry:\n    with captured_output():\n        "
        "print('from Python')\n        raise ConfigError('wrong')\nexcept ConfigError as error:\n "
        "   print(error)"
    )
    assert (done.stdout, done.stderr, done.returncode) == ("wrong\n", "", 0)


def test_output_is_shown_after_an_unexpected_error() -> None:
    """Meanwhile the streams have descriptors, which Megatron's call of faulthandler needs."""
    done = run_program(
        "import faulthandler\nwith captured_output():\n    faulthandler.enable()\n    "
        "print('what led to it')\n    raise SystemExit('unforeseen')"
    )
    assert done.returncode == 1 and done.stderr == "what led to it\nunforeseen\n"
