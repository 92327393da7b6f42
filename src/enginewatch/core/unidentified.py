"""Why nobody knows yet which process the engine is: the sentence that GET /engine gives instead of an id."""

from __future__ import annotations

from enginewatch.core.blind import Blindness
from enginewatch.core.reach import Reach


def why_unidentified(reach: Reach, blind: Blindness, *, waits_for: str | None) -> str:
    """One sentence.

    Args:
        reach: whether the engine answers.
        blind: what is the matter with a page without legs.
        waits_for: what a good page does not show yet and the identity is made of; None where that is not known.
    """
    if reach.unasked_since is not None:
        return f"the watcher cannot ask the engine: {reach.unasked_why}"
    if reach.phase == "startup" and not reach.failing_how:
        return "the engine has not been asked yet"
    if reach.phase != "running" and reach.failing_how == "refused":
        return "nobody listens at the engine's address yet; it is loading"
    if reach.phase != "running":
        return f"no page from the engine yet ({reach.failing_how}); it is loading"
    if reach.failing_since is not None:
        return f"/metrics fails ({reach.failing_how}), and only a page names the process"
    if waits_for is not None:
        return f"the page is there, and does not show {waits_for} yet"
    if blind.since is not None:
        return f"{blind.why}, and only a page names the process"
    return "no page has been read yet"
