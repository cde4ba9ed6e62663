"""The numbers of the report: what each means, its healthy range, and what to do outside of it.

`docs/report.md` explains every number of this table. The limit of `valid_actions` is Verlog's goal; the others are
rules of thumb.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass


class Verdict(enum.StrEnum):
    """How a number or a question is judged, from best to worst."""

    NONE = "-"
    """Not judged: not measured, or only information."""
    GOOD = "good"
    """Within the healthy range."""
    LOOK = "look"
    """Read some episodes before you train."""
    ACT = "act"
    """Change something before you train."""


_ORDER = list(Verdict)


def worst(verdicts: list[Verdict]) -> Verdict:
    """Return the worst of several verdicts; NONE without any."""
    return max(verdicts, key=_ORDER.index, default=Verdict.NONE)


@dataclass(frozen=True)
class Value:
    """A measured number."""

    number: float | None
    """None if it could not be measured."""
    note: str = ""
    """Why it could not be measured, or a detail."""
    error: float | None = None
    """Standard error."""


@dataclass(frozen=True)
class Measure:
    """One number of the report."""

    key: str
    question: int
    """1 diversity, 2 reasoning, 3 valid actions, 4 failures."""
    title: str
    good: float | None = None
    """The limit of the healthy range; None if the number is not judged."""
    act: float | None = None
    """The limit from which on something should change; None if there is none."""
    higher: bool = True
    """Whether higher is better."""
    percent: bool = True

    @property
    def advice(self) -> str:
        """What to do outside of the healthy range; empty if there is nothing to say."""
        return _ADVICE.get(self.key, "")

    def judge(self, value: Value) -> Verdict:
        """Compare with the healthy range."""
        if value.number is None or self.good is None:
            return Verdict.NONE
        sign = 1 if self.higher else -1
        if sign * value.number >= sign * self.good:
            return Verdict.GOOD
        return Verdict.ACT if self.act is not None and sign * value.number <= sign * self.act else Verdict.LOOK

    def show(self, number: float | None) -> str:
        """Return the number as text."""
        if number is None:
            return "-"
        return f"{100 * number:.1f} %" if self.percent else f"{number:.3g}" if abs(number) < 1000 else f"{number:.0f}"

    def healthy(self) -> str:
        """Return the healthy range as text."""
        if self.good is None:
            return ""
        return f"{'at least' if self.higher else 'at most'} {self.show(self.good)}" if self.good else "none"


QUESTIONS = {
    1: "Are reasoning paths diverse?",
    2: "Is there enough reasoning before the action?",
    3: "What share of actions is valid?",
    4: "How do episodes fail?",
}

MEASURES = (
    Measure("distinct_reasoning", 1, "distinct reasonings", 0.1, 0.02),
    Measure("reasoning_overlap", 1, "overlap of reasonings in different states", 0.5, 0.8, higher=False),
    Measure("observation_retrieval", 1, "reasoning points to its observation", 0.1, 0.03),
    Measure("state_information", 1, "actions explained by the observation", 0.02, 0.01),
    Measure("effective_actions", 1, "effective number of actions", 1.5, 1.2, percent=False),
    Measure("same_state_variety", 1, "different actions in the same state", 0.05),
    Measure("unused_actions", 1, "legal actions that were never used"),
    Measure("answers_with_reasoning", 2, "answers with reasoning", 0.95, 0.5),
    Measure("reasoning_words", 2, "words of reasoning, median", 10, 3, percent=False),
    Measure("reasoning_words_p95", 2, "words of reasoning, 95th percentile", percent=False),
    Measure("response_tokens", 2, "tokens per answer, median", percent=False),
    Measure("text_after_action", 2, "answers with text after the action", 0.05, 0.5, higher=False),
    Measure("cut_answers", 2, "answers cut at the length limit", 0.02, 0.1, higher=False),
    Measure("valid_actions", 3, "valid answers", 0.95, 0.8),
    Measure("valid_task_gap", 3, "valid answers: all tasks minus the worst task", 0.1, 0.3, higher=False),
    Measure("valid_drop", 3, "loss of validity from an episode's first to its last third", 0.05, 0.2, higher=False),
    Measure("no_action_line", 3, "answers without an ACTION line", 0.02, 0.1, higher=False),
    Measure("translatable", 3, "answers that a translation would catch", 0.02, 0.1, higher=False),
    Measure("success", 4, "episodes that succeed"),
    Measure("mean_return", 4, "mean return", percent=False),
    Measure("mean_progression", 4, "mean progression", 0.02, 0.0),
    Measure("mean_turns", 4, "turns per episode", percent=False),
    Measure("equal_returns", 4, "starts, or tasks, whose returns are all equal", 0.5, 0.9, higher=False),
    Measure("lost_environment", 4, "episodes that failed", 0.0, 0.02, higher=False),
    Measure("out_of_time", 4, "episodes that run out of turns", 0.5, higher=False),
    Measure("out_of_context", 4, "episodes that run out of context", 0.0, 0.05, higher=False),
    Measure("early_losses", 4, "episodes lost early", 0.1, 0.5, higher=False),
    Measure("loop_turns", 4, "turns in loops", 0.05, 0.25, higher=False),
    Measure("stuck_turns", 4, "turns that repeat an earlier attempt", 0.1, 0.4, higher=False),
)
BY_KEY = {measure.key: measure for measure in MEASURES}

_TEMPLATE = (
    "The answers hardly depend on what the model sees. Check that the prompt shows the current observation, then "
    "imitate demonstrations, or train on starts whose returns differ."
)
_STUCK = (
    "The model repeats what did not work. Show more of the past (memory.n), or say in the observation that the last "
    "action had no effect."
)
_ADVICE = {
    "distinct_reasoning": _TEMPLATE,
    "reasoning_overlap": _TEMPLATE,
    "observation_retrieval": _TEMPLATE,
    "state_information": (
        "The actions do not depend on what the model sees. Read some answers: does the action follow from the "
        "reasoning? If not, imitate demonstrations that explain themselves, or let PPO train longer before you judge "
        "again."
    ),
    "effective_actions": (
        "The model plays nearly one action only. Raise the temperature, or imitate demonstrations first."
    ),
    "same_state_variety": (
        "The model always does the same in the same state, so PPO has nothing to compare. Evaluate and train at "
        "temperature 1."
    ),
    "answers_with_reasoning": (
        "Ask for reasoning before the action in the prompt (`answer_format`), or imitate demonstrations that explain "
        "themselves."
    ),
    "reasoning_words": "Ask for reasoning step by step in the prompt; a few words cannot hold a plan.",
    "text_after_action": (
        "Text after the action cannot change it. Ask for the action as the last line, or stop the answer there."
    ),
    "cut_answers": (
        "Raise the length limit (--rollout-max-response-len, --max-response-len), or ask for shorter reasoning."
    ),
    "valid_actions": "Read the table of invalid answers: first translate near matches, then improve the prompt.",
    "valid_task_gap": "One task has far fewer valid answers: check the actions that its prompt names.",
    "valid_drop": "Validity falls as episodes go on. Show less of the past (memory.n), or keep mistakes out of it.",
    "no_action_line": "Show the form of an answer in the prompt (`answer_format`), or imitate demonstrations first.",
    "translatable": "Add the listed translations to the environment; each turns a wasted turn into a played one.",
    "mean_progression": (
        "Hardly any episode makes progress, so PPO finds no reward. Choose easier tasks, warm-start the policy, or "
        "shape the reward (`env.shaping`)."
    ),
    "equal_returns": (
        "Equal returns give no advantage to learn from. Choose easier or harder tasks, warm-start the policy, or shape"
        " the reward (`env.shaping`)."
    ),
    "lost_environment": (
        "Read the faults below: the environment was lost, or the prompt was refused. `slime-verlog check` names the "
        "line of an environment's fault."
    ),
    "out_of_time": "Read where the turns go; then raise max_turns, or choose shorter tasks.",
    "out_of_context": "Raise the context length, or use `history: window` with a smaller memory.n.",
    "early_losses": "Episodes end before the model can act on what it sees: look at what ends them.",
    "loop_turns": _STUCK,
    "stuck_turns": _STUCK,
}
