"""The few shapes that all our queries have. `$...` is a variable of the dashboard, or Grafana's."""

MODEL, NODE, REPLICA = 'model=~"$model"', 'node=~"$node"', 'replica=~"$replica"'


def router(metric: str, *conditions: str) -> str:
    """What routers tell, each of them about the whole fleet."""
    return _select(metric, MODEL, *conditions)


def replica(metric: str) -> str:
    """What the chosen replicas tell."""
    return _select(metric, MODEL, NODE, REPLICA)


def per_second(counter: str, by: str = "") -> str:
    """How much it grows in a second; all together, or of each."""
    return f"{_sum(by)} (rate({counter}[$__rate_interval]))"


def in_range(counter: str) -> str:
    """How much it grew in the whole time range of the dashboard."""
    return f"increase({counter}[$__range])"


def total(gauge: str, by: str = "") -> str:
    return f"{_sum(by)} ({gauge})"


def quantile(q: float, buckets: str) -> str:
    """Of a histogram's `..._bucket`, over all processes."""
    return f"histogram_quantile({q}, {per_second(buckets, 'le')})"


def share(part: str, whole: str) -> str:
    """From 0 to 1; nothing while there is nothing to have a share of."""
    return f"{part} / ({whole} > 0)"


def on(category: str, expr: str) -> str:
    """The same, placed at that category of a waterfall."""
    return f'label_replace({expr}, "category", "{category}", "", "")'


def filled_in(expr: str, *, rate_interval: str, time_range: str) -> str:
    """As Grafana asks when nothing is chosen: everything is shown."""
    expr = expr.replace("$__rate_interval", rate_interval).replace("$__range", time_range)
    for name in ("$model", "$node", "$replica"):
        expr = expr.replace(name, ".*")
    return expr


def _sum(by: str) -> str:
    return f"sum by ({by})" if by else "sum"


def _select(metric: str, *conditions: str) -> str:
    return f"{metric}{{{', '.join(conditions)}}}"
