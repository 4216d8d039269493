// Tables and lists whose rows keep their places and their focus while the numbers in them change.
//
// Names come from a configuration, which others may have written: everything is put in as text, never as markup.

/** Most rows of a table: a page of thousands would be slow and hard to read. The filter finds the others. */
const ROWS_MAX = 200;

/** An element with attributes and children; strings become text. */
export function element(name, attributes = {}, ...children) {
  const made = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) {
    if (value !== null) made.setAttribute(key, value);
  }
  made.append(...children);
  return made;
}

/** Sets a text only if it changes: what is selected or read aloud stays. */
export function setText(node, text) {
  if (node.textContent !== text) node.textContent = text;
}

/** Keeps one thing for each key, in the order of the keys: makes, updates and takes away. */
export class Keyed {
  #parts = new Map();

  /** `make(key)` gives `{ node, update(item) }`. */
  constructor(parent, make) {
    this.parent = parent;
    this.make = make;
  }

  update(items) {
    const gone = new Set(this.#parts.keys());
    let before = null;
    for (const [key, item] of items) {
      let part = this.#parts.get(key);
      if (!part) {
        part = this.make(key);
        this.#parts.set(key, part);
      }
      gone.delete(key);
      const next = before ? before.nextSibling : this.parent.firstChild;
      // What stands where it should is not moved, so that it keeps the focus.
      if (next !== part.node) this.parent.insertBefore(part.node, next);
      before = part.node;
      part.update(item);
    }
    for (const key of gone) {
      this.#parts.get(key).node.remove();
      this.#parts.delete(key);
    }
  }
}

/**
 * A table. A column has a `title`, and either `text(row)`, which gives a string or `{ text, class }`, or `make(cell)`,
 * which fills a cell and gives a function that updates it. The first column names the row.
 */
export class Table {
  constructor(caption, columns, className = "card") {
    this.columns = columns;
    this.body = element("tbody");
    this.note = element("p", { class: "note", hidden: "" });
    const title = (column) => element("th", { scope: "col", class: column.class ?? null }, column.title);
    const head = element("tr", {}, ...columns.map(title));
    const table = element("table", {}, element("caption", {}, caption), element("thead", {}, head), this.body);
    // What scrolls can be reached and scrolled by keyboard.
    const scroll = element("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": caption }, table);
    this.node = element("div", { class: className }, scroll, this.note);
    this.rows = new Keyed(this.body, () => this.#row());
  }

  #row() {
    const updates = [];
    const cells = this.columns.map((column, index) => {
      const isFirst = index === 0;
      const cell = element(isFirst ? "th" : "td", { scope: isFirst ? "row" : null, class: column.class ?? null });
      updates.push(column.make ? column.make(cell) : textUpdate(cell, column));
      return cell;
    });
    return { node: element("tr", {}, ...cells), update: (row) => updates.forEach((update) => update(row)) };
  }

  /** Shows these rows, `[key, row]` each. */
  update(rows) {
    this.rows.update(rows.slice(0, ROWS_MAX));
    const isCut = rows.length > ROWS_MAX;
    this.note.hidden = !isCut;
    setText(this.note, isCut ? `${ROWS_MAX} of ${rows.length} are shown. The filter above finds the others.` : "");
  }
}

function textUpdate(cell, column) {
  const inner = element("span");
  cell.append(inner);
  return (row) => {
    const value = column.text(row);
    const { text, class: className = "" } = typeof value === "string" ? { text: value } : value;
    setText(inner, text);
    if (inner.className !== className) inner.className = className;
  };
}
