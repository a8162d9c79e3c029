"""Panels and boards in the house's looks, over Grafana's own builders."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote

from grafana_foundation_sdk.builders import (
    bargauge,
    common,
    dashboard,
    heatmap,
    prometheus,
    stat,
    statetimeline,
    table,
    timeseries,
)
from grafana_foundation_sdk.cog.builder import Builder
from grafana_foundation_sdk.models import common as looks
from grafana_foundation_sdk.models import dashboard as shapes
from grafana_foundation_sdk.models import heatmap as heat_shapes
from grafana_foundation_sdk.models.prometheus import PromQueryFormat

from deploy.grafana.source.queries import MODEL, Query

SOURCE = shapes.DataSourceRef(type_val="prometheus", uid="${datasource}")
TAG = "kvrail"
COLOURS = {
    "free": "#5a6472",
    "cached": "#8db4f2",
    "used": "#2b68d8",
    "stop": "#1a7f4b",
    "length": "#55b07f",
    "cancelled": "#8c96a5",
    "invalid": "#b9c0ca",
    "overloaded": "#b7791f",
    "deadline": "#dba84b",
    "unavailable": "#c9302c",
    "error": "#e2726e",
}
"""Of series that mean the same on every board."""
STATES: Mapping[str, str] = {
    "healthy": "green",
    "draining": "blue",
    "failing": "orange",
    "incompatible": "purple",
    "down": "red",
    "starting": "yellow",
    "duplicate": "text",
}
"""A worker's states, numbered from 1 in this order, with their colours."""

ANNOTATIONS: Mapping[str, tuple[str, str]] = {
    "worker lost": ("red", f'max by (role, worker) (kvrail_worker_state{{{MODEL}, state="down"}}) == 1'),
    "restart": (
        "orange",
        "max by (instance) (changes(process_start_time_seconds[2m])) > 0 and on (instance) kvrail_build_info",
    ),
    "deploy": (
        "purple",
        "count by (version) (kvrail_build_info) unless on (version) count by (version) (kvrail_build_info offset 5m)",
    ),
}
"""What is marked on every board's panels: a colour, and a query whose series last as long as the mark."""

Panel = Builder[shapes.Panel]


@dataclass(frozen=True, slots=True)
class Link:
    """A way from a panel to Grafana's Explore. source: the board's variable of the data source. query: of its kind."""

    title: str
    source: str
    query: Mapping[str, str]

    @property
    def url(self) -> str:
        """The address, with Grafana's variables for data source and time range left in place."""
        pane = {
            "datasource": f"${{{self.source}}}",
            "queries": [{"refId": "A", **self.query}],
            "range": {"from": "${__from}", "to": "${__to}"},
        }
        return f"/explore?schemaVersion=1&panes={quote(json.dumps({'a': pane}), safe='${}:,')}"


FAILURES = Link(
    "Logs of failed requests",
    "logs",
    {"expr": '{service_name=~".+"} | json | service="router" | outcome=~"error|unavailable|deadline|overloaded"'},
)
SLOW = Link(
    "Traces of slow requests",
    "traces",
    {"queryType": "traceql", "query": '{ resource.service.name = "kvrail-router" && duration > 1s }'},
)


def _targets(panel: Any, queries: Sequence[Query], **flags: bool) -> Any:
    for place, query in enumerate(queries):
        target = prometheus.Dataquery().expr(query.expr).legend_format(query.legend).ref_id(chr(ord("A") + place))
        if flags.get("instant"):
            target = target.instant()
        if flags.get("heatmap"):
            target = target.format(PromQueryFormat.HEATMAP)
        if flags.get("table"):
            target = target.format(PromQueryFormat.TABLE)
        panel = panel.with_target(target)
    return panel.datasource(SOURCE)


def _headed(panel: Any, title: str, description: str, unit: str, width: int, height: int) -> Any:
    return panel.title(title).description(description).unit(unit).span(width).height(height)


def lines(
    title: str,
    description: str,
    unit: str,
    *queries: Query,
    width: int = 8,
    stacked: bool = False,
    top: float | None = None,
    links: Sequence[Link] = (),
) -> Panel:
    """Series over time. unit: Grafana's name of it. top: where the axis ends. links: what its title leads to."""
    panel = _headed(timeseries.Panel(), title, description, unit, width, 8)
    legend = common.VizLegendOptions().display_mode(looks.LegendDisplayMode.LIST).show_legend(True)
    tooltip = common.VizTooltipOptions().mode(looks.TooltipDisplayMode.MULTI).sort(looks.SortOrder.DESCENDING)
    panel = panel.legend(legend.placement(looks.LegendPlacement.BOTTOM)).tooltip(tooltip)
    panel = panel.min(0).fill_opacity(60 if stacked else 8).line_width(1).show_points(looks.VisibilityMode.NEVER)
    if stacked:
        panel = panel.stacking(common.StackingConfig().mode(looks.StackingMode.NORMAL).group("A"))
    if top is not None:
        panel = panel.max(top)
    if links:
        panel = panel.links([_link(each.title).url(each.url) for each in links])
    for name, colour in COLOURS.items():
        if any(query.legend in ("{{outcome}}", "{{state}}") for query in queries):
            fixed = shapes.DynamicConfigValue(id_val="color", value={"mode": "fixed", "fixedColor": colour})
            panel = panel.override_by_name(name, [fixed])
    return _targets(panel, queries)


def number(
    title: str,
    description: str,
    unit: str,
    expr: str,
    *,
    width: int = 4,
    steps: Sequence[tuple[float | None, str]] = ((None, "blue"),),
) -> Panel:
    """The newest value, large, before its course. steps: colours from values on."""
    panel = _headed(stat.Panel(), title, description, unit, width, 4)
    values = [shapes.Threshold(value=value, color=colour) for value, colour in steps]
    thresholds = dashboard.ThresholdsConfig().mode(shapes.ThresholdsMode.ABSOLUTE).steps(values)
    panel = panel.thresholds(thresholds).graph_mode(looks.BigValueGraphMode.AREA).no_value("–")
    panel = panel.color_mode(looks.BigValueColorMode.VALUE)
    panel = panel.reduce_options(common.ReduceDataOptions().calcs(["lastNotNull"]).fields("").values(False))
    return _targets(panel, [Query(expr, "")])


def bars(title: str, description: str, unit: str, *queries: Query, width: int = 8) -> Panel:
    """Values over the board's range, a bar each. Sizes of the text are given: else Grafana cuts long names."""
    panel = _headed(bargauge.Panel(), title, description, unit, width, 8)
    panel = panel.orientation(looks.VizOrientation.HORIZONTAL).display_mode(looks.BarGaugeDisplayMode.GRADIENT)
    panel = panel.min(0).reduce_options(common.ReduceDataOptions().calcs(["lastNotNull"]).fields("").values(False))
    panel = panel.text(common.VizTextDisplayOptions().title_size(12).value_size(14))
    blue = [shapes.Threshold(value=None, color="blue")]
    panel = panel.thresholds(dashboard.ThresholdsConfig().mode(shapes.ThresholdsMode.ABSOLUTE).steps(blue))
    return _targets(panel, queries, instant=True)


def heat(title: str, description: str, unit: str, query: Query, *, width: int = 8) -> Panel:
    """How a histogram's observations are spread, over time. unit: of what was observed."""
    panel = _headed(heatmap.Panel(), title, description, unit, width, 8)
    panel = panel.y_axis(heatmap.YAxisConfig().unit(unit)).hide_legend().show_tooltip()
    panel = panel.scale_distribution(common.ScaleDistributionConfig().type(looks.ScaleDistribution.LINEAR))
    colours = heatmap.HeatmapColorOptions().mode(heat_shapes.HeatmapColorMode.SCHEME).scheme("Blues").steps(64)
    return _targets(panel.color(colours.fill("blue").exponent(0.5)), [query], heatmap=True)


def states(title: str, description: str, query: Query, *, width: int = 24) -> Panel:
    """Workers' states over time, whose numbers follow STATES."""
    panel = _headed(statetimeline.Panel(), title, description, "none", width, 7)
    shown = {
        str(number): shapes.ValueMappingResult(text=state, color=colour, index=number)
        for number, (state, colour) in enumerate(STATES.items(), 1)
    }
    legend = common.VizLegendOptions().display_mode(looks.LegendDisplayMode.LIST).show_legend(True)
    panel = panel.mappings([shapes.ValueMap(options=shown)]).show_value(looks.VisibilityMode.NEVER).row_height(0.8)
    panel = panel.legend(legend.placement(looks.LegendPlacement.BOTTOM)).merge_values(True).fill_opacity(80)
    return _targets(panel, [query])


def rows(title: str, description: str, *queries: Query, width: int = 12) -> Panel:
    """The series' labels, a row each."""
    panel = _headed(table.Panel(), title, description, "none", width, 6)
    hide = {"Time": True, "Value": True, "__name__": True}
    organise = shapes.DataTransformerConfig(id_val="organize", options={"excludeByName": hide})
    return _targets(panel.show_header(True).with_transformation(organise), queries, instant=True, table=True)


def board(
    uid: str, title: str, description: str, sections: Mapping[str, Sequence[Panel]], *, of_workers: bool = False
) -> shapes.Dashboard:
    """A board. of_workers: whether workers can be chosen on it."""
    made = (
        dashboard.Dashboard(f"kvrail / {title}")
        .uid(uid)
        .description(description)
        .tags([TAG])
        .time("now-30m", "now")
        .refresh("10s")
        .timezone("browser")
        .editable()
        .tooltip(shapes.DashboardCursorSync.CROSSHAIR)
        .link(
            dashboard.DashboardLink("kvrail")
            .type(shapes.DashboardLinkType.DASHBOARDS)
            .tags([TAG])
            .include_vars(True)
            .keep_time(True)
        )
        .with_variable(dashboard.DatasourceVariable("datasource").label("Data source").type("prometheus"))
        .with_variable(dashboard.DatasourceVariable("logs").label("Logs").type("loki"))
        .with_variable(dashboard.DatasourceVariable("traces").label("Traces").type("tempo"))
        .with_variable(_choice("model", "Model", "label_values(kvrail_requests_total, model_name)"))
    )
    for name, (colour, expr) in ANNOTATIONS.items():
        mark = dashboard.AnnotationQuery().name(name).datasource(SOURCE).enable(True).icon_color(colour).expr(expr)
        made = made.annotation(mark)
    if of_workers:
        made = made.with_variable(_choice("worker", "Worker", f"label_values(kvrail_worker_state{{{MODEL}}}, worker)"))
    for name, panels in sections.items():
        made = made.with_row(dashboard.Row(name))
        for panel in panels:
            made = made.with_panel(panel)
    found = made.build()
    for number, panel in enumerate(found.panels or [], 1):
        panel.id_val = number
    return found


def _link(title: str) -> Any:
    return dashboard.DashboardLink(title).type(shapes.DashboardLinkType.LINK).target_blank(True)


def _choice(name: str, label: str, query: str) -> Builder[shapes.VariableModel]:
    return (
        dashboard.QueryVariable(name)
        .label(label)
        .datasource(SOURCE)
        .query({"query": query, "refId": name})
        .refresh(shapes.VariableRefresh.ON_TIME_RANGE_CHANGED)
        .multi(True)
        .include_all(True)
        .all_value(".*")
        .current(shapes.VariableOption(selected=True, text="All", value="$__all"))
    )
