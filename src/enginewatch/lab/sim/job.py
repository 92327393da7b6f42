"""One request inside a rank."""

from __future__ import annotations

from enginewatch.lab.sim.wire import Message


class Job:
    """A request as the scheduler sees it: so many tokens in, so many out.

    Attributes:
        id: the front end's name for it.
        prompt: prompt tokens.
        max_tokens: tokens to produce.
        chunks: a prompt that is to be prefilled in exactly so many steps; 0 = as the token budget allows.
        chunk_sec: least duration of each of those steps.
        peer: how it depends on a prefill/decode partner: "" not at all, "fake" (the engine's own fake host),
            "peer" (a partner that is there unless a fault says otherwise), "missing" (nobody will ever come),
            "remote" (the front end fetches its KV and tells when it is there; from then on "peer").
        probe: an SGLang health request, which is left out of request counters.
        computed: prompt and output tokens whose KV is computed.
        generated: tokens produced so far.
        ready_at: when its KV transfer or handshake ends; None = not begun.
    """

    __slots__ = (
        "admitted_at",
        "arrived_at",
        "chunk_sec",
        "chunks",
        "computed",
        "first_at",
        "generated",
        "id",
        "max_tokens",
        "peer",
        "probe",
        "prompt",
        "ready_at",
        "scheduled",
    )

    def __init__(self, message: Message, now: float) -> None:
        self.id: str = message["id"]
        self.prompt: int = message["prompt"]
        self.max_tokens: int = message["max"]
        self.chunks: int = message.get("chunks", 0)
        self.chunk_sec: float = message.get("chunk_sec", 0.0)
        self.peer: str = message.get("peer", "")
        self.probe: bool = message.get("probe", False)
        self.computed = 0
        self.generated = 0
        self.scheduled = 0
        self.arrived_at = now
        self.admitted_at: float | None = None
        self.first_at: float | None = None
        self.ready_at: float | None = None

    def missing(self) -> int:
        """Prompt tokens that are not prefilled yet."""
        return max(0, self.prompt - self.computed)

    def next_chunk(self, budget: int) -> int:
        """Prompt tokens of the next prefill step within `budget`."""
        if self.chunks:
            return min(self.missing(), -(-self.prompt // self.chunks))
        return min(self.missing(), budget)

    def times(self, now: float) -> Message:
        """Seconds spent queueing, in prefill and in decode, for the histograms of a finished request."""
        admitted = now if self.admitted_at is None else self.admitted_at
        first = now if self.first_at is None else self.first_at
        return {"queue": admitted - self.arrived_at, "prefill": first - admitted, "decode": now - first}
