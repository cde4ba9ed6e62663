"""Plays environments that are written for slime's `BaseInteractionEnv` (`examples/geo3k_vlm_multi_turn/base_env.py`).

The question is the sample's prompt, as in slime. `docs/environments.md` has a table of what becomes what.
"""

from collections.abc import Mapping
from typing import Any

from envs.base import BaseInteractionEnv, Observation, StepInfo, interleave, make_observation
from envs.errors import EnvironmentFault, place_of_method
from envs.questions import Question, QuestionSettings, read_question

_OPTIONAL = ("valid_action", "executed_action", "progression", "metrics", "action", "action_span")
"""Keys of our `info` that are taken over if slime's has them; see `StepInfo`."""


class SlimeEnv(BaseInteractionEnv):
    """One episode of `env`, which has slime's interface."""

    def __init__(self, env: Any, sample: Any) -> None:
        self.env = env
        has_prompt = bool(getattr(sample, "prompt", None))
        self.question = read_question(sample, QuestionSettings())[0] if has_prompt else Question("")
        self.instruction_prompt = self.question.system
        self.tools = (getattr(sample, "metadata", None) or {}).get("tools") or ()
        self.deterministic = getattr(env, "deterministic", True)
        self._message: Any = None

    def reset(self) -> Observation:
        found = self.env.reset()
        shown = self._read(found[0] if isinstance(found, tuple) else found, "reset")
        text = "\n\n".join(filter(None, [self.question.text, shown["obs_str"]]))
        more = (shown.get("multi_modal_data") or {}).get("image", [])
        if not text and not more:
            advice = "let reset return {'obs_str': ...}, or train on slime's own data set (--prompt-data)"
            raise EnvironmentFault(f"the sample has no prompt and reset shows nothing; {advice}")
        observation = make_observation(text, images=[*self.question.images, *more])
        self._message = super().format_observation(observation)
        if self.question.pieces:
            *pieces, last = self.question.pieces
            last = "\n\n".join(filter(None, [last, shown["obs_str"]]))
            self._message["content"] = interleave([*pieces, last], [*self.question.images, *more])
        return observation

    def step(self, response_text: str) -> tuple[Observation, bool, StepInfo]:
        answer: Any = self.env.step(response_text)
        if not isinstance(answer, tuple) or len(answer) != 3:
            return answer  # the caller says what is wrong with it
        found, done, said = answer
        observation = self._read(found, "step")
        said = said if isinstance(said, Mapping) else {}
        reward = said.get("reward") or 0.0
        truncated = bool(done and said.get("truncated"))
        info: Any = {
            "reward": reward,
            "terminated": bool(done and said.get("terminated", not truncated)),
            "truncated": truncated,
            "valid_action": True,
            "executed_action": response_text,
            "progression": min(max(float(reward), 0.0), 1.0) if done else 0.0,
        }
        info |= {key: said[key] for key in _OPTIONAL if key in said}
        own: Any = getattr(self.env, "format_observation", super().format_observation)
        self._message = own({**(found or {}), "obs_str": observation["obs_str"]})
        return observation, done, info

    def format_observation(self, observation: Observation) -> dict[str, Any]:
        return self._message

    def close(self) -> None:
        if callable(close := getattr(self.env, "close", None)):
            close()

    def _read(self, found: Any, method: str) -> Observation:
        """Return slime's observation in our form; it may be empty."""
        if found is not None and not isinstance(found, Mapping):
            place = place_of_method(self.env, method)
            wanted = "slime's interface wants a mapping with obs_str, or an empty one"
            raise EnvironmentFault(f"{method} returned the observation {found!r:.100}; {wanted} ({place})")
        found = found or {}
        kinds = (found.get("multi_modal_data") or {}).values()
        return make_observation(str(found.get("obs_str") or ""), images=[image for images in kinds for image in images])
