"""Patterns of Prometheus queries. `$...` is a variable of the dashboard or of Grafana itself."""

MODEL, NODE, REPLICA = 'model=~"$model"', 'node=~"$node"', 'replica=~"$replica"'


def router(metric: str, *conditions: str) -> str:
    """Return a metric of all routers; it cannot be limited to nodes or replicas, only to models."""
    return _select(metric, MODEL, *conditions)


def replica(metric: str, *conditions: str) -> str:
    """Return a metric of the selected replicas."""
    return _select(metric, MODEL, NODE, REPLICA, *conditions)


def per_second(counter: str, by: str = "") -> str:
    """Return a counter's growth per second: one sum, or one for each value of the label `by`."""
    return f"{_sum(by)} (rate({counter}[$__rate_interval]))"


def in_range(counter: str) -> str:
    """Return a counter's growth in the dashboard's whole time range."""
    return f"increase({counter}[$__range])"


def total(gauge: str, by: str = "") -> str:
    """Return the sum of a gauge, or one sum for each value of the label `by`."""
    return f"{_sum(by)} ({gauge})"


def quantile(q: float, buckets: str) -> str:
    """Return a quantile of a histogram's `..._bucket`, over all processes."""
    return f"histogram_quantile({q}, {per_second(buckets, 'le')})"


def share(part: str, whole: str) -> str:
    """Return a share from 0 to 1; there is no value while the whole is 0."""
    return f"{part} / ({whole} > 0)"


def in_category(category: str, expr: str) -> str:
    """Return the query with the label `category`, which places its bar in a waterfall chart."""
    return f'label_replace({expr}, "category", "{category}", "", "")'


def filled_in(expr: str, *, rate_interval: str, time_range: str) -> str:
    """Return the query as Grafana sends it if all models, nodes and replicas are selected."""
    expr = expr.replace("$__rate_interval", rate_interval).replace("$__range", time_range)
    for name in ("$model", "$node", "$replica"):
        expr = expr.replace(name, ".*")
    return expr


def _sum(by: str) -> str:
    return f"sum by ({by})" if by else "sum"


def _select(metric: str, *conditions: str) -> str:
    return f"{metric}{{{', '.join(conditions)}}}"
