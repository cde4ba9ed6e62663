"""Plays one held-out episode to its end."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from rollout.bridge.sample import turn_facts
from rollout.errors import EngineError, EnvironmentFault
from rollout.play.episode import Episode, start_episode
from rollout.play.loop import Slot, play
from rollout.play.memory import Message
from rollout.play.parts import Runtime
from rollout.play.transcript import Transcript
from rollout.spec import EpisodeSpec
from rollout.tokens.encoding import DeltaEncoder
from rollout.turn import FinishReason, Generation, StopReason, Turn


@dataclass(frozen=True)
class EpisodeResult:
    """One held-out episode."""

    spec: EpisodeSpec
    turns: tuple[Turn, ...]
    stop: StopReason
    fault: str | None
    """Why the environment was lost; None if it was not."""
    transcript: Transcript
    """Each turn as readable text."""

    def facts(self) -> dict[str, Any]:
        """Return the values that tables, metrics and the viewer show."""
        return self.transcript.facts(self.spec, self.stop, self.fault)


async def play_episode(
    runtime: Runtime, spec: EpisodeSpec, *, detailed: bool = False
) -> EpisodeResult:
    """Play one episode to its end; a lost environment or a refused prompt ends it.

    If `detailed`, the transcript keeps images, token ids, and every token's text and log-prob.

    Raises:
        EngineError: the engine did not answer within the allowed retries, or refused more than this
            prompt.
    """
    held_out = HeldOut(runtime, spec, detailed)
    slot = Slot(held_out.start)
    try:
        await play(slot, held_out)
        assert held_out.ended is not None, "nothing else ends `play`"
        stop, fault = held_out.ended
    except EngineError as error:
        stop, fault = after_refusal(error, held_out.transcript)
        held_out.turns[-1:] = [replace(turn, truncated=True) for turn in held_out.turns[-1:]]
    finally:
        await slot.leave()
    return EpisodeResult(spec, tuple(held_out.turns), stop, fault, held_out.transcript)


class HeldOut:
    """Collects the turns of one episode, and what it showed as text."""

    def __init__(self, runtime: Runtime, spec: EpisodeSpec, detailed: bool) -> None:
        self.turns: list[Turn] = []
        self.transcript = Transcript()
        self.ended: tuple[StopReason, str | None] | None = None
        """Why the episode ended, and its fault; None while it goes on."""
        self._runtime = runtime
        self._spec = spec
        self._detailed = detailed
        self._params = runtime.flags.sampling_params(evaluation=True)
        self._messages: list[Message] = []
        self._images: list[str] = []

    async def start(self, _: int) -> Episode:
        """Start the episode, with limits for evaluations."""
        episode = await start_episode(
            self._runtime, self._spec, self._runtime.flags.eval_max_response_len
        )
        episode.max_turns = episode.session.turn_limit
        self.transcript.tools = episode.prompts.reply.tools
        return episode

    async def may_issue(self, slot: Slot) -> bool:
        """Whether the episode goes on."""
        return self.ended is None

    async def ask(self, slot: Slot, episode: Episode) -> Generation:
        """Note what the prompt shows, and return the response."""
        self._messages = list(episode.prompts.conversation.messages)
        self._images = list(episode.prompt.image_data) if self._detailed else []
        if (past := self._spec.past) is not None:
            past.check(episode.digests, episode.prompts.reply.deterministic)
            if len(self.turns) < len(past.turns):
                past.check_notes(len(self.turns), episode.writes_notes)
                return recorded_generation(past.turns[len(self.turns)], episode.prompts.encoder)
        return await episode.generate(self._params)

    def record(self, slot: Slot, episode: Episode, turn: Turn) -> None:
        """Add the turn to the transcript."""
        self.turns.append(turn)
        generation = turn.generation
        encoder = episode.prompts.encoder
        ids = generation.token_ids
        answer = encoder.answer_text(ids, generation.stop_id)  # as the environment read it
        info = turn_facts(turn) | {
            "metrics": turn.metrics,
            "finish_reason": str(generation.finish_reason),
        }
        info["moves"] = turn.moves
        tokens: Mapping[str, Any] | None = None
        prompt_and_answer = None
        if self._detailed:
            prompt_and_answer = turn.prompt.token_ids, ids
            if self._spec.past is None or turn.index >= len(self._spec.past.turns):
                tokens = {
                    "text": [encoder.decode([token]) for token in ids],
                    "log_probs": list(generation.log_probs),
                }
        self.transcript.add(self._messages, self._images, answer, info, tokens, prompt_and_answer)
        self.transcript.digests = episode.digests
        if episode.stop is not None:
            self.ended = episode.stop, None

    def lose(self, slot: Slot, fault: EnvironmentFault) -> None:
        """End the episode with its fault."""
        self.ended = StopReason.FAILED, str(fault)


def recorded_generation(turn: Mapping[str, Any], encoder: DeltaEncoder) -> Generation:
    """Return the response of a recorded turn, with log-probs of 0.

    It has the recorded token ids, or, if these do not read as the recorded text, those of the text:
    another model played, or a player without tokens.
    """
    ids = list((turn.get("token_ids") or {}).get("response") or ())
    if not ids or encoder.answer_text(ids, ids[-1]) != turn["response"]:
        ids = [*encoder.text.encode(turn["response"]), encoder.end_of_turn_ids[0]]
    return Generation(ids, [0.0] * len(ids), turn["response"], FinishReason.STOP, stop_id=ids[-1])


def after_refusal(error: EngineError, transcript: Transcript) -> tuple[StopReason, str | None]:
    """Return how an episode ends whose next prompt the engine refused, and its fault; raises any
    other EngineError.

    The transcript's last turn becomes truncated.
    """
    if not error.concerns_prompt:
        raise error
    for turn in transcript.turns[-1:]:
        turn.update(truncated=True, done=True)
    if error.too_long and transcript.turns:
        return StopReason.CONTEXT, None
    return StopReason.FAILED, str(error)
