"""Checks whether batches go on, and whether there is space for their files."""

from collections.abc import Iterator

from kvroute.doctor.checks import Check, Facts
from kvroute.features.batches.stores.file_store import UNLIMITED
from kvroute.wording import size

STILL_S = 300.0  # seconds without a result after which a batch is reported
# The files are reported if they use more than about this share of the quota, or of the disk space
# that is free or that they already use.
FULL_SHARE = 0.9
MAX_NAMED = 3  # the most batches that are named


def batches(facts: Facts | None) -> Iterator[Check]:
    """Check the batches and their files.

    Args:
        facts: one router's view; None: the cluster stores no files.
    """
    if facts is None:
        return
    if (problem := facts["problem"]) and facts["is_default"]:
        yield Check("batches", "ok", f"no files and no batches: {problem}")
        return
    if problem:
        yield Check("batches", "wrong", problem, "correct this: no batch runs meanwhile")
        return
    yield from _running(facts["running"])
    yield _space(facts)


def _running(running: list[Facts]) -> Iterator[Check]:
    paused = [batch for batch in running if batch["pause"]]
    still = [batch for batch in running if batch["still_s"] > STILL_S and not batch["pause"]]
    if paused:
        reason = paused[0]["pause"]
        yield Check("batches", "wrong", f"{_named(paused)} paused: {reason}", "correct this")
    if still:
        longest_s = max(batch["still_s"] for batch in still)
        yield Check(
            "batches",
            "warning",
            f"{_named(still)} without a result for up to {longest_s:.0f} s",
            "see whether replicas are ready and whether other requests use all of their time; a "
            "batch only gets what these leave",
        )
    if not paused and not still:
        yield Check("batches", "ok", f"{len(running)} running")


def _space(facts: Facts) -> Check:
    used, quota, free = facts["used_bytes"], facts["quota_bytes"], facts["free_bytes"]
    text = f"files take {size(used)}"
    if quota < UNLIMITED:
        text += f" of {size(quota)}"
    if free < UNLIMITED:
        text += f"; {size(free)} are free on the disk"
    if used > FULL_SHARE * quota:
        return Check("files", "warning", text, "delete files, or raise --files-quota-mb")
    if free < (1 - FULL_SHARE) * used:
        return Check("files", "warning", text, "delete files, or free space on the disk")
    return Check("files", "ok", text)


def _named(found: list[Facts]) -> str:
    names = ", ".join(batch["id"] for batch in found[:MAX_NAMED])
    more = f" and {len(found) - MAX_NAMED} more" if len(found) > MAX_NAMED else ""
    return f"{names}{more}"
