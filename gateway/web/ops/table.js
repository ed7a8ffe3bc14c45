// Tables, defined by their columns.

import { button, byId, make } from "/static/dom.js";

/**
 * Table in the element with that id. Each of `columns` has:
 * - `name`, optionally with `unit` and `note`
 * - `of(row, context)`: text of a cell, or the whole cell
 * - `title(row)`: tooltip of a cell
 * - `kind`: class of the cells; the heading of a number column has it, too
 * - `sort(row)`: sort key, if the table can be sorted by the column
 * `none` is the text of a table without rows.
 */
export class Table {
  constructor(id, columns, none) {
    this.none = none;
    this.head = make("thead");
    this.body = make("tbody");
    this.foot = make("tfoot");
    this.rows = [];
    this.sums = [];
    byId(id).append(this.head, this.body, this.foot);
    this.describe(columns);
  }

  /** Replace the columns and remove all rows. Rows keep the given order until the user sorts. */
  describe(columns) {
    this.columns = columns;
    this.sorted = null;
    this.head.replaceChildren(make("tr", {}, ...columns.map((column) => this.#headingOf(column))));
    this.body.replaceChildren();
    this.foot.replaceChildren();
  }

  /** Show rows, with `sums` below them, which sorting does not move. */
  show(rows, context, sums = []) {
    Object.assign(this, { rows, context, sums });
    const lines = this.#inOrder().map((row) => this.#lineOf(row));
    const empty = make("tr", {}, make("td", { class: "none", colSpan: this.columns.length }, this.none));
    this.body.replaceChildren(...(lines.length ? lines : [empty]));
    this.foot.replaceChildren(...sums.map((row) => this.#lineOf(row)));
  }

  #lineOf(row) {
    return make("tr", {}, ...this.columns.map((column) => cellOf(column, row, this.context)));
  }

  #inOrder() {
    if (!this.sorted) return this.rows;
    const { column, up } = this.sorted;
    const [low, high] = up ? [-1, 1] : [1, -1];
    const valued = this.rows.map((row) => [column.sort(row), row]);
    return valued.sort(([a], [b]) => (a === b ? 0 : a < b ? low : high)).map(([, row]) => row);
  }

  #headingOf(column) {
    const { name, unit, note, kind, sort } = column;
    const label = sort ? button(name, () => this.#sortBy(column), { class: "sort" }) : name;
    const heading = make("th", { scope: "col" }, label, unit && make("span", { class: "unit" }, unit));
    return labelled(heading, kind === "number" && kind, note);
  }

  /** Sort by a column, or reverse the order. Numbers start with the largest. */
  #sortBy(column) {
    const up = this.sorted?.column === column ? !this.sorted.up : column.kind !== "number";
    this.sorted = { column, up };
    [...this.head.firstChild.children].forEach((heading, i) => {
      if (this.columns[i] === column) heading.setAttribute("aria-sort", up ? "ascending" : "descending");
      else heading.removeAttribute("aria-sort");
    });
    this.show(this.rows, this.context, this.sums);
  }
}

function cellOf({ of, title, kind }, row, context) {
  const content = of(row, context);
  const cell = content instanceof HTMLTableCellElement ? content : make("td", {}, content);
  return labelled(cell, kind, title?.(row));
}

function labelled(element, kind, title) {
  if (kind) element.classList.add(kind);
  if (title) element.title = title;
  return element;
}

/** Return a column of numbers. */
export function number(name, of, more = {}) {
  return { name, of, kind: "number", ...more };
}

/** Return an element with the status of a request and its dot. */
export function statusMark(tag, text, status) {
  return make(tag, { class: "status", "data-status": status }, make("span", { class: "dot" }), text);
}

/** Return visible text with an alternative for screen readers. */
export function saidAs(said, text) {
  return [make("span", { "aria-hidden": "true" }, text), make("span", { class: "spoken" }, said)];
}
