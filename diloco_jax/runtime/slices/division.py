"""The division of an inner step over the slices of an island: its parts, who computes them, and who adds what.

Nothing here changes the result of a step: parts are added in their order, on every slice.
"""

from collections.abc import Collection, Mapping, Sequence


def owners_of(count: int, members: Sequence[int], had: Mapping[int, Collection[int]] = {}) -> tuple[int, ...]:
    """Return the member that computes each of `count` parts; members differ by at most one part where `had` allows it.

    Args:
        members: slices, in ascending order.
        had: parts that a member has computed in an earlier attempt, by slice; it keeps them.
    """
    owners: dict[int, int] = {}
    for member in members:
        for part in had.get(member, ()):
            owners.setdefault(part, member)
    loads = {member: sum(owner == member for owner in owners.values()) for member in members}
    for part in range(count):
        if part not in owners:
            owners[part] = least = min(members, key=lambda member: (loads[member], member))
            loads[least] += 1
    return tuple(owners[part] for part in range(count))


def bounds(size: int, count: int) -> list[tuple[int, int]]:
    """Return the start and stop of each of `count` chunks of a gradient of `size` numbers."""
    return [(size * number // count, size * (number + 1) // count) for number in range(count)]
