"""The Prometheus configuration of the compose cluster, as promtool sees it."""

from pathlib import Path

CONFIG = Path(__file__).parents[2] / "deploy" / "prometheus" / "prometheus.yml"


def test_the_configuration_is_valid(promtool):
    done = promtool("check", "config", str(CONFIG))
    assert done.returncode == 0, done.stdout + done.stderr


def test_a_mistake_in_it_would_be_seen(promtool, tmp_path):
    broken = tmp_path / "prometheus.yml"
    broken.write_text(CONFIG.read_text().replace("metrics_path", "metric_path"))
    assert promtool("check", "config", str(broken)).returncode != 0
