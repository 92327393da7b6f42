"""Log signatures: RE2 patterns over single lines, in linear time and bounded memory whatever the pattern."""

from __future__ import annotations

import re2

_MAX_MEMORY_BYTES = 1024 * 1024
"""RE2's own default is 8 MiB per pattern, an eighth of what the sidecar may use. A pattern whose automaton does not
fit runs slower, not wrong; that is why there is no `re2.Set` here, which gives up instead."""


class PatternError(Exception):
    """RE2 does not take a pattern; the message is its own short reason and does not repeat the pattern."""


class Signatures:
    """A few patterns, searched for line by line.

    Raises:
        PatternError: RE2 does not take one of them.
    """

    def __init__(self, patterns: tuple[str, ...]) -> None:
        self.patterns = patterns
        options = re2.Options()
        options.max_mem = _MAX_MEMORY_BYTES
        options.log_errors = False
        try:
            self._compiled = tuple(re2.compile(pattern, options) for pattern in patterns)
        except (re2.error, ValueError) as error:
            raise PatternError(_reason(error)) from None

    def found_in(self, line: bytes) -> tuple[int, ...]:
        """Indices of the patterns that the line holds."""
        return tuple(index for index, pattern in enumerate(self._compiled) if pattern.search(line) is not None)


def _reason(error: Exception) -> str:
    first = error.args[0] if error.args else ""
    text = first.decode("utf-8", "replace") if isinstance(first, bytes) else str(first)
    # RE2 says "missing ): (x": the part before the colon is the reason, the rest is the pattern.
    return text.partition(":")[0] or "not understood"
