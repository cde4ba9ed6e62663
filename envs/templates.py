"""Renders Jinja templates in Jinja's sandbox; observations are values, never templates."""

from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

from envs.errors import ConfigError


def parse_template(text: str) -> Any:
    """Parse a Jinja template for Jinja's sandbox, in which an unknown variable is an error."""
    import jinja2
    from jinja2.sandbox import SandboxedEnvironment

    jinja = SandboxedEnvironment(
        undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    return jinja.from_string(text)


def render_template(path: str | Path, variables: Mapping[str, Any]) -> str:
    """Render a Jinja file in Jinja's sandbox, with observations as values; raises ConfigError if it
    cannot."""
    import jinja2

    path = Path(path)
    try:
        return _read_template(path, path.stat().st_mtime_ns).render(variables).strip()
    except OSError as error:
        raise ConfigError(f"prompt template {path} cannot be read: {error.strerror}") from error
    except jinja2.TemplateError as error:
        raise ConfigError(f"prompt template {path}: {error}") from error


@lru_cache
def _read_template(path: Path, edited_ns: int) -> Any:
    return parse_template(path.read_text(encoding="utf-8"))
