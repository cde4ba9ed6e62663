"""Judges what episodes showed: one finding per question that an author would ask."""

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from envs.base import text_of
from inspection.check.playthrough import Playthrough
from rollout.bridge.settings import RolloutSettings
from rollout.errors import EnvironmentFault
from rollout.spec import CHARS_PER_TOKEN, EpisodeSpec
from rollout.turn import EnvReply
from rollout.workers.abilities import Abilities
from rollout.workers.trial import Trial

LONG_OBSERVATION = 4000
"""Tokens above which an observation is called long."""
SLOW_STEP_S, SLOW_RESET_S = 0.5, 10.0
"""Seconds above which steps and resets are called slow."""
LOWEST_RETURN, HIGHEST_RETURN = -1.0, 10.0
"""Sums of an episode's rewards that a critic learns well."""
MIN_LEFT = 0.1
"""Share of the expert's rewards that should be left at the first turn after discounting."""
GROWTH, GROWTH_TURNS = 2.0, 16
"""A prompt grows if its last quarter is this much longer than its second, in an episode of at least
so many turns."""
FREE_TEXTS = ("", "Hello! What should I do?", "THINK: I do not know.\nACTION:")
"""Responses without an action, as untrained models write them."""
Encoders = Callable[..., Any] | None
"""Makes an encoder from `tools`; None without a tokenizer."""


class Status(StrEnum):
    """How serious a finding is; `ERROR` fails the command."""

    OK = "ok"
    WARNING = "warning"
    ERROR = "error"


@dataclass(frozen=True)
class Finding:
    """The answer to one question."""

    name: str
    status: Status
    detail: str


def ok(name: str, detail: str) -> Finding:
    """Return a finding that needs nothing to be done."""
    return Finding(name, Status.OK, detail)


def warning(name: str, detail: str) -> Finding:
    """Return a finding that the author should look at."""
    return Finding(name, Status.WARNING, detail)


async def answer_freely(trial: Trial, episode: EpisodeSpec) -> Finding:
    """Answer with `FREE_TEXTS`; raises SlimeVerlogError if the environment fails."""
    valid = 0
    done = True
    for answer in FREE_TEXTS:
        if done:
            await trial.reset(episode)
        try:
            reply = await trial.step(episode, answer)
        except EnvironmentFault as error:
            raise type(error)(
                f"{error} (the response was {answer!r}; step must take any text)"
            ) from error
        assert reply.info is not None
        valid = valid + reply.info["valid_action"]
        done = reply.done
    detail = f"responses without an action are taken; {valid} of {len(FREE_TEXTS)} counted as valid"
    return warning("any text", detail) if valid == len(FREE_TEXTS) else ok("any text", detail)


def judge(
    plays: Sequence[Playthrough],
    abilities: Abilities,
    settings: RolloutSettings,
    encoders: Encoders,
) -> Iterator[Finding]:
    """Yield the findings about the episodes of one task."""
    replies = [reply for play in plays for reply in play.replies]
    resets = [reply.seconds for reply in replies if reply.info is None]
    steps = [reply.seconds for reply in replies if reply.info is not None]
    yield ok("contract", f"{len(replies)} replies have all keys, with the right types")
    for play in plays:
        yield _outcome(play)
    yield _ending(plays, abilities, settings)
    yield _reward(plays, abilities)
    yield from _scale(plays)
    yield from _discount(plays, settings)
    yield from _range(plays, settings)
    yield _validity(plays, abilities)
    yield _growth(plays, settings)
    encoder = encoders(tools=plays[0].replies[0].tools) if encoders else None
    yield from _budget(plays[0], settings, encoder)
    yield _size(replies, encoder)
    yield _speed("reset time", resets, SLOW_RESET_S)
    yield _speed("step time", steps, SLOW_STEP_S)


def _outcome(play: Playthrough) -> Finding:
    turns = len(play.infos)
    total = sum(play.rewards)
    share = sum(info["valid_action"] for info in play.infos) / max(turns, 1)
    progression = float(play.infos[-1]["progression"]) if turns else 0.0
    result = f"{turns} turns, return {total:.3g}, progression {progression:.2g}, {share:.0%} of answers valid"
    if play.player == "expert" and play.done and progression < 1:
        return warning("expert", f"the expert does not succeed: {result}")
    if play.player == "expert" and share < 1:
        return warning("expert", f"some of the expert's answers are invalid: {result}")
    if not play.done:
        result += "; stopped there, the episode goes on"
    return ok(play.player, result)


def _ending(
    plays: Sequence[Playthrough], abilities: Abilities, settings: RolloutSettings
) -> Finding:
    found = {"max_steps": abilities.max_steps, "max_turns": settings.max_turns}
    limits = [f"{name} {limit}" for name, limit in found.items() if limit]
    if limits:
        return ok("ending", f"limited by {' and '.join(limits)}")
    if all(play.done for play in plays):
        return ok("ending", "every episode ended")
    return warning(
        "ending", "an episode did not end and nothing limits it; set max_turns in the YAML"
    )


def _reward(plays: Sequence[Playthrough], abilities: Abilities) -> Finding:
    rewards = [reward for play in plays for reward in play.rewards]
    players = " and ".join(play.player for play in plays)
    if len(set(rewards)) == 1 and not abilities.actions and not abilities.has_expert:
        return ok("reward", f"always {rewards[0]:g} for random words")
    if len(set(rewards)) == 1 and len(rewards) > len(plays):
        detail = f"always {rewards[0]:g} in {players} play; training needs rewards that differ"
        if not all(play.done for play in plays):
            detail += "; no episode ended, so try a larger --max-turns first"
        return warning("reward", detail)
    return ok("reward", f"between {min(rewards):g} and {max(rewards):g} in {players} play")


def _scale(plays: Sequence[Playthrough]) -> Iterator[Finding]:
    """Whether a critic can learn the returns, whose square is the scale of its loss."""
    returns = [sum(play.rewards) for play in plays]
    low = min(returns)
    high = max(returns)
    if low < LOWEST_RETURN or high > HIGHEST_RETURN:
        healthy = f"keep returns between about {LOWEST_RETURN:g} and {HIGHEST_RETURN:g}"
        detail = f"an episode's rewards add up to {low:g}" + (
            f" or {high:g}" if high != low else ""
        )
        yield warning(
            "scale", f"{detail}; {healthy}, or the critic hardly learns: divide the rewards"
        )


def _discount(plays: Sequence[Playthrough], settings: RolloutSettings) -> Iterator[Finding]:
    """Whether the first turns can tell that they are paid: what is left of the expert's rewards at
    the first turn."""
    gamma = settings.gamma_step
    for play in plays:
        paid = [max(reward, 0.0) for reward in play.rewards]
        if play.player != "expert" or not play.done or not sum(paid):
            continue
        share = sum(gamma**turn * reward for turn, reward in enumerate(paid)) / sum(paid)
        if share < MIN_LEFT:
            better = 1 - 1 / len(paid)
            advice = f"if early actions matter for it, set gamma_step to {better:.4g} (1 - 1 / turns) or more"
            detail = f"with gamma_step {gamma:g}, the first turn sees {share:.1%} of what the expert earns later"
            yield warning("discount", f"{detail}; {advice}")


def _range(plays: Sequence[Playthrough], settings: RolloutSettings) -> Iterator[Finding]:
    """Whether the discounted returns of all turns are in the range of a critic with bins."""
    if settings.value_range is None:
        return
    returns: list[float] = []
    for play in plays:
        ahead = 0.0
        for reward in reversed(play.rewards):
            ahead = reward + settings.gamma_step * ahead
            returns.append(ahead)
    (low, high) = settings.value_range
    least = min(returns)
    most = max(returns)
    found = f"value_range is [{low:g}, {high:g}], and the discounted returns are between {least:.3g} and {most:.3g}"
    if least < low or most > high:
        advice = "the critic would take those outside for its ends: widen it"
        yield warning("range", f"{found}; {advice}")
    else:
        yield ok("range", found)


def _validity(plays: Sequence[Playthrough], abilities: Abilities) -> Finding:
    valid = [
        info["valid_action"] for play in plays if play.player == "random" for info in play.infos
    ]
    if not abilities.actions:
        if valid and not any(valid) and not abilities.has_expert:
            detail = f"none named, and none of {len(valid)} answers of plain words was valid"
            return warning(
                "actions", f"{detail}; if the game takes certain words, name them in actions"
            )
        return ok("actions", "none named, so any text may be an answer")
    first = plays[0].replies[0]
    default = first.default_action
    # An agent's answers are texts, and its default stands for one.
    if default not in abilities.actions and not first.whole_prompts:
        return warning("actions", f"default_action {default!r} is not one of actions")
    if not any(valid):
        detail = f"none of {len(valid)} answers drawn from actions was valid; step must accept the names in actions"
        return warning("actions", detail)
    return ok(
        "actions", f"{len(abilities.actions)} named; {sum(valid)} of {len(valid)} were accepted"
    )


def _growth(plays: Sequence[Playthrough], settings: RolloutSettings) -> Finding:
    chars = max((play.prompt_chars for play in plays), key=len)
    detail = f"{chars[0]:,} characters at first, at most {max(chars):,} in {len(chars)} prompts"
    if settings.history == "full":
        times = 1.0 if settings.samples == "chains" else sum(chars) / max(chars)
        trained = f"history: full shows the whole episode, and samples: {settings.samples} trains it {times:.3g} times"
        return ok("prompt", f"{detail} ({trained})")
    quarter = len(chars) // 4
    early = sum(chars[quarter : 2 * quarter])
    late = sum(chars[3 * quarter : 4 * quarter])
    if len(chars) >= GROWTH_TURNS and late > GROWTH * early:
        return warning("prompt", f"grows during the episode: {detail}; a late turn may not fit")
    return ok("prompt", detail)


def _budget(play: Playthrough, settings: RolloutSettings, encoder: Any) -> Iterator[Finding]:
    """Yield an error if the first prompt is above `memory.budget`; a warning if its tokens are only
    estimated."""
    if (
        settings.memory.kind != "notes"
        or settings.history == "full"
        or play.replies[0].whole_prompts
    ):
        return
    most = settings.memory.budget
    if encoder:
        tokens = len(encoder.prompt(play.first_prompt).token_ids)
        about = ""
        status = Status.ERROR
    else:
        shown = [*map(text_of, play.first_prompt), *map(json.dumps, play.replies[0].tools)]
        tokens = len("\n".join(shown)) // CHARS_PER_TOKEN
        about = "about "
        status = Status.WARNING
    if tokens > most:
        found = f"memory.budget: {most} is below the first prompt, {about}{tokens} tokens"
        yield Finding("memory", status, f"{found}: raise it")
    elif play.notes > 1 + 2 * len(play.answers) // settings.memory.every:
        often = f"notes come after {play.notes} of {len(play.answers)} turns"
        advice = f"because prompts reach memory.budget: {most}; raise it, or lower memory.keep"
        yield warning("memory", f"{often}, {advice}")


def _size(replies: Sequence[EnvReply], encoder: Any) -> Finding:
    observations = [_shown_text(reply) for reply in replies]
    longest = max(observations, key=len)
    tokens = len(encoder.text.encode(longest)) if encoder else len(longest) // CHARS_PER_TOKEN
    mean = sum(map(len, observations)) / len(observations)
    about = "" if encoder else "about "
    detail = (
        f"{mean:,.0f} characters on average, at most {len(longest):,} ({about}{tokens:,} tokens)"
    )
    images = max(map(_count_images, replies))
    if images:
        detail += f", and {images} picture{'s' * (images > 1)}"
    is_empty = not images and not observations[0].strip()
    if is_empty and not replies[0].whole_prompts:
        return warning("observation", "the first one is empty: neither text nor picture")
    if tokens > LONG_OBSERVATION:
        return warning("observation", f"long: {detail}; every turn pays for it")
    return ok("observation", detail)


def _count_images(reply: EnvReply) -> int:
    found = reply.observation.get("multi_modal_data") or {}
    return sum(map(len, found.values()))


def _shown_text(reply: EnvReply) -> str:
    """The observation's text, or that of the messages that show it if it is longer."""
    parts = reply.observation["text"]
    own = f"{parts['short_term_context']}\n{parts['long_term_context']}"
    sent = "\n".join(map(text_of, reply.messages))
    return max(own, sent, key=len)


def _speed(name: str, seconds: Sequence[float], slow_s: float) -> Finding:
    mean = sum(seconds) / len(seconds)
    detail = f"{_time(mean)} on average, at most {_time(max(seconds))}"
    if mean > slow_s:
        return warning(name, f"slow: {detail}; raise env_workers, or make it faster")
    return ok(name, detail)


def _time(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 0.1 else f"{seconds * 1000:.2f} ms"
