// Lines over time and bars of a histogram, as SVG. What they show is in their captions and legends, too, as numbers.

import { element, setText } from "./table.js";

/** So many points are kept. */
const POINTS_MAX = 120;
const WIDTH = 600;
const HEIGHT = 120;

function svgElement(name, attributes) {
  const made = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  return made;
}

function drawing(label) {
  const svg = svgElement("svg", {
    viewBox: `0 0 ${WIDTH} ${HEIGHT}`,
    preserveAspectRatio: "none",
    role: "img",
    "aria-label": label,
  });
  for (const y of [1, HEIGHT / 2, HEIGHT - 1]) svg.append(svgElement("path", { class: "grid", d: `M0 ${y}H${WIDTH}` }));
  return svg;
}

/** Lines over time. A line has a `name`, a `class` for its colour, and may be `dashed`. */
export class LineChart {
  #points = [];

  constructor(title, lines, format) {
    this.format = format;
    this.top = element("span");
    this.from = element("span");
    const svg = drawing(`${title} over time`);
    this.lines = lines.map((line) => {
      const path = svgElement("path", { class: `${line.class}${line.dashed ? " dashed" : ""}`, d: "" });
      svg.append(path);
      const value = element("span");
      return { path, value, item: element("li", { class: line.class }, value), name: line.name };
    });
    this.node = element(
      "figure",
      { class: "chart" },
      element("figcaption", {}, title),
      element("div", { class: "scale", "aria-hidden": "true" }, this.top),
      svg,
      element("div", { class: "scale", "aria-hidden": "true" }, this.from, element("span", {}, "now")),
      element("ul", {}, ...this.lines.map((line) => line.item)),
    );
  }

  /** Adds what is so at this time (milliseconds): a value for each line, null for none. */
  add(time, values) {
    this.#points.push({ time, values });
    if (this.#points.length > POINTS_MAX) this.#points.shift();
    const first = this.#points[0].time;
    const span = Math.max(1, time - first);
    const finite = this.#points.flatMap((point) => point.values).filter((value) => value !== null && value < Infinity);
    const top = Math.max(0, ...finite) || 1;
    this.lines.forEach((line, index) => {
      let path = "";
      let isDrawing = false;
      for (const point of this.#points) {
        const value = point.values[index];
        if (value === null) {
          isDrawing = false;
          continue;
        }
        const x = ((point.time - first) / span) * WIDTH;
        const y = HEIGHT - 2 - (Math.min(value, top) / top) * (HEIGHT - 4);
        path += `${isDrawing ? "L" : "M"}${x.toFixed(1)} ${y.toFixed(1)}`;
        isDrawing = true;
      }
      line.path.setAttribute("d", path);
      setText(line.value, `${line.name} ${this.format(values[index])}`);
    });
    setText(this.top, this.format(top));
    setText(this.from, span > 1 ? `${Math.round(span / 1000)} s ago` : "");
  }
}

/** Bars of one or two histograms side by side. */
export class BarChart {
  constructor(title, series, nameOf) {
    this.series = series;
    this.nameOf = nameOf;
    this.title = title;
    this.svg = drawing(title);
    this.bars = [];
    this.from = element("span");
    this.to = element("span");
    this.items = series.map((one) => element("li", { class: one.class }, element("span")));
    this.node = element(
      "figure",
      { class: "chart" },
      element("figcaption", {}, title),
      this.svg,
      element("div", { class: "scale", "aria-hidden": "true" }, this.from, this.to),
      element("ul", {}, ...this.items),
    );
  }

  /** Shows, for each series, its bars (`{ bound, count }`) and a text for the legend. */
  update(all) {
    const [first] = all;
    const slots = first.bars.length;
    const top = Math.max(1, ...all.flatMap((one) => one.bars.map((bar) => bar.count)));
    const slot = WIDTH / Math.max(1, slots);
    const width = (slot * 0.8) / all.length;
    all.forEach((one, series) => {
      setText(this.items[series].firstChild, one.text);
      one.bars.forEach((bar, index) => {
        const number = index * all.length + series;
        this.bars[number] ??= this.svg.appendChild(
          svgElement("rect", { class: this.series[series].class, width: width.toFixed(1) }),
        );
        const height = bar.count === 0 ? 0 : Math.max(2, (bar.count / top) * (HEIGHT - 4));
        const rect = this.bars[number];
        rect.setAttribute("x", (index * slot + slot * 0.1 + series * width).toFixed(1));
        rect.setAttribute("y", (HEIGHT - 1 - height).toFixed(1));
        rect.setAttribute("height", height.toFixed(1));
      });
    });
    setText(this.from, this.nameOf(first.bars[0].bound));
    setText(this.to, this.nameOf(first.bars[slots - 1].bound));
  }
}
