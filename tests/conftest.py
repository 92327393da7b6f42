from __future__ import annotations

import asyncio

# pytest-asyncio 1.5 asks for the current loop before an async test and puts it back afterwards. Where a sync test came
# first there is none, one is made for the answer, and nobody closes it: a ResourceWarning, hence a failure, somewhere
# later. Having said "none" once keeps asyncio from making one.
asyncio.set_event_loop(None)
