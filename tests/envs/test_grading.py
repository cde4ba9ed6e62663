"""Final answers: found in what the model wrote, and held against the reference, by value rather than by letter."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from envs.errors import ConfigError, EnvironmentFault
from envs.grading import MathChecker, exact, find_answer, load_grader
from envs.questions import Question

pytest.importorskip("math_verify", reason="math-verify is not installed; pip install 'math-verify[antlr4_13_2]'")


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        (r"So it is \boxed{\frac{9}{2}}.", r"\frac{9}{2}"),
        (r"First \boxed{3}, no, \boxed{ 4 }.", "4"),
        (r"\boxed{3 \text{ cm} and \boxed{", r"\boxed{3 \text{ cm} and \boxed{"),
        ("Answer: blue\nbecause", "blue"),
        ("The final answer is: \n 42 \nbye", "42"),
        ("answer = 3. Answer: 4", "4"),
        ("just this ", "just this"),
        (r"Answer: 3 \boxed{4}", "4"),
        ("Answer:", ""),
        ("", ""),
    ],
)
def test_the_final_answer_is_found_with_its_place(text: str, answer: str) -> None:
    found, (start, end) = find_answer(text)
    assert found == answer == text[start:end]


def test_only_what_follows_the_reasoning_counts() -> None:
    text = r"\boxed{3}</think> it is 4"
    assert find_answer(text, text.index(" it"))[0] == "it is 4"


@pytest.mark.parametrize("piece", ["\\boxed{", "answer", "answer ", "{", "answer:\n", " "])
def test_finding_takes_time_in_proportion_to_the_text(piece: str) -> None:
    find_answer("answer" + piece * (500_000 // len(piece)))


def test_exact_answers_ignore_case_articles_and_punctuation() -> None:
    assert exact("The  Blue, ball!", Question("q", "blue ball")) == 1.0
    assert exact("２", Question("q", ["1", "2"])) == 1.0
    assert exact("red ball", Question("q", "blue ball")) == 0.0


@pytest.fixture(scope="module")
def checker() -> Iterator[MathChecker]:
    checker = MathChecker()
    yield checker
    checker.close()


ROOT = r"3 \sqrt { 2 }"


@pytest.mark.parametrize(
    ("reference", "answer", "same"),
    [
        (ROOT, r"3\sqrt2", True),
        (ROOT, r"\sqrt{18}", True),
        (ROOT, "3*sqrt(2)", True),
        (ROOT, "4", False),
        (r"\frac { 9 } { 2 }", "4.5", True),
        (r"\frac { 9 } { 2 }", "9/2", True),
        ("27", r"27^\circ", True),
        ("27", "x = 27", True),
        ("54.4", r"54.4 \text{ cm}", True),
        ("1,000", "1000", True),
        ("12", r"12\pi", False),
        ("27", "27, 28", False),
        ("27", "27 or 28", False),
        ("27", "not 27", False),
        ("27", "", False),
        ("27", "}{ \\ \x00 \ud800"[:6], False),
        ("27", "\n27\n28", False),
    ],
)
def test_expressions_are_equal_by_value(checker: MathChecker, reference: str, answer: str, same: bool) -> None:
    assert checker.equal(reference, answer) is same


def test_an_expression_that_takes_for_ever_is_not_equal_and_the_next_one_is_answered(checker: MathChecker) -> None:
    assert checker.equal("27", "9^{9^{9^9}}") is False
    first = checker._process
    assert checker.equal("27", "3^3") is True
    assert checker._process is not first


def test_a_checker_that_does_not_start_is_a_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("envs.grading._BOOT", "raise SystemExit(1)")
    with pytest.raises(EnvironmentFault, match="did not start"):
        MathChecker().equal("1", "1")


def test_a_grader_that_is_not_there_is_refused() -> None:
    refused = [("maths", "must be exact, math"), ("envs.grading:gone", "has no gone")]
    for name, words in [*refused, ("envs.grading:START_S", "not a function")]:
        with pytest.raises(ConfigError, match=words):
            load_grader(name)
