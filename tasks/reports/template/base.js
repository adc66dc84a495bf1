// What is said is inserted as text everywhere, never as HTML.
const at = (id) => document.getElementById(id);
const data = JSON.parse(at("data").textContent);

/** An element with properties or attributes, and children (strings become text). */
function make(tag, properties = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (name in element) element[name] = value;
    else element.setAttribute(name, value);
  }
  element.append(...children.map((child) => (typeof child === "number" ? String(child) : child)));
  return element;
}

/** Fill a table. columns: {title, number, cell: row => text or element}. */
function fillTable(table, columns, rows) {
  const align = (column) => (column.number ? "number" : "");
  const head = columns.map((c) => make("th", { scope: "col", className: align(c) }, c.title));
  const body = rows.map((row) =>
    make("tr", {}, ...columns.map((c) => make("td", { className: align(c), "data-title": c.title }, c.cell(row)))));
  table.replaceChildren(make("thead", {}, make("tr", {}, ...head)), make("tbody", {}, ...body));
}

function fillPairs(list, pairs) {
  list.replaceChildren(
    ...pairs.map(([label, value]) => make("div", {}, make("dt", {}, label), make("dd", {}, value))));
}

const fillList = (list, lines) => list.replaceChildren(...lines.map((line) => make("li", {}, line)));

/** Compressed JSON in an element. */
async function decode(id) {
  const text = atob(at(id).textContent);
  const bytes = Uint8Array.from(text, (letter) => letter.charCodeAt(0));
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
  return JSON.parse(await new Response(stream).text());
}

const span = (first, last) => (first === last ? String(first) : `${first} to ${last}`);

/** Numbers as spans, such as "0 to 3, 7". */
function spans(numbers) {
  const found = [];
  for (const number of numbers) {
    const last = found[found.length - 1];
    if (last && last[1] === number - 1) last[1] = number;
    else found.push([number, number]);
  }
  return found.map(([first, last]) => span(first, last)).join(", ");
}

function showContents() {
  const found = [...document.querySelectorAll("main section")].filter((each) => !each.hidden);
  at("contents").replaceChildren(
    ...found.map((each) => make("a", { href: `#${each.id}` }, each.querySelector("h2").textContent)));
}
