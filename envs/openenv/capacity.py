"""Asks OpenEnv servers how many sessions they give at once."""

from envs.openenv.session import Session
from envs.openenv.settings import OpenEnvSettings


def count_sessions(settings: OpenEnvSettings, most: int) -> int:
    """Open sessions on all servers until they are full, at most `most`; return how many they gave at once.

    Raises:
        EnvironmentFault: a server cannot be reached or does not answer.
    """
    held = list[Session]()
    try:
        for url in settings.urls:
            while len(held) < most:
                session = Session(url, settings)
                held.append(session)
                if not session.is_admitted():
                    held.pop().close()
                    break
        return len(held)
    finally:
        for session in held:
            session.close()
