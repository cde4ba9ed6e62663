"""The harness runs slime's own data set on pictures, and has what its delta pushes need."""

import base64
import io
import json
from pathlib import Path

import pytest

from tests.fixtures.vision import picture, processor, save_tiny_vlm
from tests.slime.cpu.harness import Slime, start_script

pytestmark = pytest.mark.slow

PROGRAM = Path(__file__).parent / "cpu" / "read_pictures.py"


def test_slimes_own_data_set_reads_pictures_as_our_encoder_does(slime: Slime, ground: Path) -> None:
    if not (slime.path / "slime" / "utils" / "accelerator").exists():
        pytest.skip("this slime asks torch.cuda itself, which the harness always answered")
    folder = save_tiny_vlm(ground / "pictures" / "model")
    shots = [picture(k, 64, 96) for k in range(2)]
    rows = ground / "pictures" / "rows.jsonl"
    rows.write_text("".join(json.dumps({"prompt": "<image> a key?", "images": [as_text(s)]}) + "\n" for s in shots))
    process = start_script(slime, rows.parent, str(PROGRAM), [str(folder), str(rows)])
    code = process.wait(300)
    log = (rows.parent / "train.log").read_text()
    assert code == 0, log[-4000:]
    read = json.loads(log.splitlines()[-1])
    wanted = [processor().image_processor(images=[shot], return_tensors="pt")["pixel_values"] for shot in shots]
    assert read["shapes"] == [list(pixels.shape) for pixels in wanted]
    assert read["sums"] == pytest.approx([float(pixels.double().sum()) for pixels in wanted], abs=0.01)
    assert all("a key?" in prompt for prompt in read["prompts"])


def as_text(shot: object) -> str:
    """The picture as a data URI, which slime accepts in place of a path."""
    buffer = io.BytesIO()
    shot.save(buffer, "PNG")  # type: ignore[attr-defined]
    return "data:image/png;base64," + base64.b64encode(buffer.getvalue()).decode()
