"""A small agent: a plain `openai` client that guesses a number. It knows nothing of training.

It does not keep the conversation. Each request holds only what the guesses so far have shown.
"""

import json
import os
import random
import re
from pathlib import Path

from openai import OpenAI

SYSTEM = (
    "Guess the number. First think, then name one number. "
    "Write THINK: and your thought, then ACTION: and the number."
)
GUESSES = 3


def main() -> None:
    client = OpenAI()  # reads OPENAI_BASE_URL and OPENAI_API_KEY
    secret = random.Random(int(os.environ["AGENT_SEED"])).randint(1, 8)
    low = 1
    high = 8
    found = False
    for left in range(GUESSES, 0, -1):
        question = f"The number is at least {low} and at most {high}. Guesses left: {left}."
        answer = client.chat.completions.create(
            model=os.environ["AGENT_MODEL"],
            messages=[{"role": "system", "content": SYSTEM}, {"role": "user", "content": question}],
        )
        numbers = re.findall(
            r"\d+", (answer.choices[0].message.content or "").rpartition("ACTION:")[2]
        )
        guess = int(numbers[0]) if numbers else 0
        found = guess == secret
        if found:
            break
        if low <= guess < secret:
            low = guess + 1
        elif secret < guess <= high:
            high = guess - 1
    Path("result.json").write_text(json.dumps({"found": found, "secret": secret}))


if __name__ == "__main__":
    main()
