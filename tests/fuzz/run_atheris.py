"""Coverage-guided fuzzing of one target: python tests/fuzz/run_atheris.py TARGET -runs=100000.

Needs `pip install atheris`.
"""

import sys
import tempfile
from pathlib import Path

import atheris

sys.path.insert(0, str(Path(__file__).parents[2]))

with atheris.instrument_imports(include=["advantage", "envs", "rollout"]):
    from tests.fuzz.targets import SEEDS, TARGETS


def main() -> None:
    if len(sys.argv) < 2 or sys.argv[1] not in TARGETS:
        sys.exit(f"usage: run_atheris.py {{{','.join(TARGETS)}}} [-runs=N]")
    target = sys.argv.pop(1)
    corpus = Path(tempfile.mkdtemp(prefix=f"fuzz-{target}-"))
    for number, seed in enumerate(SEEDS[target]):
        (corpus / str(number)).write_bytes(seed)
    atheris.Setup([*sys.argv, str(corpus)], TARGETS[target])
    atheris.Fuzz()


if __name__ == "__main__":
    main()
