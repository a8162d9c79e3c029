// Asks the router how the cluster is, every two seconds while somebody looks, and hands the answer to the panels.

import { ClusterView, mark } from "./cluster.js";
import { ChatBox } from "./chat.js";
import { html, span } from "./dom.js";
import { DraftsView, KvView, QueueView, RequestsView, SplitView, Tiles, TokensView } from "./panels.js";
import { KEY } from "./parts.js";
import { ChangesView, ClientsView, NotableView } from "./recent.js";

const EVERY_MS = 2000;
const SLOWEST_MS = 15000;
const PATIENCE_MS = 5000;

const find = id => document.getElementById(id);
const [main, notice, state, keyForm] = ["main", "notice", "state", "key"].map(find);
const router = new QueueView(find("cluster"));
const cluster = new ClusterView(find("cluster"));
const panels = [
  new Tiles(find("tiles")),
  new SplitView(find("split"), find("split-of")),
  new KvView(find("kv")),
  new DraftsView(find("drafts")),
  new RequestsView(find("requests")),
  new TokensView(find("tokens")),
  new NotableView(find("notable")),
  new ChangesView(find("changes")),
  new ClientsView(find("clients")),
  new ChatBox(find("chat")),
];

let wait = EVERY_MS;
let answered = 0; // when the router last did
let timer = 0;

function setState(word) {
  if (state.dataset.word === word) return; // read aloud only when it changes
  state.dataset.word = word;
  const as = { ok: "healthy", degraded: "failing", starting: "starting", draining: "draining" }[word] ?? "down";
  state.className = `state ${as}`;
  state.replaceChildren(mark(as), word);
}

function render(status) {
  const full = status.shown === "all";
  document.body.classList.toggle("limited", !full);
  document.title = `${status.status === "ok" ? "" : `${status.status}: `}kvrail, ${status.model}`;
  find("model").textContent = status.model;
  setState(status.status);
  keyForm.hidden = full;
  if (!full && sessionStorage.getItem(KEY)) find("key-about").textContent = "That is none of this server's API keys; another one shows the rest:";
  router.update(status);
  cluster.update(status.workers);
  find("tiles").hidden = !full;
  if (full) {
    for (const panel of panels) panel.update(status);
    find("about").textContent = `kvrail ${status.version}, router up ${span(status.uptime_s)}`;
    main.dataset.uptime = status.uptime_s;
  }
  main.hidden = false;
}

function fail(reason) {
  setState("unreachable");
  document.body.classList.add("stale");
  const last = answered ? ` What you see is ${span((Date.now() - answered) / 1000)} old.` : "";
  notice.replaceChildren(html("b", {}, "Cannot reach the router."), ` ${reason}.${last} Trying again every ${span(wait / 1000)}.`);
  notice.hidden = false;
  document.title = "unreachable: kvrail";
}

async function ask() {
  const key = sessionStorage.getItem(KEY);
  const headers = key ? { Authorization: `Bearer ${key}` } : {};
  const answer = await fetch("status.json", { headers, cache: "no-store", signal: AbortSignal.timeout(PATIENCE_MS) });
  if (!answer.ok) throw new Error(`It answered with status ${answer.status}`);
  return answer.json();
}

async function refresh() {
  clearTimeout(timer);
  if (document.hidden) return;
  let status = null;
  try {
    status = await ask();
  } catch (error) {
    wait = Math.min(SLOWEST_MS, wait * 1.5);
    const reasons = { TypeError: "No connection", TimeoutError: `No answer within ${PATIENCE_MS / 1000} s` };
    fail(reasons[error.name] ?? error.message);
  }
  clearTimeout(timer);
  if (status !== null) {
    answered = Date.now();
    wait = EVERY_MS;
    notice.hidden = true;
    document.body.classList.remove("stale");
    render(status);
  }
  timer = setTimeout(refresh, wait);
}

keyForm.addEventListener("submit", event => {
  event.preventDefault();
  sessionStorage.setItem(KEY, find("api-key").value.trim());
  refresh();
});
document.addEventListener("visibilitychange", refresh);
refresh();
