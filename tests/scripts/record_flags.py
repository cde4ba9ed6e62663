"""Writes `slime_flags.txt`: every flag that train.py takes, how many values it takes (0, 1 or +),
and whether it is slime's own.

    PYTHONPATH=tests/slime/cpu/imports:$SLIME_PATH:. SLIME_CPU_WORK=/tmp \\
        $SLIME_CPU_PYTHON tests/scripts/record_flags.py

SGLang's own flags come from `sglang_flags.json` ({flag: values}) where one is given as argument,
else from whatever `sglang` can be imported.
"""

import argparse
import json
import sys
from pathlib import Path

PRE_PARSED = {"--train-backend": "1", "--debug-rollout-only": "0", "--debug-train-only": "0"}
PRE_PARSED["--load-debug-rollout-data"] = "1"


def values_of(action: argparse.Action) -> str:
    """0 for switches, 1 for one value, + for several."""
    if action.nargs == 0:
        return "0"
    return "1" if action.nargs in (None, "?") else "+"


def own_flags() -> set[str]:
    """The flags of slime's own parser, those of Megatron that it changes included."""
    from slime.utils.arguments import get_slime_extra_args_provider

    parser = get_slime_extra_args_provider()(argparse.ArgumentParser(add_help=False))
    return {name for action in parser._actions for name in action.option_strings} | set(PRE_PARSED)


def main() -> None:
    """Collect from slime's, Megatron's and SGLang's parsers."""
    from megatron.training.arguments import add_megatron_arguments
    from slime.backends.sglang_utils.arguments import add_sglang_arguments
    from slime.utils.arguments import get_slime_extra_args_provider

    parser = argparse.ArgumentParser(allow_abbrev=False, conflict_handler="resolve")
    parser = add_sglang_arguments(get_slime_extra_args_provider()(add_megatron_arguments(parser)))
    found = {
        name: values_of(a)
        for a in parser._actions
        for name in a.option_strings
        if name.startswith("--")
    }
    found |= PRE_PARSED
    if len(sys.argv) > 1:
        found = json.loads(Path(sys.argv[1]).read_text()) | found
    found.pop("--help", None)
    own = own_flags()
    lines = [f"{name} {values}{' slime' * (name in own)}" for name, values in sorted(found.items())]
    Path(__file__).with_name("slime_flags.txt").write_text("\n".join(lines) + "\n")
    print(f"{len(lines)} flags")


if __name__ == "__main__":
    main()
