"""slime's own math grader gives the verdicts that the list of answers says it gives."""

import json
import subprocess

from tests.envs.questions.math_answers import ANSWERS
from tests.slime.cpu.harness import Slime

# The module is loaded by its path: its package would import Ray and the rest of slime.
GRADE = """
import importlib.util, json, sys
spec = importlib.util.spec_from_file_location("math_utils", sys.argv[1])
module = importlib.util.module_from_spec(spec)
spec.loader.exec_module(module)
pairs = json.load(sys.stdin)
print(json.dumps([bool(module.grade_answer_verl("\\\\boxed{" + answer + "}", label)) for label, answer in pairs]))
"""


def test_slimes_grader_says_what_the_list_says(slime: Slime) -> None:
    command = [
        str(slime.python),
        "-c",
        GRADE,
        str(slime.path / "slime" / "rollout" / "rm_hub" / "math_utils.py"),
    ]
    pairs = json.dumps([row[:2] for row in ANSWERS])
    done = subprocess.run(
        command, input=pairs, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    verdicts = json.loads(done.stdout)
    wrong = [row for row, verdict in zip(ANSWERS, verdicts, strict=True) if row[3] is not verdict]
    assert not wrong
