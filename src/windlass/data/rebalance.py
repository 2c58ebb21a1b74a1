"""Token-budget batches: an update's samples dealt so that every micro-batch costs about the same.

Cost of a padded micro-batch of b samples, the longest of n tokens: b * (n + 0.001 * n^2); the second term is
attention's.
"""

from __future__ import annotations

from windlass.data.cut import share

_QUADRATIC = 0.001


def balanced_batches(ids: list[int], lengths: list[int], rows: int, ranks: int) -> list[list[list[int]]]:
    """Deal `ids` into `rows` micro-batches for each of `ranks` ranks, minimising the largest cost.

    Samples are sorted by falling length and cut into contiguous groups; the cheapest cut under a cost limit
    is greedy, and the smallest feasible limit is found by bisection. Groups are dealt by falling cost: the
    `ranks` most expensive ones make row 0, so that the ranks of one row cost alike.

    Returns:
        `rows` lists of `ranks` lists of ids; empty lists only if there are fewer samples than `rows * ranks`.
    """
    by_length = sorted(zip(lengths, ids, strict=True), key=lambda pair: -pair[0])
    costs = [n + _QUADRATIC * n * n for n, _ in by_length]
    sizes = _sizes(costs, rows * ranks)
    groups, start = [], 0
    for size in sizes:
        price = size * costs[start] if size else 0.0
        groups.append((price, [i for _, i in by_length[start : start + size]]))
        start += size
    groups.sort(key=lambda group: -group[0])
    return [[members for _, members in groups[row * ranks : (row + 1) * ranks]] for row in range(rows)]


def _sizes(costs: list[float], count: int) -> list[int]:
    """Sizes of `count` contiguous groups over samples of falling `costs`, with the smallest possible largest cost."""
    if len(costs) <= count:
        return [1] * len(costs) + [0] * (count - len(costs))
    even = [share(len(costs), count, group) for group in range(count)]
    low, high = costs[0], max((end - start) * costs[start] for start, end in even)
    for _ in range(40):
        limit = (low + high) / 2
        if _greedy(costs, limit, count) is None:
            low = limit
        else:
            high = limit
    sizes = _greedy(costs, high, count) or [end - start for start, end in even]
    while len(sizes) < count:  # a limit may need fewer groups; every rank must have work
        widest = max(range(len(sizes)), key=sizes.__getitem__)
        half = sizes[widest] // 2
        sizes[widest : widest + 1] = [sizes[widest] - half, half]
    return sizes


def _greedy(costs: list[float], limit: float, count: int) -> list[int] | None:
    """Fill each group up to `limit`; None if more than `count` groups are needed."""
    sizes: list[int] = []
    start = 0
    while start < len(costs):
        if len(sizes) == count:
            return None
        size = len(costs) - start if costs[start] == 0 else min(int(limit / costs[start]), len(costs) - start)
        if size == 0:
            return None
        sizes.append(size)
        start += size
    return sizes
