// The shapes that panels are made of. Each is made once and brought up to date with `update`.

import { html, svg } from "./dom.js";

// A bar of parts, side by side. `update` takes [{ className, value, title }] and the whole that they are parts of.
export class Bar {
  constructor(className = "") {
    this.element = svg("svg", { class: `bar ${className}`, role: "img", width: "100%", height: "100%" });
    this.parts = [];
  }

  update(parts, whole, label) {
    this.element.setAttribute("aria-label", label);
    let begin = 0;
    parts.forEach(({ className, value, title }, place) => {
      let part = this.parts[place];
      if (!part) {
        part = { rect: svg("rect", { y: 0, height: "100%" }), title: svg("title") };
        part.rect.append(part.title);
        this.element.append(part.rect);
        this.parts[place] = part;
      }
      const width = whole > 0 ? Math.min(100, (100 * value) / whole) : 0;
      part.rect.setAttribute("class", className);
      part.rect.setAttribute("x", `${begin}%`);
      part.rect.setAttribute("width", `${width}%`);
      part.title.textContent = title ?? "";
      begin += width;
    });
    this.parts.splice(parts.length).forEach(part => part.rect.remove());
  }
}

// A name, a figure and a bar under them.
export class Meter {
  constructor(name, className = "") {
    this.value = html("dd");
    this.bar = new Bar(className);
    this.element = html("div", { class: "meter" }, html("dt", {}, name), this.value, html("dd", { class: "track" }, this.bar.element));
  }
}

// A line over time: the newest value at the right edge, zero at the bottom.
export class Sparkline {
  constructor(className, format, onPoint) {
    this.area = svg("path", { class: "area" });
    this.line = svg("path", { class: "line", "vector-effect": "non-scaling-stroke" });
    this.cursor = svg("line", { class: "cursor", y1: 0, y2: 40, "vector-effect": "non-scaling-stroke", visibility: "hidden" });
    this.element = svg("svg", { class: `spark ${className}`, viewBox: "0 0 120 40", preserveAspectRatio: "none", role: "img" },
      this.area, this.line, this.cursor);
    this.format = format;
    this.values = [];
    this.element.addEventListener("pointermove", event => {
      const box = this.element.getBoundingClientRect();
      const place = Math.round(((event.clientX - box.left) / box.width) * this.steps) - (this.steps - this.values.length) - 1;
      const value = this.values[place];
      this.cursor.setAttribute("visibility", value === undefined ? "hidden" : "visible");
      if (value === undefined) return onPoint(null);
      const x = this.x(place);
      this.cursor.setAttribute("x1", x);
      this.cursor.setAttribute("x2", x);
      onPoint({ value, ago: (this.values.length - 1 - place) * this.step });
    });
    this.element.addEventListener("pointerleave", () => {
      this.cursor.setAttribute("visibility", "hidden");
      onPoint(null);
    });
  }

  x(place) {
    return (120 * (this.steps - this.values.length + place + 1)) / this.steps;
  }

  update(values, steps, step, name) {
    Object.assign(this, { values, steps, step });
    const top = Math.max(...values, 0);
    const y = value => 38.5 - (top > 0 ? (36 * value) / top : 0);
    const points = values.map((value, place) => `${this.x(place).toFixed(2)},${y(value).toFixed(2)}`);
    const path = points.length ? `M${points.join("L")}` : "";
    this.line.setAttribute("d", path);
    this.area.setAttribute("d", path && `${path}V40H${this.x(0).toFixed(2)}Z`);
    const last = values.at(-1) ?? 0;
    this.element.setAttribute("aria-label", `${name} over time: now ${this.format(last)}, at most ${this.format(top)}`);
    return top;
  }
}
