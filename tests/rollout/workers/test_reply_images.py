"""A reply's images: converted once, beside the environment, to RGB images that the environment
cannot change."""

import asyncio
import base64
import io
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from PIL import Image

from envs.base import BaseInteractionEnv, make_observation
from rollout.errors import EnvironmentFault
from rollout.spec import EnvSpec
from rollout.workers.worker import EnvHost, make_reply
from tests.fixtures.vision import picture
from tests.rollout.workers.test_reply import INFO


class Shows(BaseInteractionEnv):
    """Shows what a test gives it."""

    def __init__(self, *images: Any) -> None:
        self.observation = make_observation("s", images=images)

    def reset(self) -> Any:
        return self.observation

    def step(self, response_text: str) -> Any:
        return self.observation, False, dict(INFO)


def host_of(env: BaseInteractionEnv) -> EnvHost:
    host = EnvHost()
    host._envs[0] = env, EnvSpec("tests.fixtures.counting_env", {})
    return host


def png(image: Image.Image) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, format="PNG")
    return buffer.getvalue()


def test_images_of_every_kind_become_rgb_images_that_observation_and_messages_share() -> None:
    image = picture(0)
    file = png(image)
    uri = "data:image/png;base64," + base64.b64encode(file).decode()
    gray, clear = np.asarray(image)[..., 0], np.asarray(image.convert("RGBA"))
    given = (image, np.asarray(image), file, uri, image.convert("RGBA"), clear, gray)
    reply = make_reply(Shows(*given), make_observation("s", images=given))
    own = reply.observation["multi_modal_data"]["image"]
    assert [part["image"] for part in reply.messages[0]["content"][:-1]] == own
    assert all(
        part["image"] is i for part, i in zip(reply.messages[0]["content"], own, strict=False)
    )
    assert all(isinstance(i, Image.Image) and i.mode == "RGB" and i is not image for i in own)
    assert all(np.array_equal(np.asarray(i), np.asarray(image)) for i in own[:-1])
    assert np.array_equal(np.asarray(own[-1]), np.stack([gray] * 3, -1))


def test_pil_images_and_arrays_have_the_same_digest() -> None:
    replies = [host_of(Shows(kind(picture(0)))).reset(0) for kind in (lambda i: i, np.asarray, png)]
    assert len({reply.digest for reply in replies}) == 1


def test_what_an_environment_changes_later_does_not_change_its_reply() -> None:
    env = Shows(picture(0))
    host = host_of(env)
    reply = host.reset(0)
    before = reply.digest, np.asarray(picture(0))
    env.observation["text"]["long_term_context"] = env.observation["obs_str"] = "changed"
    env.observation["multi_modal_data"]["image"][0].paste((1, 2, 3), (0, 0, 64, 64))
    env.observation["multi_modal_data"]["image"].append(picture(1))
    assert reply.observation["obs_str"] == reply.observation["text"]["long_term_context"] == "s"
    (image,) = reply.observation["multi_modal_data"]["image"]
    assert np.array_equal(np.asarray(image), before[1])
    assert host.step(0, "left").digest != before[0]


@pytest.mark.parametrize(
    ("image", "words"),
    [
        (picture(0).crop((10, 10, 10, 30)), "a picture of 0 x 20 has no pixels"),
        (np.zeros((4, 4, 3), np.float32), "got float32 of"),
        (SimpleNamespace(tobytes=bytes), "SimpleNamespace cannot be read"),
        ("/etc/passwd", "text must be a data URI"),
    ],
)
def test_any_other_image_is_a_fault_that_names_its_place(image: Any, words: str) -> None:
    with pytest.raises(
        EnvironmentFault,
        match=rf"multi_modal_data\['image'\]\[1\]: .*{words}.*test_reply_images.py",
    ):
        host_of(Shows(picture(0), image)).reset(0)
    env = Shows()
    env.format_observation = lambda observation: {
        "role": "user",
        "content": [{"type": "image", "image": image}],
    }
    with pytest.raises(EnvironmentFault, match=f"an image of a message: .*{words}"):
        host_of(env).step(0, "left")


def test_the_default_messages_show_short_term_images_too_at_their_marks_or_first() -> None:
    own, now = picture(0), picture(1)
    env = Shows(own)
    env.observation["multi_modal_data"]["current_image"] = [now]
    reply = make_reply(env, env.observation)
    images = reply.observation["multi_modal_data"]
    shown = [part.get("image", part.get("text")) for part in reply.messages[0]["content"]]
    assert shown == [images["current_image"][0], images["image"][0], "s"]
    env.observation |= make_observation("long", "map: \ufffc here")
    reply = make_reply(env, env.observation)
    shown = [part.get("image", part.get("text")) for part in reply.messages[0]["content"]]
    assert shown == [own, "map: ", now, " here\nlong"]


def test_an_async_close_runs_to_its_end() -> None:
    class Closes(Shows):
        closed = False

        async def close(self) -> None:
            await asyncio.sleep(0)
            self.closed = True

    env = Closes()
    assert host_of(env).handle("close", 0) == (True, None) and env.closed
