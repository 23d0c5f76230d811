"""What a law is: something that holds, or its name and the story of how it was broken."""

from shared.errors import InvariantBroken


def demand(holds: bool, law: str, story: str) -> None:
    """Raises: InvariantBroken unless it holds."""
    if not holds:
        raise InvariantBroken(f"{law}: {story}")
