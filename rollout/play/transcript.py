"""A played episode as readable JSON: what tables, the report and the viewer show.

Messages and images that several prompts show are stored once, so a transcript grows linearly with
its episode.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from rollout.spec import EpisodeSpec
from rollout.tokens.token_prefix import token_prefix
from rollout.turn import StopReason

RECORD_KEYS = (
    "env_path",
    "task",
    "options",
    "max_turns",
    "task_name",
    "seed",
    "stop",
    "fault",
    "turns",
    "return",
    "success",
    "progression",
    "valid_action_ratio",
    "metrics",
    "tools",
    "messages",
    "pictures",
    "story",
    "digests",
)
"""Keys of `Transcript.facts`."""


class Transcript:
    """The turns of one episode, in order."""

    def __init__(self) -> None:
        self.messages: list[dict[str, Any]] = []
        """Distinct messages; an image in their content is a key of `images`."""
        self.images: dict[str, str] = {}
        """`data:` URIs by key."""
        self.turns: list[dict[str, Any]] = []
        self.tools: Sequence[Mapping[str, Any]] = ()
        """Schemas of the tools that every prompt offers."""
        self.digests: Sequence[str] = ()
        """`EnvReply.digest` of everything that the environment showed, from its start."""
        self._ids = np.empty(0, np.int32)
        """The last turn's prompt and response."""
        self._known: dict[str, int] = {}
        self._metrics: Mapping[str, float] = {}
        self._progression = 0.0

    def add(
        self,
        prompt: Sequence[Mapping[str, Any]],
        images: Sequence[str],
        response: str,
        info: Mapping[str, Any],
        tokens: Mapping[str, Any] | None = None,
        ids: tuple[Sequence[int], Sequence[int]] | None = None,
    ) -> None:
        """Add a turn.

        Args:
            prompt: the messages of its prompt.
            images: a `data:` URI per image in `prompt`, in order; shorter if images are not kept.
            info: the environment's, as in `envs.base.StepInfo`, with the turn's `finish_reason` and
                `notes`, if known, and the `summary` of a turn in which the model only wrote its
                notes.
            tokens: lists with one entry per token of the response, such as `text` and `log_probs`.
            ids: the token ids of the prompt and of the response.
        """
        waiting = iter(images)
        numbers = info.get("metrics") or {}
        changed = {
            key: value for key, value in numbers.items() if value != self._metrics.get(key, 0)
        }
        self.turns.append(
            {
                "prompt": [self._message(message, waiting) for message in prompt],
                "response": response,
                "executed_action": info["executed_action"],
                "valid": info["valid_action"],
                "reward": float(info["reward"]),
                "terminated": info["terminated"],
                "truncated": info["truncated"],
                "progression": float(info["progression"]),
                "done": info["terminated"] or info["truncated"],
                "finish_reason": info.get("finish_reason"),
                "tokens": dict(tokens) if tokens is not None else None,
                "token_ids": self._token_ids(*ids) if ids is not None else None,
                **({"notes": info["notes"]} if info.get("notes") else {}),
                **({"summary": dict(info["summary"])} if info.get("summary") is not None else {}),
                **({"metrics": changed} if changed else {}),
                **({"thread": int(numbers["thread"])} if "thread" in numbers else {}),
                **({} if info.get("moves", True) else {"moves": False}),
            }
        )
        self._progression = float(info["progression"])
        self._metrics = numbers

    def facts(self, spec: EpisodeSpec, stop: StopReason, fault: str | None) -> dict[str, Any]:
        """The whole record of the episode. Without its environment (`fault`), return and
        progression are 0."""
        progression = self._progression if fault is None else 0.0
        played = [turn for turn in self.turns if "summary" not in turn]
        kept = [
            turn["summary"]["facts_kept"]
            for turn in self.turns
            if "facts_kept" in turn.get("summary", ())
        ]
        return {
            "env_path": spec.env.env_path,
            "task": spec.env.metadata.get("task"),
            "options": dict(spec.env.options),
            "max_turns": spec.env.max_turns,
            "task_name": spec.name,
            "seed": spec.env.metadata.get("seed"),
            "stop": str(stop),
            "fault": fault,
            "turns": len(played),
            "return": sum(turn["reward"] for turn in self.turns) if fault is None else 0.0,
            "success": progression >= 1.0,
            "progression": progression,
            "valid_action_ratio": sum(turn["valid"] for turn in played) / max(len(played), 1),
            "metrics": {**self._metrics, **({"facts_kept": sum(kept) / len(kept)} if kept else {})},
            "tools": [dict(tool) for tool in self.tools],
            "messages": self.messages,
            "pictures": self.images,
            "story": self.turns,
            "digests": list(self.digests),
        }

    def _token_ids(self, prompt: Sequence[int], response: Sequence[int]) -> dict[str, Any]:
        """A turn's ids; the first `shared` ids of its prompt are those of the last turn's prompt
        and response."""
        ids = token_prefix(prompt).to_numpy()
        answer = token_prefix(response).to_numpy()
        length = min(len(ids), len(self._ids))
        different = np.flatnonzero(ids[:length] != self._ids[:length])
        shared = int(different[0]) if len(different) else length
        self._ids = np.concatenate([ids, answer])
        return {"shared": shared, "prompt": ids[shared:].tolist(), "response": answer.tolist()}

    def _message(self, message: Mapping[str, Any], images: Any) -> int:
        content = message.get("content")  # none beside an agent's calls
        if isinstance(content, list):
            content = [self._part(part, images) for part in content]
        plain = {**message, "content": content}
        key = json.dumps(plain, sort_keys=True, default=str)
        if key not in self._known:
            self._known[key] = len(self.messages)
            self.messages.append(plain)
        return self._known[key]

    def _part(self, part: Mapping[str, Any], images: Any) -> dict[str, Any]:
        if part.get("type") != "image":
            return dict(part)
        if (data := next(images, None)) is None:
            return {"type": "image", "image": None}
        key = hashlib.blake2b(data.encode(), digest_size=8).hexdigest()
        self.images[key] = data
        return {"type": "image", "image": key}
