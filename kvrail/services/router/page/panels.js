// Everything beside the cluster: tiles, and a panel for each subject.

import { Bar, Meter, Sparkline } from "./charts.js";
import { bytes, count, html, percent, plural, rate, seconds, show, span } from "./dom.js";
import { KEY, PARTS } from "./parts.js";

const OUTCOMES = {
  stop: "good", length: "good2", cancelled: "idle", invalid: "idle2",
  overloaded: "warn", deadline: "warn2", unavailable: "bad", error: "bad2",
};
const ask = model => `curl ${new URL("v1/chat/completions", document.baseURI)} -H 'Content-Type: application/json' \\
  ${sessionStorage.getItem(KEY) ? "-H 'Authorization: Bearer YOUR_KEY' " : ""}-d '{"model": "${model}", "messages": [{"role": "user", "content": "Hello!"}]}'`;

const empty = (...words) => html("p", { class: "empty" }, ...words);

// A tile with a figure, what it is, and perhaps a line over time.
class Tile {
  constructor(name, className = "", format = null) {
    this.name = name;
    this.figure = html("p", { class: "figure" }, "–");
    this.note = html("p", { class: "note muted" });
    this.element = html("div", { class: `tile ${className}` }, html("h2", {}, name), this.figure, this.note);
    this.shown = "";
    this.pointed = false;
    if (format)
      this.spark = new Sparkline(className, format, point => {
        this.pointed = point !== null;
        this.note.textContent = point ? `${format(point.value)}/s, ${point.ago ? `${span(point.ago)} ago` : "now"}` : this.shown;
      });
    if (this.spark) this.element.append(this.spark.element);
  }

  say(note) {
    this.shown = note;
    if (!this.pointed && this.note.textContent !== note) this.note.textContent = note;
  }
}

export class Tiles {
  constructor(place) {
    this.tokens = new Tile("Tokens/s", "wide decode", rate);
    this.requests = new Tile("Requests/s", "wide prefill", rate);
    this.first = new Tile("First token");
    this.gap = new Tile("Between tokens");
    this.running = new Tile("Running");
    this.waiting = new Tile("Waiting");
    place.append(...[this.tokens, this.requests, this.first, this.gap, this.running, this.waiting].map(tile => tile.element));
  }

  update(status) {
    const { history, percentiles, requests, queue } = status;
    for (const [tile, values] of [[this.tokens, history.tokens_per_s], [this.requests, history.requests_per_s]]) {
      tile.figure.textContent = rate(values.at(-1) ?? 0);
      const top = tile.spark.update(values, history.steps, history.step_s, tile.name);
      tile.say(top > 0 ? `peak ${rate(top)}` : "nothing of late");
    }
    for (const [tile, { p50, p99 }] of [[this.first, percentiles.first_token_s], [this.gap, percentiles.gap_s]]) {
      tile.figure.textContent = p50 === null ? "–" : seconds(p50);
      tile.say(p50 === null ? "no request of late" : `median; p99 ${seconds(p99)}`);
    }
    show(this.running.figure, count(requests.running), requests.running, 'kvrail_requests_in_flight{state="running"}');
    this.running.say("requests that stream");
    show(this.waiting.figure, count(requests.waiting), requests.waiting, 'kvrail_requests_in_flight{state="waiting"}');
    this.waiting.say(queue.prompts ? `${plural(queue.prompts, "prompt")} in the router` : "no queue in the router");
  }
}

// Where workers of both roles computed prompts, and why; "" without such workers.
function waysOf(ways) {
  const names = { here: "where they decode", apart: "on another worker" };
  const entries = Object.entries(ways ?? {}).map(([way, reasons]) => [way, Object.entries(reasons).filter(([, value]) => value)]);
  const all = entries.flatMap(([, reasons]) => reasons).reduce((sum, [, value]) => sum + value, 0);
  const shares = entries.filter(([, reasons]) => reasons.length).map(([way, reasons]) => {
    const share = reasons.reduce((sum, [, value]) => sum + value, 0) / all;
    return `${percent(share)} ${names[way]} (${reasons.map(([reason, value]) => `${reason} ${percent(value / all)}`).join(", ")})`;
  });
  return shares.length ? `prompts computed: ${shares.join("; ")}` : "";
}

// The router's own queue: how full it is, and for whom.
export class QueueView {
  constructor(place) {
    this.here = new Meter("sequences at the router", "router");
    this.prompts = new Meter("prompts that wait for a turn", "waits");
    this.clients = html("p", { class: "muted small" });
    this.ways = html("p", { class: "muted small ways" });
    this.element = html("div", { class: "router card" },
      html("div", { class: "head" }, html("h3", {}, "router"), this.clients), html("dl", { class: "side" }, this.here.element, this.prompts.element), this.ways);
    place.append(this.element);
  }

  update({ active, limit, queue, policy, ways }) {
    this.here.value.textContent = limit ? `${count(active)} of ${count(limit)}` : count(active);
    this.here.bar.update([{ className: "router", value: active }], limit ?? Math.max(active, 1), `${count(active)} sequences at the router`);
    this.prompts.element.hidden = !queue;
    this.clients.textContent = queue ? `${queue.clients ? `${plural(queue.clients, "client")} wait, in turns; ` : ""}policy ${policy}` : "";
    this.ways.textContent = waysOf(ways);
    this.ways.hidden = !this.ways.textContent;
    if (!queue) return;
    show(this.prompts.value, count(queue.prompts), queue.prompts, "kvrail_queue_prompts");
    this.prompts.bar.update([{ className: "waiting", value: queue.prompts }], limit, `${count(queue.prompts)} prompts wait`);
  }
}

// A request's time: one bar of all its parts, and under it each part where it lies.
export class SplitView {
  constructor(place, caption) {
    this.place = place;
    this.caption = caption;
    this.sum = html("p", { class: "sum" });
    this.whole = new Bar("whole");
    this.rows = html("ol", { class: "waterfall" });
    this.empty = empty();
    this.parts = new Map();
    this.filled = html("div", {}, this.sum, html("div", { class: "track tall" }, this.whole.element), this.rows);
    place.append(this.empty, this.filled);
  }

  row(name, group, about) {
    let row = this.parts.get(name);
    if (row) return row;
    row = { value: html("span", { class: "value" }), bar: new Bar() };
    row.element = html("li", { "data-part": name }, html("span", { class: "label" }, html("i", { class: `key ${group}` }), about),
      html("div", { class: "lane" }, row.bar.element), row.value);
    this.parts.set(name, row);
    this.rows.append(row.element);
    return row;
  }

  update({ split, model }) {
    const { requests, parts } = split;
    this.empty.hidden = requests > 0;
    this.filled.hidden = requests === 0;
    this.caption.textContent = requests === 0 ? "" : split.recent_s === null
      ? `mean of ${plural(requests, "request")} since the start`
      : `mean of ${plural(requests, "request")} in the last ${span(split.recent_s)}`;
    if (requests === 0) {
      if (!this.empty.firstChild)
        this.empty.append("No request has been answered yet. Try:", html("pre", { tabindex: "0" }, ask(model)));
      return;
    }
    const known = PARTS.filter(([name]) => name in parts);
    const others = Object.keys(parts).filter(name => !PARTS.some(([each]) => each === name)).map(name => [name, "queue", name]);
    const all = [...known, ...others];
    const total = all.reduce((sum, [name]) => sum + parts[name], 0);
    this.sum.replaceChildren(html("b", {}, seconds(total / requests)), " from request to last byte");
    let begin = 0;
    for (const [name, group, about] of all) {
      const row = this.row(name, group, about);
      show(row.value, seconds(parts[name] / requests), parts[name], `kvrail_request_stage_seconds_sum{stage="${name}"}`);
      row.bar.update([{ className: "gap", value: begin }, { className: group, value: Math.max(parts[name], parts[name] > 0 ? total / 400 : 0) }], total,
        `${about}: ${seconds(parts[name] / requests)}`);
      row.element.classList.toggle("none", parts[name] / total < 0.0005);
      begin += parts[name];
    }
    this.whole.update(all.map(([name, group, about]) =>
      ({ className: group, value: parts[name], title: `${about}: ${seconds(parts[name] / requests)}, ${percent(parts[name] / total)}` })), total,
      `${seconds(total / requests)}: ${all.map(([name, , about]) => `${about} ${percent(parts[name] / total)}`).join(", ")}`);
  }
}

// Bytes before and after encoding, by codec.
export class KvView {
  constructor(place) {
    this.empty = empty("No KV has crossed yet: prompts were short, known, or there were none.");
    this.saved = html("b");
    this.about = html("span");
    this.codecs = html("div", { class: "codecs" });
    this.filled = html("div", {}, html("p", { class: "sum" }, this.saved, this.about), this.codecs);
    this.rows = new Map();
    place.append(this.empty, this.filled);
  }

  update({ kv }) {
    const used = Object.entries(kv);
    const sum = side => used.reduce((all, [, sides]) => all + sides[side], 0);
    const [raw, payload] = [sum("raw"), sum("payload")];
    this.empty.hidden = payload > 0;
    this.filled.hidden = payload === 0;
    if (payload === 0) return;
    this.saved.textContent = bytes(Math.max(0, raw - payload));
    this.about.textContent = ` of ${bytes(raw)} saved, ${percent(Math.max(0, 1 - payload / raw))}`;
    for (const [codec, sides] of used) {
      let row = this.rows.get(codec);
      if (!row) {
        row = { raw: new Meter("before encoding"), payload: new Meter("on the wire"), ratio: html("span", { class: "ratio" }) };
        row.element = html("div", { class: "codec" }, html("h3", {}, html("code", {}, codec), row.ratio),
          html("dl", {}, row.raw.element, row.payload.element));
        this.rows.set(codec, row);
        this.codecs.append(row.element);
      }
      row.ratio.textContent = `${(sides.raw / sides.payload).toFixed(2)} : 1`;
      const series = [["raw", "plain", "kvrail_kv_raw_bytes_total"], ["payload", "wire", "kvrail_kv_payload_bytes_total"]];
      for (const [side, className, name] of series) {
        show(row[side].value, bytes(sides[side]), sides[side], `${name}{codec="${codec}",direction="received"}`, "decode");
        row[side].bar.update([{ className, value: sides[side] }], Math.max(sides.raw, sides.payload), bytes(sides[side]));
      }
    }
  }
}

export class DraftsView {
  constructor(place) {
    this.empty = empty("No drafts yet. They come with codecs of several stages, such as ", html("code", {}, "splitzip-progressive-ans"), ".");
    this.share = html("b");
    this.accepted = new Meter("accepted");
    this.proposed = new Meter("proposed");
    this.filled = html("div", {}, html("p", { class: "sum" }, this.share, " of the drafts were right"), html("dl", {}, this.proposed.element, this.accepted.element));
    place.append(this.empty, this.filled);
  }

  update({ drafts }) {
    this.empty.hidden = drafts.proposed > 0;
    this.filled.hidden = drafts.proposed === 0;
    this.share.textContent = drafts.proposed ? percent(drafts.accepted / drafts.proposed) : "";
    const rows = [["proposed", "plain", "kvrail_engine_drafts_proposed_total"], ["accepted", "drafts", "kvrail_engine_drafts_accepted_total"]];
    for (const [name, className, series] of rows) {
      show(this[name].value, count(drafts[name]), drafts[name], series, "decode");
      this[name].bar.update([{ className, value: drafts[name] }], drafts.proposed, `${count(drafts[name])} ${name}`);
    }
  }
}

export class RequestsView {
  constructor(place) {
    this.empty = empty("No request has ended yet.");
    this.sum = html("p", { class: "sum" });
    this.bar = new Bar("whole");
    this.list = html("ul", { class: "legend tall" });
    this.filled = html("div", {}, this.sum, html("div", { class: "track tall" }, this.bar.element), this.list);
    this.rows = new Map();
    place.append(this.empty, this.filled);
  }

  update({ outcomes, failovers }) {
    const all = Object.values(outcomes).reduce((sum, value) => sum + value, 0);
    this.empty.hidden = all > 0;
    this.filled.hidden = all === 0;
    const well = (outcomes.stop ?? 0) + (outcomes.length ?? 0);
    this.sum.replaceChildren(html("b", {}, all ? percent(well / all) : "–"), ` of ${plural(all, "request")} answered in full`,
      failovers ? html("span", { class: "muted" }, `, ${count(failovers)} taken over from a lost worker`) : "");
    const parts = Object.entries(outcomes).map(([name, value]) => ({ className: OUTCOMES[name] ?? "bad2", value, title: `${name}: ${count(value)}` }));
    this.bar.update(parts, all, Object.entries(outcomes).filter(([, value]) => value).map(([name, value]) => `${name} ${count(value)}`).join(", "));
    for (const [name, value] of Object.entries(outcomes)) {
      let row = this.rows.get(name);
      if (!row) {
        row = { value: html("span", { class: "value" }) };
        row.element = html("li", {}, html("i", { class: `key ${OUTCOMES[name] ?? "bad2"}` }), `${name} `, row.value);
        this.rows.set(name, row);
        this.list.append(row.element);
      }
      show(row.value, count(value), value, `kvrail_requests_total{outcome="${name}"}`);
      row.element.classList.toggle("none", value === 0);
    }
  }
}

export class TokensView {
  constructor(place) {
    this.share = html("b");
    this.prompt = new Meter("prompt");
    this.cached = new Meter("of them found in the decode worker's cache");
    this.generated = new Meter("generated");
    place.append(html("p", { class: "sum" }, this.share, " of the prompts' tokens were held already"),
      html("dl", {}, this.prompt.element, this.cached.element, this.generated.element));
  }

  update({ tokens }) {
    this.share.textContent = tokens.prompt ? percent(tokens.cached / tokens.prompt) : "–";
    const top = Math.max(tokens.prompt, tokens.generated, 1);
    const rows = [["prompt", "prefill", "kvrail_prompt_tokens_total"], ["cached", "cached", "kvrail_cached_prompt_tokens_total"],
      ["generated", "decode", "kvrail_generation_tokens_total"]];
    for (const [name, className, series] of rows) {
      show(this[name].value, count(tokens[name]), tokens[name], series);
      this[name].bar.update([{ className, value: tokens[name] }], top, `${count(tokens[name])} ${name}`);
    }
  }
}
