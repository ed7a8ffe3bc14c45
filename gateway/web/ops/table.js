// Tables that are described by their columns.

import { byId, make } from "/static/dom.js";

/**
 * Fills the table of that id. Each of `columns` has a `name`, perhaps with its `unit` and a `note`;
 * `of(row, context)`, what stands in its cells, or a whole cell; `title(row)`, what these say when
 * pointed at; and their class, `kind`: that of numbers is also the heading's. `none` is said of no rows.
 */
export class Table {
  constructor(id, columns, none) {
    this.columns = columns;
    this.none = none;
    this.body = make("tbody");
    byId(id).append(make("thead", {}, make("tr", {}, ...columns.map(headingOf))), this.body);
  }

  show(rows, context) {
    const lines = rows.map((row) => make("tr", {}, ...this.columns.map((column) => cellOf(column, row, context))));
    const empty = make("tr", {}, make("td", { class: "none", colSpan: this.columns.length }, this.none));
    this.body.replaceChildren(...(lines.length ? lines : [empty]));
  }
}

function headingOf({ name, unit, note, kind }) {
  const heading = make("th", { scope: "col" }, name, unit && make("span", { class: "unit" }, unit));
  return labelled(heading, kind === "number" && kind, note);
}

function cellOf({ of, title, kind }, row, context) {
  const content = of(row, context);
  const cell = content instanceof HTMLTableCellElement ? content : make("td", {}, content);
  return labelled(cell, kind, title?.(row));
}

function labelled(element, kind, title) {
  if (kind) element.className = kind;
  if (title) element.title = title;
  return element;
}

/** A column of numbers. */
export function number(name, of, more = {}) {
  return { name, of, kind: "number", ...more };
}

/** How a request ended, with its dot, in an element of that name. */
export function statusMark(tag, text, status) {
  return make(tag, { class: "status", "data-status": status }, make("span", { class: "dot" }), text);
}
