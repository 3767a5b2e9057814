"""The price of a run's machines, island by island."""

from typing import Any

from diloco_jax.tools.plan.case import Case, TimedKind

HOURS = 24


def prices(case: Case) -> dict[str, Any]:
    """Return what chips cost per day, for islands with equal machines and prices, and in total; {} without a price.

    The price of an island is that of the config, or else the option --price-per-chip-hour. If --chips replaces the
    chips of the islands, the total grows in proportion.
    """
    rows: dict[tuple[Any, ...], dict[str, Any]] = {}
    for kind in case.kinds:
        each = kind.outline.chips // len(kind.outline.kind.names)
        for name in kind.outline.kind.names:
            place, zone = case.config.place(name), case.config.island(name).zone
            price = place.price_per_chip_hour
            price = case.assumed.price_per_chip_hour or None if price is None else price
            alike = (id(kind), place, zone, price)
            row: dict[str, Any] = {
                "islands": [],
                "provider": place.provider,
                "where": zone or place.region,
                "capacity": place.capacity,
            }
            row |= {"machine": machine_of(kind), "chips": each, "price_per_chip_hour": price}
            rows.setdefault(alike, row)["islands"].append(name)
    if all(row["price_per_chip_hour"] is None for row in rows.values()):
        return {}
    total = 0.0
    for row in rows.values():
        row["per_day"] = HOURS * row["chips"] * len(row["islands"]) * (row["price_per_chip_hour"] or 0.0)
        total += row["per_day"]
    chips = sum(row["chips"] * len(row["islands"]) for row in rows.values())
    return {"chips_per_day": total * case.chips / chips, "islands": list(rows.values())}


def machine_of(kind: TimedKind) -> str:
    """Return an island's chips in words."""
    topology, gpu = kind.outline.kind.topology, kind.outline.kind.island.accelerator
    return str(topology) if topology else f"{kind.outline.kind.chips} {gpu or 'devices'}"
