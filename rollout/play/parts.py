"""What every episode of a run is played with: settings, flags, encoder, engine client, environment pool, memory."""

from __future__ import annotations

import json
import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rollout.bridge.flags import RolloutFlags
from rollout.bridge.settings import RolloutSettings
from rollout.play.engine import EngineClient
from rollout.play.memory import Memory
from rollout.tokens.encoding import DeltaEncoder
from rollout.turn import Prompt
from rollout.workers.pool import EnvPool

MAX_TOOL_SETS = 256


@dataclass
class Parts:
    """The parts that a turn needs; `rollout.play.runtime` builds them."""

    settings: RolloutSettings
    flags: RolloutFlags
    encoder: DeltaEncoder
    engine: EngineClient
    pool: EnvPool
    memory: Memory
    make_encoder: Callable[..., DeltaEncoder]
    """`encoder` with other `tools`."""
    traced: bool = False
    """Whether turns record where their time goes."""
    counters: Counter[str] = field(default_factory=Counter)
    _with_tools: dict[str, DeltaEncoder] = field(default_factory=dict)
    _tools_lock: threading.Lock = field(default_factory=threading.Lock)

    def fault_counts(self) -> Counter[str]:
        """All faults and retries so far, by name."""
        found = Counter(self.counters)
        found.update({f"env_{kind}": count for kind, count in self.pool.faults.items()})
        found.update({f"engine_{kind}": count for kind, count in self.engine.faults.items()})
        return found

    def encoder_for(self, tools: Sequence[Mapping[str, Any]]) -> DeltaEncoder:
        """The encoder whose prompts show these tools; `encoder` if there are no tools.

        Raises:
            EncodingError: the chat template ignores tools or their results.
        """
        if not tools:
            return self.encoder
        key = json.dumps(list(tools), sort_keys=True)
        with self._tools_lock:  # prompts of agents are built in threads
            if (encoder := self._with_tools.pop(key, None)) is not None:
                self._with_tools[key] = encoder  # now the last to be dropped
                return encoder
        encoder = self.make_encoder(tools=tools)
        with self._tools_lock:
            self._with_tools[key] = encoder
            if len(self._with_tools) > MAX_TOOL_SETS:
                self._with_tools.pop(next(iter(self._with_tools)))
        return encoder

    def fits(self, prompt: Prompt) -> bool:
        """Whether the prompt leaves room in the context for an answer of full length."""
        return self.flags.fits(len(prompt.token_ids))
