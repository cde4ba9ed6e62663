import json
import os
from pathlib import Path

RIGHT = {
    "001.txt": ("invoice", "Type: invoice\n\n120 chairs, due in April.\n"),
    "002.txt": ("letter", "Type: letter\n\nDear all, we move in May.\n"),
    "003.txt": ("invoice", "TYPE: INVOICE\n\nRepair of the lift.\n"),
    "004.txt": ("other", "Type: photo\n\n(see the attachment)\n"),
    "005.txt": ("other", "No type here.\nType: invoice\n"),
    "a note.txt": ("letter", "type: letter\n\nThank you for the invoice.\n"),
    "empty.txt": ("other", ""),
    "list.txt": ("other", "Type: invoices of the year\n\nA list.\n"),
}


def is_right(name, kind, text):
    file = Path("/data/sorted", kind, name)
    return file.is_file() and not file.is_symlink() and file.read_text() == text


inbox = Path("/data/inbox")
folders = os.environ["EXPECTED"].split()
right = sum(is_right(name, kind, text) for name, (kind, text) in RIGHT.items())
extra = [
    path
    for kind in folders
    for path in Path("/data/sorted", kind).glob("*")
    if path.name not in RIGHT
]
left = list(inbox.iterdir()) if inbox.is_dir() else []
print(
    json.dumps(
        {
            "reward": float(right == len(RIGHT) and not extra and not left),
            "share": right / len(RIGHT),
        }
    )
)
