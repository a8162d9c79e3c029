// What happened of late: notable requests, changes of workers, and clients with what they have here.

import { Bar, Meter } from "./charts.js";
import { ago, count, html, plural, seconds } from "./dom.js";
import { PARTS } from "./parts.js";

const empty = words => html("p", { class: "empty" }, words);
const FAILED = ["error", "unavailable", "deadline", "overloaded"];

// Failed requests, then the slowest of the last minutes, each with its id and a bar of its parts.
export class NotableView {
  constructor(place) {
    this.empty = empty("No request has failed, and none has ended in the last minutes.");
    this.rows = html("ol", { class: "notable" });
    place.append(this.empty, this.rows);
  }

  update({ notable }) {
    this.empty.hidden = notable.length > 0;
    const top = Math.max(...notable.map(each => each.total_s), 0);
    this.rows.replaceChildren(...notable.map(each => this.row(each, top)));
  }

  row(each, top) {
    const bar = new Bar("whole");
    const parts = PARTS.filter(([name]) => each.parts_s[name] > 0);
    const words = parts.map(([name, , about]) => `${about} ${seconds(each.parts_s[name])}`).join(", ");
    bar.update(parts.map(([name, group, about]) => ({ className: group, value: each.parts_s[name], title: `${about}: ${seconds(each.parts_s[name])}` })),
      top, words || each.outcome);
    const first = each.first_token_s === null ? "no token" : `first token ${seconds(each.first_token_s)}`;
    const failed = FAILED.includes(each.outcome);
    return html("li", {}, html("code", { class: "id" }, each.id),
      html("span", { class: failed ? "outcome bad" : "outcome" }, failed ? each.outcome : "slow"),
      html("div", { class: "lane" }, bar.element), html("span", { class: "value" }, seconds(each.total_s)),
      html("span", { class: "about muted" }, [first, each.client, ago(each.ago_s)].filter(Boolean).join(" · ")));
  }
}

// A line of changes, the newest first.
export class ChangesView {
  constructor(place) {
    this.empty = empty("Nothing has changed since the router started.");
    this.rows = html("ol", { class: "changes" });
    place.append(this.empty, this.rows);
  }

  update({ changes }) {
    this.empty.hidden = changes.length > 0;
    this.rows.replaceChildren(...changes.slice(0, 12).map(({ ago_s: past, what, role, worker, detail }) =>
      html("li", { class: what }, html("span", { class: "when muted" }, ago(past)), html("b", {}, what), html("span", { class: "who" }, `${role} ${worker}`),
        detail ? html("span", { class: "muted" }, detail) : "")));
  }
}

// Sequences that each client has here.
export class ClientsView {
  constructor(place) {
    this.place = place;
    this.section = place.closest("section");
    this.empty = empty("No client has a request here.");
    this.list = html("dl");
    place.append(this.empty, this.list);
  }

  update({ clients, limit }) {
    this.section.hidden = !clients;
    if (!clients) return;
    const rows = Object.entries(clients);
    this.empty.hidden = rows.length > 0;
    this.list.replaceChildren(...rows.map(([name, held]) => {
      const meter = new Meter(name, "router");
      meter.value.textContent = plural(held, "sequence");
      meter.bar.update([{ className: "router", value: held }], limit, `${name}: ${count(held)} of ${count(limit)}`);
      return meter.element;
    }));
  }
}
