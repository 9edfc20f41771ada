"""Calls from routers that a replica rejects."""

from types import SimpleNamespace
from typing import Any

import pytest

from kvroute.replica import deployment


@pytest.mark.parametrize("length", [0, 7, 9, 1_000_000])
async def test_a_sessions_number_has_eight_bytes(length: int) -> None:
    ended_sessions: list[int] = []

    async def end(session: int) -> None:
        ended_sessions.append(session)

    replica: Any = SimpleNamespace(
        _ranks=[SimpleNamespace(engine=SimpleNamespace(end_session=end))]
    )
    replicas: Any = deployment.Replica
    end_session = replicas.func_or_class._end_session
    await end_session(replica, (2**63 - 1).to_bytes(8, "little"), 0)
    with pytest.raises(ValueError, match=f"8 bytes, not {length}"):
        await end_session(replica, bytes(length), 0)
    assert ended_sessions == [2**63 - 1]
