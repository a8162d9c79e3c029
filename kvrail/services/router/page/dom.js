// Elements and words: what every other file of the page builds on.

const SVG = "http://www.w3.org/2000/svg";

function filled(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  element.append(...children);
  return element;
}

export const html = (tag, attributes = {}, ...children) => filled(document.createElement(tag), attributes, children);

export const svg = (tag, attributes = {}, ...children) => filled(document.createElementNS(SVG, tag), attributes, children);

// Show the value of a series. `at`: whose metrics have it, where the router's have not.
export function show(element, text, value, series, at = "router") {
  if (element.textContent !== text) element.textContent = text;
  element.dataset.value = value;
  element.dataset.series = series;
  element.dataset.at = at;
}

const whole = new Intl.NumberFormat("en");
const short = new Intl.NumberFormat("en", { notation: "compact", maximumSignificantDigits: 4 });

export const count = value => value < 1e6 ? whole.format(Math.round(value)) : short.format(value);

export function rate(value) {
  return value >= 100 ? whole.format(Math.round(value)) : value >= 10 ? value.toFixed(1) : value > 0 ? value.toFixed(2) : "0";
}

export function bytes(value) {
  const units = ["B", "kB", "MB", "GB", "TB", "PB"];
  let unit = 0;
  for (; value >= 999.5 && unit < units.length - 1; unit++) value /= 1000;
  return `${unit === 0 ? Math.round(value) : Number(value.toPrecision(3))} ${units[unit]}`;
}

export function seconds(value) {
  if (value >= 100) return `${Math.round(value)} s`;
  if (value >= 1) return `${value.toPrecision(3)} s`;
  const milliseconds = value * 1000;
  if (milliseconds >= 100) return `${Math.round(milliseconds)} ms`;
  return milliseconds >= 0.1 ? `${Number(milliseconds.toPrecision(2))} ms` : milliseconds > 0 ? "<0.1 ms" : "0 ms";
}

export function span(value) {
  const parts = [["d", 86400], ["h", 3600], ["min", 60], ["s", 1]];
  const first = parts.findIndex(([, size]) => value >= size);
  if (first < 0) return "0 s";
  const [unit, size] = parts[first];
  const [next, smaller] = parts[first + 1] ?? [];
  const rest = smaller ? Math.floor((value % size) / smaller) : 0;
  return `${Math.floor(value / size)} ${unit}${rest ? ` ${rest} ${next}` : ""}`;
}

export const ago = past => past < 1 ? "now" : `${span(past)} ago`;

export const percent = share => `${share === 0 || share === 1 || share >= 0.1 ? Math.round(share * 100) : (share * 100).toFixed(1)} %`;

export const plural = (number, one, many = `${one}s`) => `${count(number)} ${number === 1 ? one : many}`;
