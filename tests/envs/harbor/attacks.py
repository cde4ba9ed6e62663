"""Test scripts of every kind that tasks have, and an agent that leaves files for them."""

from pathlib import Path

from tests.envs.harbor.task_folders import make_task, play

PAYS = "\nif [ $? -eq 0 ]; then echo 1; else echo 0; fi > /logs/verifier/reward.txt\n"
PYTEST = f"pytest -q /tests/test_it.py{PAYS}"
COPIED = f"mkdir -p /app/tests; cp /tests/test_it.py /app/tests; python3 -m pytest -q tests/test_it.py{PAYS}"
CHECK = f"python3 /tests/check.py{PAYS}"
RUNS = (
    "import subprocess, sys\n\n\ndef test_it():\n    run = [sys.executable, '/app/solution.py']\n"
)
RUNS += "    assert subprocess.run(run, capture_output=True, text=True).stdout == '42\\n'\n"
IMPORTS = "import solution\n\n\ndef test_it():\n    assert solution.answer() == 42\n\n\ndef test_more():\n"
IMPORTS += "    assert solution.answer() + 1 == 43\n"
CHECKS = "import json, statistics, difflib\nimport solution\n\nassert solution.answer() == 42\n"
CHECK_RUNS = RUNS.replace("def test_it():\n    ", "").replace("    assert", "assert")
WRONG = "def answer():\n    return 41\n"
TESTS = {
    "pytest imports": (
        PYTEST.replace("pytest", "python3 -m pytest", 1),
        {"tests/test_it.py": IMPORTS},
    ),
    "pytest imports after sys.path": (
        PYTEST,
        {"tests/test_it.py": "import sys\nsys.path.insert(0, '/app')\n" + IMPORTS},
    ),
    "pytest runs": (PYTEST, {"tests/test_it.py": RUNS}),
    "copied tests": (COPIED, {"tests/test_it.py": IMPORTS}),
    "unittest": (
        f"python3 -m unittest discover -s /tests -p 'test_*.py'{PAYS}",
        {
            "tests/test_it.py": "import unittest\nimport solution\n\n\nclass It(unittest.TestCase):\n"
            "    def test_it(self):\n        self.assertEqual(solution.answer(), 42)\n"
        },
    ),
    "script": (CHECK, {"tests/check.py": "import sys\nsys.path.insert(0, '/app')\n" + CHECKS}),
    "command": (f"python3 -c 'import json, solution; assert solution.answer() == 42'{PAYS}", {}),
    "script runs": (CHECK, {"tests/check.py": CHECK_RUNS}),
    "script writes": (
        "python3 /tests/check.py",
        {
            "tests/check.py": CHECK_RUNS.replace("assert ", "right = ")
            + "open('/logs/verifier/reward.txt', 'w').write(str(int(right)))\n"
        },
    ),
    "script prints": (
        "python3 /tests/check.py > /logs/verifier/reward.txt",
        {"tests/check.py": CHECK_RUNS.replace("assert ", "right = ") + "print(int(right))\n"},
    ),
    "shell": (f'[ "$(timeout 9 python3 /app/solution.py)" = 42 ]{PAYS}', {}),
    "shell in one": (
        '{ if [ "$(timeout 9 python3 /app/solution.py)" = 42 ]; then echo 1; else echo 0; fi; }'
        " > /logs/verifier/reward.txt",
        {},
    ),
}
DOCKERFILE = "FROM python:3.11-slim\nWORKDIR /app\n"


def episode(
    folder: Path, tests: str | tuple[str, dict[str, str]], files: dict[str, str]
) -> tuple[float, str]:
    """The reward of an agent that leaves these files in /app, and what the verdict says."""
    test, given = TESTS[tests] if isinstance(tests, str) else tests
    make_task(folder, test=test, files=given, dockerfile=DOCKERFILE)
    writes = [
        f"mkdir -p $(dirname '{name}'); cat > '{name}' <<'END_'\n{text}\nEND_"
        for name, text in files.items()
    ]
    env, info, _ = play(folder, "\n".join(writes))
    assert env.verdict is not None
    return info["reward"], f"{env.verdict.reason}\n{env.verdict.output}"
