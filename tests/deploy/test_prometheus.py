"""The Prometheus configuration of the compose cluster and its rules, as promtool sees them."""

import re
from pathlib import Path

import pytest
import yaml

CONFIG = Path(__file__).parents[2] / "deploy" / "prometheus" / "prometheus.yml"
RULES = CONFIG.parent / "rules"
CASES = Path(__file__).parent / "rules" / "alerts_test.yml"
BOARDS = CONFIG.parents[1] / "grafana" / "boards"


def alerts():
    rules = yaml.safe_load((RULES / "alerts.yml").read_text())["groups"][0]["rules"]
    assert len(rules) > 10
    return rules


def test_the_configuration_is_valid(promtool):
    done = promtool("check", "config", str(CONFIG))
    assert done.returncode == 0, done.stdout + done.stderr


def test_a_mistake_in_it_would_be_seen(promtool, tmp_path):
    broken = tmp_path / "prometheus.yml"
    assert "refresh_interval" in CONFIG.read_text()
    broken.write_text(CONFIG.read_text().replace("refresh_interval", "refreshing_interval"))
    assert promtool("check", "config", str(broken)).returncode != 0


def test_each_alert_fires_on_what_it_is_about(promtool):
    done = promtool("test", "rules", str(CASES))
    assert done.returncode == 0, done.stdout + done.stderr


def test_no_alert_is_untested():
    cases = yaml.safe_load(CASES.read_text())["tests"]
    fired = {case["alertname"] for test in cases for case in test.get("alert_rule_test", []) if case["exp_alerts"]}
    assert fired == {rule["alert"] for rule in alerts()}


@pytest.mark.parametrize(
    ("rule", "broken"),
    [
        ("> 0.95", "> 0.97"),
        ("(kvrail_queue_prompts)) == 0", "(kvrail_queue_prompts)) == 1"),
        (" or 0 * sum by (model_name) (kvrail_queue_prompts)", ""),
        ("for: 2m", "for: 9m"),
    ],
)
def test_a_broken_rule_is_seen(promtool, tmp_path, rule, broken):
    text = (RULES / "alerts.yml").read_text()
    assert rule in text
    (tmp_path / "alerts.yml").write_text(text.replace(rule, broken))
    cases = CASES.read_text().replace("../../../deploy/prometheus/rules/alerts.yml", "alerts.yml")
    cases = yaml.safe_load(cases.replace("../../../deploy", str(CONFIG.parents[1])))
    after = yaml.safe_load((tmp_path / "alerts.yml").read_text())["groups"][0]["rules"]
    changed = {before["alert"] for before, now in zip(alerts(), after, strict=True) if before != now}
    cases["tests"] = [
        each for each in cases["tests"] if changed & {it["alertname"] for it in each.get("alert_rule_test", [])}
    ]
    (tmp_path / "test.yml").write_text(yaml.safe_dump(cases))
    done = promtool("test", "rules", str(tmp_path / "test.yml"))
    assert done.returncode != 0 and "alertname:" in done.stdout + done.stderr, "the cases are no rules"


def test_every_alert_has_a_page_in_the_runbook():
    runbook = (CONFIG.parents[2] / "docs" / "operations.md").read_text()
    for rule in alerts():
        name, about = rule["alert"], rule["annotations"]
        assert rule["labels"]["severity"] in ("critical", "warning", "info"), name
        assert about["summary"] and about["description"].endswith("."), name
        assert about["runbook_url"] == f"docs/operations.md#{name.lower()}"
        section = runbook.split(f"\n### {name}\n")[1].split("\n### ")[0]
        assert all(word in section for word in ("**Means**", "**Look at**", "**Do**")), name
    titles = {
        title for board in BOARDS.glob("*.json") for title in re.findall(r'"title": "([^"]+)"', board.read_text())
    }
    for names in re.findall(r"panels? (\*[^.;:]*)", runbook):
        assert set(re.findall(r"\*([^*]+)\*", names.replace("\n", " "))) <= titles, names
