"""Simulated inference engines: an HTTP front end and one rank process per core, joined by a pipe.

The point of the split is honesty under faults. Everything that counts steps, tokens and requests happens in the rank
and reaches the front end only by messages, as in the real engines. SIGSTOP on a rank therefore leaves an engine whose
HTTP answers, whose gauges are stale and whose requests hang, without a line of code that fakes a hang.

Processes of one simulated engine (`python -m enginewatch.lab.sim vllm`):
    - `enginewatch-sim`: the supervisor. It keeps the port number over restarts and starts the front end again.
    - the front end: listens itself, so that "connection refused" is real while it is down or loading.
    - `VLLM::EngineCore`, `sglang::scheduler`, `mpi4py.futures.server`: the ranks, children of the front end.

Modules:
    - rank side, few imports: wire, lineage, job, vllm_core, sglang_core, trtllm_core, trtllm_rank, rank
    - front end: ranks, kv_transfer, arrivals, page, vllm_families, vllm_page, sglang_families, sglang_page,
      trtllm_families, trtllm_page, trtllm_stats, http_page, engine, enginelog, vllm_http, sglang_http, trtllm_http,
      metrics_http, middleware, faults, spoil, load, control, frontend
    - around them: options, supervisor, and process, with which tests and drills start one
"""
