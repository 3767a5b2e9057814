"""Merges two unread reports of a learner into one: the newer replaces the older."""

from diloco_jax.protocol.messages import StepReport


def merged_report(older: StepReport, newer: StepReport, later_s: float) -> StepReport | None:
    """Return one report with the content of two; None if both must be read.

    Counters only grow, so the newer report includes the older one's. Each arrival of a global fragment is in one report
    only, so arrivals of the older report are added: the newest of each fragment.

    Args:
        later_s: seconds from the arrival of the older report to that of the newer one.
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
