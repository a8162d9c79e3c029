// Draws a board's panels with Grafana's own components. `draw` is called with the board's JSON, each panel's series by
// the panel's id, as Prometheus answers a range query, the range in milliseconds, and the theme.

import { createTheme, dateTime, FieldType, formattedValueToString, getDisplayProcessor, getFieldDisplayName, ThemeContext, toDataFrame } from "@grafana/data";
import { BarGauge, BigValue, GlobalStyles, PanelChrome, TimeSeries } from "@grafana/ui";
import { createRoot } from "react-dom/client";
import "uplot/dist/uPlot.min.css";

const CELL = { width: 60, height: 34, gap: 8 }; // of Grafana's grid of 24 columns, in pixels

function legend(format, labels) {
  return format.replace(/{{\s*(\w+)\s*}}/g, (_, name) => labels[name] ?? "");
}

// One frame for each series: a time field and a number field, with the panel's options and the legend's name.
function frames(panel, found, theme, colours) {
  const { defaults, overrides } = panel.fieldConfig;
  return found.map(({ format, metric, values }) => {
    const displayNameFromDS = legend(format, metric);
    const ours = overrides.filter(each => each.matcher.options === displayNameFromDS).flatMap(each => each.properties);
    const colour = ours.find(each => each.id === "color")?.value ?? { mode: "fixed", fixedColor: colours.next().value };
    const mode = panel.type === "timeseries" ? colour : { mode: "thresholds" };
    const config = { ...defaults, displayNameFromDS, color: mode, custom: { drawStyle: "line", ...defaults.custom } };
    const frame = toDataFrame({
      fields: [
        { name: "Time", type: FieldType.time, values: values.map(([at]) => at * 1000), config: {} },
        { name: "Value", type: FieldType.number, values: values.map(([, value]) => (isFinite(value) ? Number(value) : null)), config },
      ],
    });
    for (const field of frame.fields) field.display = getDisplayProcessor({ field, theme });
    const numbers = frame.fields[1].values.filter(value => value !== null);
    const [min, max] = [Math.min(...numbers), Math.max(...numbers)];
    frame.fields[1].state = { range: { min, max, delta: max - min } };
    return frame;
  });
}

function* palette(theme) {
  for (let place = 0; ; place++) yield theme.visualization.palette[place % theme.visualization.palette.length];
}

const last = frame => frame.fields[1].values.findLast(value => value !== null);

function Series({ panel, shown, size, range, theme }) {
  const timeRange = { from: dateTime(range[0]), to: dateTime(range[1]), raw: { from: "now-3m", to: "now" } };
  return <TimeSeries frames={shown} width={size.width} height={size.height} timeRange={timeRange} timeZone="utc"
    structureRev={1} legend={{ showLegend: true, displayMode: "list", placement: "bottom", calcs: [] }} />;
}

function Numbers({ panel, shown, size, theme }) {
  const frame = shown[0];
  const field = frame?.fields[1];
  const value = field && last(frame) !== undefined ? field.display(last(frame)) : { text: panel.fieldConfig.defaults.noValue, numeric: NaN };
  const sparkline = frame?.fields[1].values.some(each => each !== null) && { y: field, x: frame.fields[0] };
  return <BigValue value={value} sparkline={sparkline} theme={theme} width={size.width} height={size.height}
    colorMode="value" graphMode="area" justifyMode="auto" textMode="auto" />;
}

function Bars({ panel, shown, size, theme }) {
  const rows = shown.filter(frame => last(frame) !== undefined);
  const values = rows.map(frame => ({ ...frame.fields[1].display(last(frame)), title: getFieldDisplayName(frame.fields[1], frame, rows) }));
  const longest = values.map(value => value.title).reduce((one, other) => (one.length > other.length ? one : other), "");
  const text = values.map(formattedValueToString).reduce((one, other) => (one.length > other.length ? one : other), "");
  const top = Math.max(...values.map(value => value.numeric), 0);
  return values.map((value, place) => <BarGauge key={place} value={value} theme={theme} width={size.width} height={Math.max(20, size.height / values.length - 10)}
    field={{ min: 0, max: top, thresholds: panel.fieldConfig.defaults.thresholds }} orientation="horizontal" displayMode="gradient" showUnfilled
    namePlacement="auto" text={panel.options.text} alignmentFactors={{ title: longest, text }} display={rows[place].fields[1].display} />);
}

const Words = ({ children }) => <p style={{ textAlign: "center", opacity: 0.6 }}>{children}</p>;
const Absent = () => <Words>This kind of panel is in Grafana's server alone.</Words>;
const Empty = () => <Words>No data</Words>;

const KINDS = { timeseries: Series, stat: Numbers, bargauge: Bars };

// What is wrong with a panel: nothing to draw, a series without a name, values without a unit, text that is cut.
function faultsOf(panel, shown, element) {
  if (!element) return ["is not there"];
  if (!shown.some(frame => last(frame) !== undefined)) return ["no data"];
  const faults = [];
  const names = shown.map(frame => getFieldDisplayName(frame.fields[1], frame, shown));
  if (panel.type !== "stat" && names.some(name => !name.trim() || name === "Value")) faults.push("a legend without a name");
  if (new Set(names).size < names.length) faults.push("two series of one name");
  const { prefix, suffix } = shown[0].fields[1].display(last(shown.find(frame => last(frame) !== undefined)));
  if (!(prefix ?? "").trim() && !(suffix ?? "").trim()) faults.push("values without a unit");
  if (panel.type === "timeseries" && !element.querySelector("canvas")) faults.push("nothing was drawn");
  const drawn = element.textContent;
  if (panel.type !== "stat") for (const name of names) if (!drawn.includes(name)) faults.push(`${name} is not shown`);
  if (panel.type === "bargauge")
    for (const each of element.querySelectorAll("div")) if (!each.children.length && each.scrollWidth > each.clientWidth + 1) faults.push(`${each.textContent} is cut`);
  return faults;
}

const pause = ms => new Promise(done => setTimeout(done, ms));

window.draw = async (board, series, range, mode) => {
  const theme = createTheme({ colors: { mode } });
  document.body.style.cssText = `margin: 0; background: ${theme.colors.background.canvas}`;
  const place = document.body.appendChild(document.createElement("div"));
  const panels = board.panels.filter(panel => panel.type !== "row");
  const drawn = panels.map(panel => frames(panel, series[panel.id], theme, palette(theme)));
  const bottom = Math.max(...panels.map(panel => panel.gridPos.y + panel.gridPos.h));
  place.style.cssText = `position: relative; width: ${24 * CELL.width}px; height: ${bottom * CELL.height}px`;
  const boxes = panels.map((panel, number) => {
    const { x, y, w, h } = panel.gridPos;
    const [width, height] = [w * CELL.width - CELL.gap, h * CELL.height - CELL.gap];
    const Kind = !(panel.type in KINDS) ? Absent : panel.type !== "stat" && !drawn[number].length ? Empty : KINDS[panel.type];
    return <div key={panel.id} id={`panel-${panel.id}`} style={{ position: "absolute", left: x * CELL.width, top: y * CELL.height, width, height, overflow: "hidden" }}>
      <PanelChrome title={panel.title} width={width} height={height}>
        {(inner, innerHeight) => <Kind panel={panel} shown={drawn[number]} size={{ width: inner, height: innerHeight }} range={range} theme={theme} />}
      </PanelChrome>
    </div>;
  });
  const rows = board.panels.filter(panel => panel.type === "row").map(({ id, title, gridPos }) =>
    <b key={`row-${id}`} style={{ position: "absolute", left: 4, top: gridPos.y * CELL.height + 6, color: theme.colors.text.primary }}>{title}</b>);
  createRoot(place).render(<ThemeContext.Provider value={theme}><GlobalStyles />{rows}{boxes}</ThemeContext.Provider>);
  const box = panel => document.getElementById(`panel-${panel.id}`);
  const empty = panel => !box(panel) || (panel.type === "timeseries" && series[panel.id].length && !box(panel).querySelector("canvas"));
  for (let tries = 0; tries < 600 && panels.some(empty); tries++) await pause(100);
  await pause(1000); // what a canvas shows is drawn after it is there
  return panels.map((panel, number) =>
    [panel.title, panel.type in KINDS ? faultsOf(panel, drawn[number], box(panel)) : []]);
};
