// The dashboard: asks for figures again and again, and shows them. All paths are relative to the page's own.

import { BarChart, LineChart } from "./chart.js";
import { Figures, bound, buckets, bytes, number, quantile, rate, sumTimes, time } from "./figures.js";
import { Sections } from "./sections.js";
import { element, setText } from "./table.js";

/** How long an answer is waited for, in milliseconds. */
const PATIENCE_MS = 20000;
/** A server whose answers take their time is asked less often: it has this many times as long for other work. */
const REST = 4;

const byId = (id) => document.getElementById(id);
const [about, state, filter, interval, pause] = ["about", "state", "filter", "interval", "pause"].map(byId);

const figures = new Figures();
let sections = null;
let timer = null;
let isAsking = false;
let isPaused = false;

const requests = new LineChart("Requests per second", [{ name: "all", class: "accent" }], rate);
const classes = new LineChart(
  "Responses per second, by class",
  [
    { name: "2xx", class: "good" },
    { name: "3xx", class: "info", dashed: true },
    { name: "4xx", class: "warn" },
    { name: "5xx", class: "bad", dashed: true },
  ],
  rate,
);
const latencies = new LineChart(
  "Time to first byte",
  [
    { name: "p50", class: "good" },
    { name: "p99", class: "warn", dashed: true },
  ],
  (value) => (value === null ? "–" : bound(value)),
);
const histogram = new BarChart(
  "Responses by duration",
  [{ class: "accent" }, { class: "warn" }],
  (milliseconds) => bound(milliseconds),
);
byId("charts").append(requests.node, classes.node, latencies.node, histogram.node);

/** What stands on top: a name, a value, and whether it is bad. */
const TILES = [
  ["requests per second", () => rate(figures.rate((answer) => answer["http/requests"].total))],
  ["requests", (answer) => number(answer["http/requests"].total)],
  ["active connections", (answer) => number(answer.connections.active)],
  ["idle connections", (answer) => number(answer.connections.idle)],
  ["new connections per second", () => rate(figures.rate((answer) => answer.connections.accepted))],
  ["TLS handshakes per second", () => rate(figures.rate((answer) => answer.ssl.handshakes))],
  ["failed TLS handshakes", (answer) => number(answer.ssl.handshakes_failed)],
  ["event loop stalls", (answer) => number(stalls(answer)), () => figures.recent(stalls) > 0],
  [
    "longest event loop turn",
    (answer) => time(Math.max(0, ...answer["gale/loops"].map((loop) => loop.longest)) / 1000),
  ],
  ["memory shared by event loops", (answer) => bytes(answer["gale/memory"].shared)],
  [
    "worker processes replaced",
    (answer) => number(answer.processes.respawned),
    (answer) => answer.processes.respawned > 0,
  ],
];
const tiles = TILES.map(([name, value, isBad]) => {
  const shown = element("dd");
  byId("tiles").append(element("div", {}, element("dt", {}, name), shown));
  return (answer) => {
    setText(shown, value(answer));
    shown.className = isBad?.(answer) ? "is-bad" : "";
  };
});

function stalls(answer) {
  return answer["gale/loops"].reduce((all, loop) => all + loop.stalls, 0);
}

/** A counter of all zones of servers: each request is in one of them at most. */
function ofServers(find) {
  return (answer) => Object.values(answer["http/server_zones"]).reduce((all, zone) => all + find(zone), 0);
}

function timesOfServers(find) {
  const names = Object.keys(figures.now.answer["http/server_zones"]);
  return sumTimes(names.map((name) => figures.times((answer) => find(answer["http/server_zones"][name]))));
}

/** What is said to the reader, aloud too: only when it changes. */
function say(text, isBad = false) {
  setText(state, text);
  state.classList.toggle("is-bad", isBad);
}

async function ask(path, options = {}) {
  const response = await fetch(path, { cache: "no-store", signal: AbortSignal.timeout(PATIENCE_MS), ...options });
  if (!response.ok) {
    const told = await response.json().catch(() => null);
    throw new Error(`${response.status} ${told?.error?.text ?? response.statusText}`.trim());
  }
  return response.json();
}

/** Asks for figures, and shows them. */
async function refresh() {
  clearTimeout(timer);
  if (isAsking) return;
  isAsking = true;
  const begun = performance.now();
  try {
    figures.take(await ask("figures"));
    show();
    document.body.classList.remove("is-old");
    if (!isPaused) say("");
  } catch (error) {
    document.body.classList.add("is-old");
    const reason = error instanceof TypeError ? "the server does not respond" : error.message;
    say(`The figures are outdated: ${reason}. Retrying.`, true);
  }
  isAsking = false;
  const rest = Math.max(Number(interval.value), REST * (performance.now() - begun));
  if (!isPaused && !document.hidden) timer = setTimeout(refresh, rest);
}

function show() {
  const { answer, time: now } = figures.now;
  const { build, version, address, generation, load_timestamp: loaded } = answer.nginx;
  const since = new Date(loaded).toLocaleString();
  setText(about, `${build} (nginx ${version}) at ${address}, configuration ${generation} of ${since}`);
  tiles.forEach((update) => update(answer));
  showCharts(answer, now);
  sections ??= new Sections(byId("sections"), figures, answer.write ? change : null);
  showSections();
}

function showCharts(answer, now) {
  const hasZones = Object.keys(answer["http/server_zones"]).length > 0;
  [classes, latencies, histogram].forEach((chart) => { chart.node.hidden = !hasZones; });
  requests.add(now, [figures.rate((one) => one["http/requests"].total)]);
  if (!hasZones) return;
  classes.add(now, ["2xx", "3xx", "4xx", "5xx"].map((name) => figures.rate(ofServers((zone) => zone.responses[name]))));
  const firstByte = timesOfServers((zone) => zone?.first_byte_times);
  const whole = timesOfServers((zone) => zone?.response_times);
  latencies.add(now, [quantile(firstByte, 0.5), quantile(firstByte, 0.99)]);
  const series = (name, times) => ({
    bars: buckets(times),
    text: `${name}: p50 ${bound(quantile(times, 0.5))}, p99 ${bound(quantile(times, 0.99))}`,
  });
  histogram.update([series("first byte", firstByte), series("total", whole)]);
}

function showSections() {
  const wanted = filter.value.toLowerCase();
  sections?.update((name) => name.toLowerCase().includes(wanted));
}

/** Changes a server of a group. Whether it is done. */
async function change(path, group, peer, changes) {
  const server = `api/9/${path}/${encodeURIComponent(group)}/servers/${peer.id}`;
  try {
    await ask(server, {
      method: "PATCH",
      headers: { "Content-Type": "application/json" },
      body: JSON.stringify(changes),
    });
  } catch (error) {
    say(`${peer.name} is not changed: ${error.message}`, true);
    return false;
  }
  await refresh();
  say(`${peer.name} of ${group} is changed.`);
  return true;
}

filter.addEventListener("input", showSections);
interval.addEventListener("change", () => { if (!isPaused) refresh(); });
pause.addEventListener("click", () => {
  isPaused = !isPaused;
  pause.setAttribute("aria-pressed", String(isPaused));
  clearTimeout(timer);
  say(isPaused ? "Paused." : "");
  if (!isPaused) refresh();
});
document.addEventListener("visibilitychange", () => {
  clearTimeout(timer);
  if (!document.hidden && !isPaused) refresh();
});
refresh();
