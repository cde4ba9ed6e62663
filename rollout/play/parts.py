"""What the episodes of one run share in this process."""

from __future__ import annotations

import json
import logging
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rollout.bridge.flags import RolloutFlags
from rollout.bridge.sample import SampleWriter
from rollout.bridge.settings import RolloutSettings
from rollout.errors import EnvironmentFault, FailureBudgetError
from rollout.play.engine import EngineClient
from rollout.play.engine_loads import EngineLoads
from rollout.play.memory import Compaction, Memory
from rollout.tokens.encoding import DeltaEncoder
from rollout.turn import Turn
from rollout.workers.pool import EnvPool
from rollout.workers.utilization import ProcessUsage

logger = logging.getLogger(__name__)

RETRIES = (
    "engine_refused",
    "engine_connection_lost",
    "engine_timeout",
    "engine_bad_answer",
    "engine_other_weights",
    "turns_aborted",
    "turns_spanning_update",
    "turns_interrupted",
    "env_timeout",
    "env_worker_died",
    "env_bad_reply",
    "env_raised",
    "env_tool_raised",
    "env_judge_raised",
)
"""Faults after which a turn is tried again; `engine_http_<status>` is another."""
FAULTS = (
    *RETRIES,
    "env_replayed",
    "env_replay_mismatch",
    "env_close_failed",
    "env_observation_cut",
    "episodes_failed",
    "episodes_too_slow",
    "episodes_lost_at_resume",
    "player_died",
    "turns_by_other_weights",
    "sanity_check_failed",
    "answers_with_placeholder",
    "notes_not_asked",
    "prompt_tokens_differ",
    "image_prompt_tokens_differ",
    "responses_rewritten",
)


@dataclass
class Runtime:
    """What one run owns in this process; `rollout.play.runtime` makes one per `args` and event
    loop."""

    settings: RolloutSettings
    flags: RolloutFlags
    encoder: DeltaEncoder
    engine: EngineClient
    engine_loads: EngineLoads
    pool: EnvPool
    memory: Memory | Compaction | None
    samples: SampleWriter
    with_tools: Callable[[str], DeltaEncoder]
    """Returns an encoder like `encoder` whose prompts show the tools of this JSON list."""
    warned: set[str] = field(default_factory=set)
    """What was warned about and is not warned about again."""
    traced: bool = False
    """Whether turns record where their time goes."""
    counters: Counter[str] = field(default_factory=Counter)
    parked: Any = None
    """`ParkedEpisodes` of slime's outer loop; None until it aborts one."""
    _reported: Counter[str] = field(default_factory=Counter)
    """`fault_counts()` at the last `new_faults()`."""
    stream: Any = None
    """The `Stream` of continuous batches; None under other rollouts."""
    players: Any = None
    """`PlayerProcesses`; None: this process plays (`rollout_processes: 1`)."""

    def trainable(self, turns: Sequence[Turn]) -> tuple[Turn, ...]:
        """Return the turns; those that the actor's weights did not write lose their loss and are
        counted.

        Such a turn was played before any engine had named its weights.
        """
        found = [
            turn if self.engine.weights.wrote(turn.generation) else turn.without_loss()
            for turn in turns
        ]
        if changed := sum(new is not old for new, old in zip(found, turns, strict=True)):
            self.counters["turns_by_other_weights"] += changed
        return tuple(found)

    def count_failure(self, fault: EnvironmentFault, failed: int) -> None:
        """Count a lost environment, the `failed`-th of its batch; raises FailureBudgetError beyond
        the YAML's limit."""
        self.counters["episodes_failed"] += 1
        budget = self.settings.max_episode_failures_per_batch
        if failed > budget:
            raise FailureBudgetError(
                f"{failed} episodes of one batch failed; max_episode_failures_per_batch is "
                f"{budget}. Last failure:\n{fault}"
            ) from fault
        logger.warning("episode abandoned (%d of %d allowed): %s", failed, budget, fault)

    def count_fault(self, fault: str, episode_id: int, words: object) -> None:
        """Count a fault of an episode; the first of its kind is logged with `words`."""
        if not self.counters[fault]:
            logger.warning("%s, episode %d: %s", fault, episode_id, words)
        self.counters[fault] += 1

    def fault_counts(self) -> Counter[str]:
        """All faults and retries so far, by name."""
        found = self._own_faults()
        return found if self.players is None else found + self.players.faults

    def new_faults(self) -> Counter[str]:
        """Faults and retries since the last call, also those between batches, by name."""
        now = self.fault_counts()
        found = now - self._reported
        self._reported = now
        return found

    def _own_faults(self) -> Counter[str]:
        found = Counter(self.counters)
        found.update({f"env_{kind}": count for kind, count in self.pool.faults.items()})
        found.update({f"engine_{kind}": count for kind, count in self.engine.faults.items()})
        return found

    def usage(self) -> list[ProcessUsage]:
        """What this process and the players have used so far; called on the event loop."""
        engine = self.engine.utilization.snapshot()
        env = self.pool.utilization.snapshot()
        own = ProcessUsage(engine, env, time.thread_time(), count_retries(self._own_faults()))
        return [own, *(self.players.usage() if self.players is not None else ())]

    def encoder_for(self, tools: Sequence[Mapping[str, Any]]) -> DeltaEncoder:
        """Return the encoder whose prompts show these tools; raises EncodingError if the template
        ignores them."""
        return self.with_tools(json.dumps(list(tools))) if tools else self.encoder

    async def close(self) -> None:
        """Close the stream, the parked episodes, the players, the workers and the connections."""
        for part in (self.stream, self.parked, self.players):
            if part is not None:
                await part.close()
        self.pool.close()
        self.engine_loads.close()
        await self.engine.close()


def count_retries(faults: Mapping[str, int]) -> int:
    """The failed attempts among the faults that were repeated."""
    return sum(
        count
        for name, count in faults.items()
        if name in RETRIES or name.startswith("engine_http_")
    )
