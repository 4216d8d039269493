// What figures mean: rates, quantiles, and how numbers are written. Nothing here touches the page.

/** How long figures are looked back on for quantiles and shares, in milliseconds: half of it at least, all at most. */
const WINDOW_MS = 30000;

/** The figures of now and those of before, in one order of magnitude of memory: three answers at most. */
export class Figures {
  now = null;
  #before = null;
  #base = null;
  #nextBase = null;

  /** Takes an answer of the server. */
  take(answer) {
    const time = Date.parse(answer.nginx.timestamp);
    const next = { answer, time, pid: answer.nginx.pid };
    // A new worker process counts from nothing; a clock that was set back makes no rates.
    if (this.now && (this.now.pid !== next.pid || next.time < this.now.time)) {
      this.now = this.#before = this.#base = this.#nextBase = null;
    }
    this.#before = this.now;
    this.now = next;
    this.#nextBase ??= next;
    if (next.time - this.#nextBase.time >= WINDOW_MS / 2) {
      this.#base = this.#nextBase;
      this.#nextBase = next;
    }
    this.#base ??= this.#before;
  }

  /** Seconds since the answer before, 0 for none. */
  get seconds() {
    return this.#before ? (this.now.time - this.#before.time) / 1000 : 0;
  }

  /** How much a counter has grown per second since the answer before; null where nobody knows. */
  rate(find) {
    if (this.seconds <= 0) return null;
    const grown = difference(count(find, this.now), count(find, this.#before));
    return grown === null ? null : grown / this.seconds;
  }

  /** How much a counter has grown in the window. */
  recent(find) {
    return this.#base ? difference(count(find, this.now), count(find, this.#base)) : null;
  }

  /** A histogram of the window; of all since the start until there is a window. */
  times(find) {
    const now = found(find, this.now);
    const base = this.#base ? found(find, this.#base) : null;
    if (!now) return null;
    return base && base.count <= now.count ? subtract(now, base) : now;
  }
}

/** What a function finds in an answer, or undefined where something on its way is missing. */
function found(find, snapshot) {
  return snapshot ? find(snapshot.answer) : undefined;
}

function count(find, snapshot) {
  const value = found(find, snapshot);
  return typeof value === "number" ? value : null;
}

function difference(now, before) {
  if (now === null || before === null || now < before) return null;
  return now - before;
}

function subtract(now, base) {
  const buckets = {};
  for (const [bound, count] of Object.entries(now.buckets)) {
    buckets[bound] = count - (base.buckets[bound] ?? 0);
  }
  return { count: now.count - base.count, sum: now.sum - base.sum, buckets };
}

/** The histograms of several places as one; null for none. */
export function sumTimes(all) {
  const known = all.filter(Boolean);
  if (known.length === 0) return null;
  const sum = { count: 0, sum: 0, buckets: {} };
  for (const times of known) {
    sum.count += times.count;
    sum.sum += times.sum;
    for (const [bound, count] of Object.entries(times.buckets)) {
      sum.buckets[bound] = (sum.buckets[bound] ?? 0) + count;
    }
  }
  return sum;
}

/** Bounds in milliseconds and what is in each bucket by itself. Integers come in their order, "inf" last. */
export function buckets(times) {
  let below = 0;
  return Object.entries(times.buckets).map(([bound, count]) => {
    const own = Math.max(0, count - below);
    below = count;
    return { bound: bound === "inf" ? Infinity : Number(bound), count: own };
  });
}

/** The bound that so large a part of the times did not exceed, in milliseconds; null without times. */
export function quantile(times, part) {
  if (!times || times.count === 0) return null;
  const last = Object.entries(times.buckets).find(([, count]) => count >= times.count * part);
  return !last || last[0] === "inf" ? Infinity : Number(last[0]);
}

const NONE = "–";
const whole = new Intl.NumberFormat("en", { maximumFractionDigits: 0 });
const short = new Intl.NumberFormat("en", { maximumSignificantDigits: 3 });
const compact = new Intl.NumberFormat("en", { notation: "compact", maximumSignificantDigits: 3 });

/** A count: in full up to a million, then in short. */
export function number(value) {
  if (value === null || value === undefined) return NONE;
  return Math.abs(value) < 1e6 ? whole.format(value) : compact.format(value);
}

/** A number per second. */
export function rate(value) {
  if (value === null) return NONE;
  return value < 100 ? short.format(value) : number(value);
}

export function bytes(value) {
  if (value === null || value === undefined) return NONE;
  const units = ["B", "KiB", "MiB", "GiB", "TiB", "PiB"];
  let unit = 0;
  while (value >= 1024 && unit < units.length - 1) {
    value /= 1024;
    unit += 1;
  }
  return `${value < 100 ? short.format(value) : whole.format(value)} ${units[unit]}`;
}

/** Milliseconds. */
export function time(milliseconds) {
  if (milliseconds === null || milliseconds === undefined) return NONE;
  if (milliseconds === 0) return "0";
  if (milliseconds < 1) return `${short.format(milliseconds * 1000)} µs`;
  if (milliseconds < 1000) return `${short.format(milliseconds)} ms`;
  if (milliseconds < 120000) return `${short.format(milliseconds / 1000)} s`;
  if (milliseconds < 7200000) return `${short.format(milliseconds / 60000)} min`;
  if (milliseconds < 172800000) return `${short.format(milliseconds / 3600000)} h`;
  return `${short.format(milliseconds / 86400000)} d`;
}

/** A bound of a histogram, in milliseconds. */
export function bound(milliseconds) {
  if (milliseconds === null) return NONE;
  return milliseconds === Infinity ? "> 16.4 s" : `≤ ${time(milliseconds)}`;
}

/** A part of a whole. */
export function percent(part, all) {
  return part === null || !all ? NONE : `${short.format((100 * part) / all)} %`;
}
