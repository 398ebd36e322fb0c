"""The text of /metrics is what Prometheus reads."""

from foundling.serve.metrics import Histogram, ModelMetrics, exposition


def test_buckets_hold_what_lies_below_them() -> None:
    timed = Histogram((0.1, 1.0))
    for seconds in (0.05, 0.1, 0.5, 7.0):
        timed.add(seconds)
    lines = list(timed.lines("t", '{model="a"}'))
    assert lines == [
        't_bucket{model="a",le="0.1"} 2',
        't_bucket{model="a",le="1"} 3',
        't_bucket{model="a",le="+Inf"} 4',
        't_sum{model="a"} 7.650000',
        't_count{model="a"} 4',
    ]


def test_a_name_is_told_once_for_all_models_and_escaped() -> None:
    gauges = {"running": ("now", 2.0), "preemptions_total": ("put back", 1)}
    models = {id: (ModelMetrics(requests=3), gauges) for id in ("a", 'b"\n')}
    text = exposition(models, {200: 5})
    assert text.count("# TYPE foundling_requests_total counter") == 1
    assert 'foundling_requests_total{model="a"} 3\n' in text
    assert text.count("# TYPE foundling_preemptions_total counter") == 1
    assert text.count("# TYPE foundling_running gauge") == 1
    assert 'foundling_running{model="b\\"\\n"} 2\n' in text
    assert text.endswith('foundling_responses_total{status="200"} 5\n')
