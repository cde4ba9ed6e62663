import json
import sys
from pathlib import Path

RIGHT = {"auth": 12, "billing": 7, "mail": 10, "search": 7}
try:
    found = json.loads(Path("/app/errors.json").read_text())
except (OSError, ValueError) as error:
    sys.exit(f"/app/errors.json: {error}")
if found != RIGHT:
    sys.exit(f"wrong counts: {found}")
