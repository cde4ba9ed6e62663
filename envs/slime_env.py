"""Plays environments that are written for slime's own interface
(`examples/geo3k_vlm_multi_turn/base_env.py`)."""

from collections.abc import Mapping
from typing import Any

from envs.base import BaseInteractionEnv, Observation, StepInfo, make_observation, text_of
from envs.errors import EnvironmentFault, place_of_method

_OPTIONAL = ("valid_action", "executed_action", "progression", "metrics", "action", "action_span")
"""Keys of our `info` that are taken over if slime's has them; see `StepInfo`."""


class SlimeEnv(BaseInteractionEnv):
    """One episode of `env`, which has slime's interface
    (`examples/geo3k_vlm_multi_turn/base_env.py`).

    The question is the sample's prompt, as in slime. `docs/environments.md` has a table of what
    becomes what.
    """

    def __init__(self, env: Any, sample: Any) -> None:
        self.env = env
        self.instruction_prompt, self._question = _read_prompt(sample)
        self.tools = (getattr(sample, "metadata", None) or {}).get("tools") or ()
        self.deterministic = getattr(env, "deterministic", True)
        self._message: Any = None

    def reset(self) -> Observation:
        found = self.env.reset()
        shown = self._read(found[0] if isinstance(found, tuple) else found, "reset")
        more = (shown.get("multi_modal_data") or {}).get("image", [])
        parts = [*self._question, *({"type": "image", "image": image} for image in more)]
        if shown["obs_str"]:
            parts.append({"type": "text", "text": shown["obs_str"]})
        if not parts:
            advice = "let reset return {'obs_str': ...}, or train on slime's own data set (--prompt-data)"
            raise EnvironmentFault(f"the sample has no prompt and reset shows nothing; {advice}")
        images = [part["image"] for part in parts if part["type"] == "image"]
        texts = [part["text"] for part in parts if part["type"] == "text"]
        self._message = {"role": "user", "content": parts if images else "\n\n".join(texts)}
        return make_observation("\n\n".join(texts), images=images)

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
            raise EnvironmentFault(
                f"{method} returned the observation {found!r:.100}; {wanted} ({place})"
            )
        found = found or {}
        kinds = (found.get("multi_modal_data") or {}).values()
        return make_observation(
            str(found.get("obs_str") or ""), images=[image for images in kinds for image in images]
        )


def _read_prompt(sample: Any) -> tuple[str, list[dict[str, Any]]]:
    """Return the system message of the sample's prompt, and the other messages' parts with their
    images in place."""
    prompt = getattr(sample, "prompt", None) or ()
    images = list((getattr(sample, "multimodal_inputs", None) or {}).get("images") or ())
    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    system = "\n\n".join(
        text_of(message) for message in messages if message.get("role") == "system"
    )
    parts: list[dict[str, Any]] = []
    for message in messages:
        content = message.get("content") or ()
        if message.get("role") != "system":
            parts += (
                [{"type": "text", "text": content}]
                if isinstance(content, str)
                else map(dict, content)
            )
    for part in parts:
        if part.get("type") == "image" and images:
            part["image"] = images.pop(0)
    return system, [*({"type": "image", "image": image} for image in images), *parts]
