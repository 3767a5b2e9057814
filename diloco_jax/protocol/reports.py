"""The rule by which a newer report of a learner takes the place of one that nobody has read yet."""

from diloco_jax.protocol.messages import StepReport


def merged_report(older: StepReport, newer: StepReport, later_s: float) -> StepReport | None:
    """Return one report that tells all that two of them do; None if both must be read.

    Counters only grow, so the newer report has all of them. Global fragments that arrived are named in one report only,
    the newest of each fragment.

    Args:
        later_s: how long after the older report the newer one came.
    """
    if older.incarnation != newer.incarnation or older.local_step > newer.local_step:
        return None
    if not older.arrived:
        return newer
    arrived = {each.fragment_id: each._replace(ago_s=each.ago_s + later_s) for each in older.arrived}
    for each in newer.arrived:
        arrived.pop(each.fragment_id, None)
        arrived[each.fragment_id] = each
    return newer._replace(arrived=tuple(arrived.values()))
