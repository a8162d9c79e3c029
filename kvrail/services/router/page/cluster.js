// The workers and the links between them. Links are drawn where prefill and decode workers stand side by side, and listed
// in the decode workers' cards everywhere.

import { Bar, Meter } from "./charts.js";
import { bytes, count, html, plural, show, svg } from "./dom.js";

const MARKS = {
  healthy: "M5 8l2.2 2.2L11 6",
  draining: "M5 8h6",
  failing: "M8 4.5v4.5M8 11v.5",
  incompatible: "M5.5 5.5l5 5M10.5 5.5l-5 5",
  down: "M5.5 5.5l5 5M10.5 5.5l-5 5",
};
const MOST_LABELS = 9;

export function mark(state) {
  const drawing = svg("svg", { class: `mark ${state}`, viewBox: "0 0 16 16", width: 16, height: 16, "aria-hidden": "true" },
    svg("circle", { cx: 8, cy: 8, r: 8 }));
  drawing.append(MARKS[state] ? svg("path", { d: MARKS[state] }) : svg("circle", { class: "hole", cx: 8, cy: 8, r: 3 }));
  return drawing;
}

class Card {
  constructor(role, address) {
    this.address = address;
    this.state = html("span", { class: "word" });
    this.mark = mark("");
    this.detail = html("p", { class: "detail" });
    this.device = html("p", { class: "detail" });
    this.meters = { running: new Meter("running", role), waiting: new Meter("waiting", "waits"), pages: new Meter("KV pages") };
    this.list = html("dl", {}, ...Object.values(this.meters).map(meter => meter.element));
    this.links = html("ul", { class: "links", "aria-label": `Links to ${address}` });
    this.head = html("h4", {}, html("span", { class: "address" }, address));
    this.element = html("li", { class: `card ${role}`, "data-address": address },
      html("div", { class: "head" }, this.head, html("p", { class: "health" }, this.mark, this.state)), this.detail, this.device, this.list, this.links);
    this.ports = new Map();
  }

  update(worker) {
    if (this.state.textContent !== worker.state) {
      this.state.textContent = worker.state;
      const next = mark(worker.state);
      this.mark.replaceWith(next);
      this.mark = next;
      this.element.dataset.state = worker.state;
    }
    this.detail.textContent = worker.detail ?? "";
    this.detail.hidden = !worker.detail;
    const about = [worker.device && `${worker.device}, ${bytes(worker.memory_used)} of ${bytes(worker.memory_total)} memory`,
      worker.kv_cache && `KV pages: ${worker.kv_cache}`,
      worker.compiling?.length && `compiles ${worker.compiling.join(", ")}`,
      worker.kv_in_clear && "KV crosses unencrypted"].filter(Boolean);
    this.device.textContent = about.join("; ");
    this.device.hidden = about.length === 0;
    const known = worker.pages_total !== undefined;
    this.list.hidden = !known;
    if (known) this.load(worker);
    this.connect(worker.links ?? {});
  }

  load(worker) {
    const { running, waiting, pages } = this.meters;
    for (const [name, meter, most] of [["running", running, worker.max_running], ["waiting", waiting, worker.max_waiting]]) {
      const value = worker[name];
      show(meter.value, most ? `${count(value)} of ${count(most)}` : count(value), value, `kvrail_engine_sequences{state="${name}"}`, this.address);
      meter.bar.update([{ className: name, value }], most ?? Math.max(value, 1), `${count(value)} ${name}`);
    }
    const { pages_total: total, pages_free: free, pages_cached: cached } = worker;
    const used = total - free - cached;
    show(pages.value, `${count(used)} used, ${count(cached)} cached, ${count(free)} free`, used, 'kvrail_engine_pages{state="used"}', this.address);
    pages.bar.update(
      [{ className: "used", value: used }, { className: "cached", value: cached }, { className: "free", value: free }],
      total, `KV pages: ${count(used)} used, ${count(cached)} cached, ${count(free)} free`);
  }

  connect(links) {
    const top = Math.max(...Object.values(links), 1);
    for (const [from, perSecond] of Object.entries(links)) {
      let port = this.ports.get(from);
      if (!port) {
        port = { rate: html("span", { class: "rate" }), bar: new Bar("link") };
        port.element = html("li", {}, html("span", { class: "from" }, `from ${from}`), port.rate, html("div", { class: "track" }, port.bar.element));
        this.ports.set(from, port);
        this.links.append(port.element);
      }
      show(port.rate, `${bytes(perSecond)}/s`, perSecond, `kvrail_kv_link_bytes_per_second{prefill_worker="${from}"}`, this.address);
      port.bar.update([{ className: "wire", value: perSecond }], top, `${bytes(perSecond)} per second`);
    }
    for (const [from, port] of this.ports)
      if (!(from in links)) {
        port.element.remove();
        this.ports.delete(from);
      }
    this.links.hidden = this.ports.size === 0;
  }
}

export class ClusterView {
  constructor(place) {
    this.cards = new Map();
    this.lists = {};
    this.heads = {};
    this.columns = {};
    this.drawing = svg("svg", { class: "wires", "aria-hidden": "true" });
    const columns = ["prefill", "decode", "both"].map(role => {
      this.lists[role] = html("ul", { class: "cards" });
      this.heads[role] = html("h3", { class: role }, role);
      return (this.columns[role] = html("div", { class: `column ${role}` }, this.heads[role], this.lists[role]));
    });
    this.element = html("div", { class: "graph" }, this.drawing, ...columns);
    place.append(this.element);
    this.workers = [];
    new ResizeObserver(() => this.draw()).observe(this.element);
  }

  update(workers) {
    this.workers = workers;
    const seen = new Set();
    for (const worker of workers) {
      const key = `${worker.role} ${worker.address}`;
      seen.add(key);
      let card = this.cards.get(key);
      if (!card) {
        card = new Card(worker.role, worker.address);
        this.cards.set(key, card);
        this.lists[worker.role].append(card.element);
      }
      card.update(worker);
    }
    for (const [key, card] of this.cards)
      if (!seen.has(key)) {
        card.element.remove();
        this.cards.delete(key);
      }
    for (const [role, head] of Object.entries(this.heads)) {
      const all = workers.filter(worker => worker.role === role);
      const healthy = all.filter(worker => worker.state === "healthy").length;
      this.columns[role].hidden = !all.length && (role === "both" || workers.some(worker => worker.role === "both"));
      head.textContent = all.length ? `${plural(all.length, `${role} worker`)}, ${healthy} healthy` : `no ${role} worker: decode workers prefill`;
    }
    this.draw();
  }

  draw() {
    const frame = this.element.getBoundingClientRect();
    const wires = [];
    for (const worker of this.workers)
      for (const [from, perSecond] of Object.entries(worker.links ?? {})) {
        const begin = this.cards.get(`prefill ${from}`)?.element.getBoundingClientRect();
        const end = this.cards.get(`decode ${worker.address}`)?.element.getBoundingClientRect();
        if (begin && end && end.left > begin.right) wires.push({ begin, end, perSecond });
      }
    this.drawing.replaceChildren(...wires.flatMap((wire, place) => this.wire(wire, frame, place, wires.length)));
  }

  wire({ begin, end, perSecond }, frame, place, all) {
    const [x1, y1] = [begin.right - frame.left, begin.top + begin.height / 2 - frame.top];
    const [x2, y2] = [end.left - frame.left, end.top + end.height / 2 - frame.top];
    const bend = (x2 - x1) / 2;
    const path = `M${x1} ${y1}C${x1 + bend} ${y1} ${x2 - bend} ${y2} ${x2 - 7} ${y2}`;
    const width = Math.min(9, Math.max(2, 2 + 1.75 * Math.log10(Math.max(perSecond, 1) / 1e7)));
    const found = [
      svg("path", { class: "wire", d: path, "stroke-width": width }),
      svg("path", { class: "flow", d: path, "stroke-width": Math.max(1, width / 3) }),
      svg("path", { class: "tip", d: `M${x2} ${y2}l-9 -5v10z` }),
    ];
    if (all <= MOST_LABELS) {
      const share = all > 1 ? 0.3 + (0.4 * place) / (all - 1) : 0.5; // labels of wires that cross stand apart
      const ease = share * share * (3 - 2 * share);
      found.push(svg("text", { x: x1 + (x2 - x1) * share, y: y1 + (y2 - y1) * ease - width / 2 - 5, "text-anchor": "middle" }, `${bytes(perSecond)}/s`));
    }
    return found;
  }
}
