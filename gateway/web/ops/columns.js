// What the tables of the analytics store have: each column with its type, its meaning and its unit.

import { ask, KeyNeededError } from "./ask.js";
import { Table } from "./table.js";
import { byId, make } from "/static/dom.js";

const table = new Table("columns", [
  { name: "Table", of: (row) => row.table, sort: (row) => row.table },
  { name: "Column", of: (row) => make("code", {}, row.column), sort: (row) => row.column },
  { name: "Type", of: (row) => row.type },
  { name: "What it is", of: (row) => row.comment },
], "No table or column is called or described so.");

let rows = [];

function show() {
  const words = byId("find").value.trim().toLowerCase().split(/\s+/);
  table.show(rows.filter((row) => words.every((word) => row.text.includes(word))));
}

try {
  const found = await ask("tables", {});
  rows = found.map((row) => ({ ...row, text: [row.table, row.column, row.comment].join(" ").toLowerCase() }));
  byId("said").textContent = "Times are UTC. Read the views that end in _once: they have each row of their table once.";
  byId("find").addEventListener("input", show);
  show();
} catch (error) {
  const isKey = error instanceof KeyNeededError;
  byId("said").replaceChildren(
    isKey ? "This needs an administrator's key: give it on the " : `The tables cannot be read now: ${error.message}`,
    ...(isKey ? [make("a", { href: "/ops/" }, "operations page"), ", and load this page again."] : []),
  );
}
