"""Opened images: a photo is turned as its camera was held."""

import io

from PIL import Image

from envs.images import ORIENTATION, open_image


def test_a_photo_is_turned_as_its_camera_says() -> None:
    photo = Image.new("RGB", (30, 20), "red")
    photo.putpixel((0, 0), (0, 0, 255))
    exif = Image.Exif()
    exif[ORIENTATION] = 6  # the camera was turned to the left
    buffer = io.BytesIO()
    photo.save(buffer, "PNG", exif=exif)
    turned = open_image(buffer.getvalue())
    assert turned.size == (20, 30) and turned.getpixel((19, 0)) == (0, 0, 255)
    assert open_image(photo) is photo
