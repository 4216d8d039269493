// What is shown below the overview: a table for each kind of thing that there is.

import { bound, bytes, number, percent, quantile, rate, time } from "./figures.js";
import { Keyed, Table, element, setText } from "./table.js";

/** Uses of a cache that were answered from it. */
const HITS = ["hit", "stale", "updating", "revalidated"];
/** All uses, in the order of nginx's documentation. */
const USES = ["hit", "stale", "updating", "revalidated", "miss", "expired", "bypass"];

/**
 * A section for each kind. `figures` are what is known, `matches(name)` says whether a name passes the filter, `change`
 * changes a server of a group and may be null.
 */
export class Sections {
  #parts;

  constructor(parent, figures, change) {
    const zone = (path, title, help) => zoneSection(figures, path, title, help);
    this.#parts = [
      zone("http/server_zones", "Servers", "No zones: add status_zone NAME; to a server block."),
      zone("http/location_zones", "Locations"),
      groupSection(figures, "http/upstreams", "Upstream groups", change),
      cacheSection(figures),
      verdictSection(figures, "http/limit_reqs", "Request limits"),
      verdictSection(figures, "http/limit_conns", "Connection limits"),
      streamZoneSection(figures),
      groupSection(figures, "stream/upstreams", "Stream upstream groups", change),
      verdictSection(figures, "stream/limit_conns", "Stream connection limits"),
      loopSection(figures),
      stallSection(figures),
      workerSection(figures),
      listenerSection(figures),
      poolSection(figures),
      deviceSection(figures),
      fileSection(figures),
      resolverSection(figures),
    ];
    parent.append(...this.#parts.map((part) => part.node));
  }

  update(matches) {
    this.#parts.forEach((part) => part.update(matches));
  }
}

/** A section with a heading, which is hidden while there is nothing of its kind. */
function section(title, content, update, help) {
  const heading = element("h2", {}, title);
  const note = element("p", { class: "note", hidden: "" }, help ?? "");
  const node = element("section", {}, heading, note, content);
  return {
    node,
    update(matches) {
      const length = update(matches);
      content.hidden = length === 0;
      note.hidden = length > 0;
      node.hidden = length === 0 && !help;
    },
  };
}

/** A section that is one table of what an answer has at a path, by name. */
function tableSection(figures, path, title, columns, help) {
  const table = new Table(title, columns, "card has-title");
  const rows = (matches) => {
    const all = Object.keys(figures.now.answer[path] ?? {});
    const shown = all.filter(matches);
    table.update(shown.map((name) => [name, { name, find: (answer) => answer[path]?.[name] }]));
    return all.length;
  };
  return section(title, table.node, rows, help);
}

/** The columns of a table of rows with `name` and `find(answer)`, where the thing itself is. */
function columns(figures) {
  const now = (row) => row.find(figures.now.answer) ?? {};
  return {
    now,
    name: { title: "name", class: "text", text: (row) => row.name },
    count: (title, of) => ({ title, text: (row) => number(of(now(row))) }),
    perSecond: (title, of) => ({
      title,
      text: (row) => rate(figures.rate((answer) => counted(row.find(answer), of))),
    }),
    bytesPerSecond: (title, of) => ({
      title,
      text: (row) => bytes(figures.rate((answer) => counted(row.find(answer), of))),
    }),
    /** A counter that is good at 0: coloured while it grows. */
    trouble: (title, className, of) => ({
      title,
      text: (row) => {
        const grown = figures.recent((answer) => counted(row.find(answer), of));
        return { text: number(of(now(row))), class: grown > 0 ? className : "" };
      },
    }),
    quantile: (title, part, of) => ({
      title,
      text: (row) => bound(quantile(figures.times((answer) => counted(row.find(answer), of)), part)),
    }),
  };
}

function counted(thing, of) {
  return thing === undefined ? undefined : of(thing);
}

function zoneSection(figures, path, title, help) {
  const of = columns(figures);
  return tableSection(figures, path, title, [
    of.name,
    of.perSecond("requests/s", (zone) => zone.requests),
    of.count("requests", (zone) => zone.requests),
    ...(path === "http/server_zones" ? [of.count("in progress", (zone) => zone.processing)] : []),
    of.count("2xx", (zone) => zone.responses["2xx"]),
    of.count("3xx", (zone) => zone.responses["3xx"]),
    of.trouble("4xx", "warn", (zone) => zone.responses["4xx"]),
    of.trouble("5xx", "bad", (zone) => zone.responses["5xx"]),
    of.count("discarded", (zone) => zone.discarded),
    of.bytesPerSecond("received/s", (zone) => zone.received),
    of.bytesPerSecond("sent/s", (zone) => zone.sent),
    of.quantile("first byte p50", 0.5, (zone) => zone.first_byte_times),
    of.quantile("p99", 0.99, (zone) => zone.first_byte_times),
    of.quantile("total p50", 0.5, (zone) => zone.response_times),
    of.quantile("p99", 0.99, (zone) => zone.response_times),
  ], help);
}

function streamZoneSection(figures) {
  const of = columns(figures);
  return tableSection(figures, "stream/server_zones", "Stream servers", [
    of.name,
    of.perSecond("connections/s", (zone) => zone.connections),
    of.count("connections", (zone) => zone.connections),
    of.count("in progress", (zone) => zone.processing),
    of.count("2xx", (zone) => zone.sessions["2xx"]),
    of.trouble("4xx", "warn", (zone) => zone.sessions["4xx"]),
    of.trouble("5xx", "bad", (zone) => zone.sessions["5xx"]),
    of.bytesPerSecond("received/s", (zone) => zone.received),
    of.bytesPerSecond("sent/s", (zone) => zone.sent),
    of.quantile("total p50", 0.5, (zone) => zone.session_times),
    of.quantile("p99", 0.99, (zone) => zone.session_times),
  ]);
}

const STATE_CLASSES = {
  up: "good",
  draining: "info",
  checking: "info",
  down: "quiet",
  unavail: "bad",
  unhealthy: "bad",
};

/** A table of peers for each group. */
function groupSection(figures, path, title, change) {
  const list = element("div");
  const groups = new Keyed(list, (name) => group(figures, path, name, change));
  const update = (matches) => {
    const all = Object.entries(figures.now.answer[path] ?? {});
    const shown = all.filter(([name, one]) => matches(name) || one.peers.some((peer) => matches(peer.name)));
    groups.update(shown.slice(0, GROUPS_MAX).map(([name, one]) => [name, { one, matches }]));
    return all.length;
  };
  return section(title, list, update);
}

/** Most groups that are shown; the filter finds the others. */
const GROUPS_MAX = 100;

function group(figures, path, name, change) {
  const isStream = path.startsWith("stream");
  const meta = element("p", { class: "meta" });
  const table = new Table(`Servers of ${name}`, peerColumns(figures, isStream, path, name, change), "");
  const node = element("div", { class: "card has-title" }, element("h3", {}, name), meta, table.node);
  const update = ({ one, matches }) => {
    const up = one.peers.filter((peer) => peer.state === "up").length;
    const texts = [`${up} of ${one.peers.length} servers up`];
    if (one.keepalive !== undefined) texts.push(`${number(one.keepalive)} idle connections`);
    if (one.queue) {
      const { size, max_size: most, overflows } = one.queue;
      texts.push(`${number(size)} of ${number(most)} places of the queue taken, ${number(overflows)} turned away`);
    }
    setText(meta, texts.join(" · "));
    const isShown = matches(name) ? () => true : (peer) => matches(peer.name);
    const rows = one.peers.map((peer, index) => [peer, index]).filter(([peer]) => isShown(peer));
    // A server may be there twice under one name: its place tells which.
    table.update(rows.map(([peer, index]) => {
      const key = `${peer.id ?? index} ${peer.server}`;
      const isThis = (other) => other.server === peer.server && other.id === peer.id;
      const at = (answer) => {
        const peers = answer[path]?.[name]?.peers;
        return peers && isSame(peers[index], isThis) ? peers[index] : peers?.find(isThis);
      };
      return [key, { peer, name: peer.name === peer.server ? peer.name : `${peer.name} (${peer.server})`, find: at }];
    }));
  };
  return { node, update };
}

function isSame(peer, isThis) {
  return peer !== undefined && isThis(peer);
}

function peerColumns(figures, isStream, path, group, change) {
  const of = columns(figures);
  const begun = isStream ? (peer) => peer.connections : (peer) => peer.requests;
  const what = isStream ? "connections" : "requests";
  const answers = [
    of.trouble("4xx", "warn", (peer) => peer.responses["4xx"]),
    of.trouble("5xx", "bad", (peer) => peer.responses["5xx"]),
  ];
  return [
    { title: "server", class: "text", text: (row) => (row.peer.backup ? `${row.name}, backup` : row.name) },
    {
      title: "state",
      class: "text",
      text: ({ peer }) => ({ text: peer.state, class: `state ${STATE_CLASSES[peer.state] ?? "quiet"}` }),
    },
    ...(change ? [{ title: "change", class: "text", make: (cell) => controls(cell, path, group, change) }] : []),
    of.count("weight", (peer) => peer.weight),
    of.count("active", (peer) => peer.active),
    of.perSecond(`${what}/s`, begun),
    of.count(what, begun),
    ...(isStream ? [] : answers),
    of.trouble("fails", "bad", (peer) => peer.fails),
    of.count("unavailable", (peer) => peer.unavail),
    { title: "down for", text: ({ peer }) => time(peer.downtime) },
    of.trouble("failed checks", "bad", (peer) => peer.health_checks.fails),
    of.quantile("first byte p50", 0.5, (peer) => peer.first_byte_times),
    of.quantile("p99", 0.99, (peer) => peer.first_byte_times),
    of.quantile("total p50", 0.5, (peer) => peer.response_times),
    of.quantile("p99", 0.99, (peer) => peer.response_times),
  ];
}

/** Drains a server, brings it back, gives it another weight. */
function controls(cell, path, group, change) {
  let current = null;
  const standing = element("button", { type: "button" });
  const weight = element("input", { type: "number", min: "1", max: "65535", step: "1" });
  const set = element("button", { type: "button" }, "Set weight");
  const send = async (changes, done) => {
    if (await change(path, group, current, changes)) done?.();
  };
  let isDirty = false;
  const setWeight = () => send({ weight: weight.valueAsNumber }, () => { isDirty = false; });
  standing.addEventListener("click", () => {
    const { state } = current;
    send(state === "draining" ? { drain: false } : state === "down" ? { down: false } : { drain: true });
  });
  weight.addEventListener("input", () => { isDirty = true; });
  weight.addEventListener("keydown", (event) => { if (event.key === "Enter" && weight.checkValidity()) setWeight(); });
  set.addEventListener("click", () => { if (weight.reportValidity()) setWeight(); });
  cell.append(element("span", { class: "edit" }, standing, weight, set));
  return ({ peer, name }) => {
    current = peer;
    const word = peer.state === "draining" ? "Undrain" : peer.state === "down" ? "Bring up" : "Drain";
    setText(standing, word);
    standing.setAttribute("aria-label", `${word} ${name}`);
    weight.setAttribute("aria-label", `Weight of ${name}`);
    set.setAttribute("aria-label", `Set weight of ${name}`);
    if (!isDirty) weight.value = peer.weight;
    const canChange = peer.id !== undefined;
    standing.disabled = weight.disabled = set.disabled = !canChange;
  };
}

function cacheSection(figures) {
  const of = columns(figures);
  const sum = (cache, names, field) => names.reduce((all, name) => all + (cache[name]?.[field] ?? 0), 0);
  return tableSection(figures, "http/caches", "Caches", [
    of.name,
    { title: "state", class: "text", text: (row) => (of.now(row).cold ? { text: "cold", class: "info" } : "warm") },
    { title: "size", make: sizeCell(of) },
    {
      title: "from the cache",
      text: (row) => {
        const of = (names) => (answer) => counted(row.find(answer), (cache) => sum(cache, names, "responses"));
        const recent = (names) => figures.recent(of(names));
        const [hits, uses] = [recent(HITS), recent(USES)];
        const cache = row.find(figures.now.answer);
        // While nothing is asked for: what was so since the start.
        return uses ? percent(hits, uses) : percent(sum(cache, HITS, "responses"), sum(cache, USES, "responses"));
      },
    },
    of.perSecond("answers/s", (cache) => sum(cache, USES, "responses")),
    of.bytesPerSecond("saved/s", (cache) => sum(cache, HITS, "bytes")),
    ...USES.map((name) => of.count(name, (cache) => cache[name]?.responses ?? 0)),
    of.bytesPerSecond("written/s", (cache) => sum(cache, USES, "bytes_written")),
  ]);
}

function sizeCell(of) {
  return (cell) => {
    const meter = element("meter", { min: "0", "aria-hidden": "true" });
    const text = element("span");
    cell.append(meter, " ", text);
    return (row) => {
      const { size, max_size: most } = of.now(row);
      meter.hidden = most === undefined;
      if (most !== undefined) {
        meter.max = most;
        meter.value = size;
      }
      setText(text, most === undefined ? bytes(size) : `${bytes(size)} of ${bytes(most)}`);
    };
  };
}

function verdictSection(figures, path, title) {
  const of = columns(figures);
  const isRate = path.endsWith("reqs");
  return tableSection(figures, path, title, [
    of.name,
    of.perSecond("passed/s", (limit) => limit.passed),
    of.count("passed", (limit) => limit.passed),
    ...(isRate ? [of.trouble("delayed", "warn", (limit) => limit.delayed)] : []),
    of.trouble("rejected", "bad", (limit) => limit.rejected),
    ...(isRate ? [of.count("delayed (dry run)", (limit) => limit.delayed_dry_run)] : []),
    of.count("rejected (dry run)", (limit) => limit.rejected_dry_run),
  ]);
}

/** A section of a list whose members have a number or a name in `field`, or are told apart by what `field` makes of them. */
function listSection(figures, path, field, title, columns, nameOf = String) {
  const table = new Table(title, columns, "card has-title");
  const keyOf = typeof field === "function" ? field : (one) => one[field];
  const update = (matches) => {
    const all = figures.now.answer[path] ?? [];
    const isShown = (one) => typeof keyOf(one) !== "string" || matches(keyOf(one));
    table.update(all.filter(isShown).map((one) => {
      const key = keyOf(one);
      const find = (answer) => answer[path]?.find((other) => keyOf(other) === key);
      return [String(key), { name: nameOf(key), find }];
    }));
    return all.length;
  };
  return section(title, table.node, update);
}

/** Loops, with what has held them up. */
function loopSection(figures) {
  const of = columns(figures);
  const kinds = Object.keys(figures.now.answer["gale/loops"]?.[0]?.stalls_by_kind ?? {});
  const micros = (title, value) => ({ title, text: (row) => time(value(of.now(row)) / 1000) });
  return listSection(figures, "gale/loops", "worker", "Event loops", [
    { ...of.name, title: "loop" },
    of.perSecond("turns/s", (loop) => loop.turns),
    {
      title: "busy",
      text: (row) => percent(figures.rate((answer) => counted(row.find(answer), (loop) => loop.busy)), 1000),
    },
    micros("turn p50", (loop) => loop.turn_times.p50),
    micros("p99", (loop) => loop.turn_times.p99),
    micros("p99.9", (loop) => loop.turn_times.p999),
    micros("longest", (loop) => loop.longest),
    of.trouble("stalls", "bad", (loop) => loop.stalls),
    ...kinds.map((kind) => ({
      title: kind,
      text: (row) => {
        const stalls = of.now(row).stalls_by_kind?.[kind];
        return stalls?.count ? `${number(stalls.count)} (${time(stalls.time)})` : "0";
      },
    })),
  ]);
}

/** What has held loops up lately, and at which task. */
function stallSection(figures) {
  const of = columns(figures);
  return listSection(figures, "gale/stalls", (stall) => `${stall.began} loop ${stall.worker}`, "Last stalls", [
    { title: "began", class: "text", text: (row) => new Date(of.now(row).began).toLocaleString() },
    of.count("loop", (stall) => stall.worker),
    { title: "kind", class: "text", text: (row) => of.now(row).kind },
    { title: "time", text: (row) => time(of.now(row).time) },
    { title: "ongoing", class: "text", text: (row) => (of.now(row).is_over ? "no" : { text: "yes", class: "bad" }) },
    { title: "task", class: "text", text: (row) => of.now(row).task },
  ]);
}

/** Connections that wait to be accepted. */
function listenerSection(figures) {
  const of = columns(figures);
  const name = (listener) => (listener.worker === undefined ? "" : ` (loop ${listener.worker})`);
  return listSection(figures, "gale/listeners", (listener) => listener.address + name(listener), "Accept queues", [
    { ...of.name, title: "address" },
    {
      title: "waiting",
      text: (row) => {
        const { waiting, waiting_max: most } = of.now(row);
        return { text: `${number(waiting)} of ${number(most)}`, class: waiting > most ? "bad" : "" };
      },
    },
  ]);
}

function workerSection(figures) {
  const of = columns(figures);
  return listSection(figures, "workers", "id", "Connections by loop", [
    { ...of.name, title: "loop" },
    of.perSecond("accepted/s", (worker) => worker.connections.accepted),
    of.count("accepted", (worker) => worker.connections.accepted),
    of.count("active", (worker) => worker.connections.active),
    of.count("idle", (worker) => worker.connections.idle),
    of.perSecond("requests/s", (worker) => worker.http.requests.total),
    of.count("requests", (worker) => worker.http.requests.total),
    of.count("in progress", (worker) => worker.http.requests.current),
  ]);
}

const CONDITION_CLASSES = { healthy: "good", busy: "warn", "not answering": "bad" };

/** Devices that files lie on. */
function deviceSection(figures) {
  const of = columns(figures);
  const known = (row) => of.now(row);
  return listSection(figures, "gale/devices", "device", "Disks", [
    { title: "device", class: "text", text: (row) => `${known(row).name ?? "device"} (${row.name})` },
    { title: "mounted on", class: "text", text: (row) => known(row).mounted_on ?? "–" },
    {
      title: "condition",
      class: "text",
      text: (row) => ({ text: known(row).condition, class: CONDITION_CLASSES[known(row).condition] }),
    },
    of.count("reads in flight", (device) => device.reads.in_flight),
    of.perSecond("reads/s", (device) => device.reads.total),
    {
      title: "mean read",
      text: (row) => {
        const recent = (find) => figures.recent((answer) => counted(row.find(answer), find));
        const [reads, wait] = [recent((device) => device.reads.total), recent((device) => device.reads.time)];
        return reads > 0 ? time(wait / reads) : "–";
      },
    },
    of.count("tasks running", (device) => device.tasks.running),
    of.count("waiting", (device) => device.tasks.waiting),
  ]);
}

/** Thread pools: where requests wait for disks. */
function poolSection(figures) {
  const of = columns(figures);
  const micros = (title, value) => ({ title, text: (row) => time(value(of.now(row)) / 1000) });
  return listSection(figures, "gale/pools", "name", "Thread pools", [
    of.name,
    { title: "threads", text: (row) => `${number(of.now(row).threads)} of ${number(of.now(row).threads_max)}` },
    of.count("running", (pool) => pool.running),
    { title: "waiting", text: (row) => `${number(of.now(row).waiting)} of ${number(of.now(row).queue_max)}` },
    of.perSecond("done/s", (pool) => pool.completed),
    of.count("done", (pool) => pool.completed),
    of.count("cancelled", (pool) => pool.cancelled),
    of.trouble("refused", "bad", (pool) => pool.refused),
    of.trouble("panicked", "bad", (pool) => pool.panicked),
    micros("wait p50", (pool) => pool.wait_times.p50),
    micros("p99", (pool) => pool.wait_times.p99),
    micros("run p50", (pool) => pool.run_times.p50),
    micros("p99", (pool) => pool.run_times.p99),
  ]);
}

/** How pieces of files got to clients. */
function fileSection(figures) {
  const of = columns(figures);
  const table = new Table("Files by delivery method", [
    { ...of.name, title: "way" },
    of.perSecond("pieces/s", (rung) => rung.pieces),
    of.count("pieces", (rung) => rung.pieces),
    of.bytesPerSecond("bytes/s", (rung) => rung.bytes),
    { title: "bytes", text: (row) => bytes(of.now(row).bytes) },
  ], "card has-title");
  const update = () => {
    const rungs = Object.entries(figures.now.answer["gale/files"]?.rungs ?? {}).filter(([, rung]) => rung.pieces > 0);
    const find = (name) => (answer) => answer["gale/files"]?.rungs[name];
    table.update(rungs.map(([name]) => [name, { name, find: find(name) }]));
    return rungs.length;
  };
  return section("Files by delivery method", table.node, update);
}

function resolverSection(figures) {
  const of = columns(figures);
  return tableSection(figures, "resolvers", "Name servers", [
    of.name,
    of.count("names", (zone) => zone.requests.name),
    of.count("services", (zone) => zone.requests.srv),
    of.count("addresses", (zone) => zone.requests.addr),
    of.count("answered", (zone) => zone.responses.noerror),
    of.count("name not found", (zone) => zone.responses.nxdomain),
    of.trouble("failed", "bad", (zone) => zone.responses.servfail + zone.responses.refused + zone.responses.notimp),
    of.trouble("timed out", "bad", (zone) => zone.responses.timedout),
  ]);
}
