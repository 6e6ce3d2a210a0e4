"""The soak, shortened: seconds of clients that leave, hang, flood and ask for nonsense. The long one: benchmarks.serve_soak."""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import replace

from serving import builtin, serving

from benchmarks.serve_soak import soak
from outrider.engine.request import Request, Sequence


def test_nothing_is_lost_leaked_or_answered_twice() -> None:
    ends: Counter[int] = Counter()
    jobs: list[Sequence] = []
    with serving(builtin(3), max_queue=4, kv_tokens=1700, prefix_bytes=2 << 20) as live:
        engine = live.service.engine
        submit = engine.submit

        def counted(new: list[Request]) -> list[Sequence]:
            def told(request: Request) -> Request:
                tell, number = request.sink, request.id
                return replace(request, sink=lambda delta: (ends.update([number] * delta.ended), tell(delta))[1])  # type: ignore[misc]

            made = submit([told(request) for request in new])
            jobs.extend(made)
            return made

        engine.submit = counted  # type: ignore[method-assign]
        told, wrong = asyncio.run(soak(live.port, 1.0, 10, 1))
        assert wrong == []
        assert engine.scheduler.problems() == []
        assert engine.problem is None
        assert len(engine.decoder.free) == 3
    assert len(jobs) == told["texts accepted"] == told["texts answered"] > 0
    assert all(ends[job.id] == 1 for job in jobs)
