"""Final answers: found in what the model wrote, and held against the reference, by value rather
than by letter."""

from collections.abc import Iterator

import pytest

from envs.errors import ConfigError, EnvironmentFault
from envs.questions import Question
from envs.questions.grading import MathChecker, exact, find_answer, load_grader
from tests.envs.questions.math_answers import ANSWERS

pytest.importorskip(
    "math_verify", reason="math-verify is not installed; pip install 'math-verify[antlr4_13_2]'"
)


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


def test_exact_answers_ignore_case_articles_and_punctuation() -> None:
    assert exact("The  Blue, ball!", Question("q", "blue ball")) == 1.0
    assert exact("２", Question("q", ["1", "2"])) == 1.0
    assert exact("red ball", Question("q", "blue ball")) == 0.0


@pytest.mark.parametrize(
    ("reference", "right", "wrong"),
    [
        ("A", ["a", "(A)", "A."], [".", "the", "an", ""]),
        ("<", [" < "], [">", "", "a"]),
        ("-5", ["-5.", "(-5)", "-$5"], ["5"]),
        ("1/2", ["$1/2$"], ["12"]),
        ("1,000", ["1000", "+1000."], ["1.000"]),
    ],
)
def test_exact_answers_differ_in_the_signs_of_numbers_and_where_nothing_else_is_left(
    reference: str, right: list[str], wrong: list[str]
) -> None:
    assert [exact(answer, Question("q", reference)) for answer in right] == [1.0] * len(right)
    assert [exact(answer, Question("q", reference)) for answer in wrong] == [0.0] * len(wrong)


@pytest.fixture(scope="module")
def checker() -> Iterator[MathChecker]:
    checker = MathChecker()
    yield checker
    checker.close()


@pytest.mark.parametrize("answer", ["", "}{ \\ \x00", "\n27\n28"])
def test_what_is_no_expression_is_wrong(checker: MathChecker, answer: str) -> None:
    assert checker.equal("27", answer) is False


@pytest.mark.parametrize("row", ANSWERS, ids=lambda row: f"{row[0]} | {row[1]}")
def test_answers_as_models_write_them_are_graded_by_value(checker: MathChecker, row: tuple) -> None:
    reference, answer, ours, slimes, *why = row
    assert checker.equal(reference, answer) is ours
    assert bool(why) is (ours is not slimes), (
        "every difference from slime's grader is explained, and nothing else is"
    )


def test_a_comparison_that_never_ends_is_stopped_and_the_next_one_is_answered(
    checker: MathChecker,
) -> None:
    assert checker.equal("27", "9^{9^{9^9}}") is False
    first = checker._process
    assert checker.equal("81", "3^4") is True
    assert checker._process is not first


def test_a_checker_that_does_not_start_is_a_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("envs.questions.grading._BOOT", "raise SystemExit(1)")
    with pytest.raises(EnvironmentFault, match="did not start"):
        MathChecker().equal("1", "1")


def test_an_unknown_grader_is_refused() -> None:
    for name, words in (
        ("maths", "must be exact, math"),
        ("envs.questions.grading:START_S", "not a function"),
    ):
        with pytest.raises(ConfigError, match=words):
            load_grader(name)
