"""CPU cost of encoding one turn, at turns 4, 40 and 400, with three methods back to back.

- re-encode: the whole conversation goes through template and tokenizer (or processor) in every
  turn;
- two templates: the conversation is rendered with and without the new messages, and the difference
  is encoded (a processor has to see both conversations whole);
- ours: `DeltaEncoder.append` (full history) and `DeltaEncoder.prompt` (window of one past turn);
  "request" is the JSON of the request that follows `append`.

Times are CPU time of one thread. Compare ratios: milliseconds depend on the machine.

    python -m benchmarks.encoding [--tokenizer FOLDER] [--turns 4 40 400]
"""

import argparse
import random
import statistics
import time
import timeit
from collections.abc import Callable
from typing import Any

from inspection.text import align
from rollout.play.engine import request_body
from rollout.tokens.encoding import DeltaEncoder
from tests.fixtures.chatml import chatml_tokenizer
from tests.fixtures.vision import picture, processor

WORDS = "you see a wall door key ball box red green blue grey step steps left right forward and the of at now"
WORDS = WORDS.split()
RESPONSE = (
    "THINK: the key is two steps ahead, so walk on and then turn to the door.\nACTION: go forward"
)
SYSTEM = {"role": "system", "content": "You are playing a game. " + " ".join(WORDS * 12)}
NEXT = 25


class Conversation:
    """A game of many turns, with observations of about 120 words and one fixed response."""

    def __init__(self, encoder: DeltaEncoder, turns: int, images: bool) -> None:
        rng = random.Random(0)
        self.encoder = encoder
        self.images = images
        self.response = [*encoder.text.encode(RESPONSE), encoder.end_of_turn_ids[0]]
        self.users = []
        for turn in range(turns + NEXT):
            words = " ".join(rng.choices(WORDS, k=120))
            text = f"Turn {turn}: {words}"
            parts = [{"type": "image", "image": picture(turn)}, {"type": "text", "text": text}]
            self.users.append({"role": "user", "content": parts if images else text})

    def messages(self, turn: int) -> list[dict[str, Any]]:
        """Build the conversation up to the observation of this turn."""
        messages = [SYSTEM]
        for user in self.users[:turn]:
            messages += [user, {"role": "assistant", "content": RESPONSE}]
        return [*messages, self.users[turn]]


def cpu_ms(
    work: Callable[[], Any], repeats: int, prepare: Callable[[], Any] = lambda: None
) -> float:
    """Median CPU milliseconds of `work`, without the time of `prepare`, which is called before
    each."""
    return 1e3 * statistics.median(
        timeit.repeat(work, prepare, time.process_time, repeats, number=1)
    )


def forget(encoder: DeltaEncoder, user: dict[str, Any]) -> None:
    """Drop the turn's text and image from the caches."""
    encoder.text._cached.cache_clear()
    if encoder.images is not None:
        image = user["content"][0]["image"]
        encoder.images._kept.pop(id(image), None)


def appended_ms(conversation: Conversation, turn: int) -> tuple[float, float]:
    """Median CPU milliseconds to append a turn, and to write its request, over this turn and the
    next 24."""
    encoder = conversation.encoder
    times = []
    prompt = encoder.prompt(conversation.messages(0))
    for user in conversation.users[1:turn]:
        prompt = encoder.append(prompt, conversation.response, [user])
    request_body(prompt, {})
    for user in conversation.users[turn : turn + NEXT]:
        forget(encoder, user)
        began = time.process_time()
        prompt = encoder.append(prompt, conversation.response, [user])
        appended = time.process_time()
        request_body(prompt, {})
        times.append((1e3 * (appended - began), 1e3 * (time.process_time() - appended)))
    append, request = zip(*times, strict=True)
    return statistics.median(append), statistics.median(request)


def rows(conversation: Conversation, turn: int) -> dict[str, float]:
    images = conversation.images
    encoder = conversation.encoder
    tokenizer = conversation.encoder.tokenizer
    whole = conversation.messages(turn)
    window = [whole[0], *whole[-3:]]

    def rendered(messages: list[dict[str, Any]]) -> str:
        return tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)

    def encoded(text: str, messages: list[dict[str, Any]]) -> Any:
        if not images:
            return tokenizer(text, add_special_tokens=False)
        shown = [
            message["content"][0]["image"] for message in messages if message["role"] == "user"
        ]
        return processor()(text=[text], images=shown, return_tensors="pt")

    def two_templates() -> None:
        earlier = whole[:-1]
        old = rendered(earlier)
        now = rendered(whole)
        if images:
            encoded(old, earlier)
            encoded(now, whole)
        else:
            encoded(now[len(old) :], [])

    def past_known() -> None:
        forget(encoder, whole[-1])
        encoder.prompt(window[:-2])  # the past turn was encoded when it was the current one

    repeats = 5 if turn > 100 else 15
    append, request = appended_ms(conversation, turn)
    return {
        "re-encode": cpu_ms(lambda: encoded(rendered(whole), whole), repeats),
        "two templates": cpu_ms(two_templates, repeats),
        "ours, full": append,
        "ours, request": request,
        "ours, window": cpu_ms(lambda: encoder.prompt(window), 41, past_known),
    }


def table(title: str, conversation: Conversation, turns: list[int]) -> None:
    found = [rows(conversation, turn) for turn in turns]
    lines = [["", *(f"turn {turn}" for turn in turns), "last / first"]]
    for way in found[0]:
        times = [row[way] for row in found]
        lines.append([way, *(f"{ms:.3f}" for ms in times), f"{times[-1] / times[0]:.2f}"])
    for way in ("re-encode", "two templates"):
        lines.append(
            [f"{way} / ours", *(f"{row[way] / row['ours, full']:.1f}x" for row in found), ""]
        )
    print(f"\n{title}: CPU ms per turn")
    print("\n".join(align(lines, 1)))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--tokenizer", help="folder of a tokenizer with a chat template; default: a tiny ChatML one"
    )
    parser.add_argument("--turns", type=int, nargs="+", default=[4, 40, 400])
    options = parser.parse_args()
    tokenizer = chatml_tokenizer()
    if options.tokenizer:
        from transformers import AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(options.tokenizer)
    longest = max(options.turns)
    table("text", Conversation(DeltaEncoder(tokenizer), longest, images=False), options.turns)
    encoder = DeltaEncoder(chatml_tokenizer(), processor())
    table("text and an image", Conversation(encoder, longest, images=True), options.turns)


if __name__ == "__main__":
    main()
