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

function showRun() {
  document.title = `Run ${data.name}`;
  at("name").textContent = `Run ${data.name}`;
  at("standing").textContent = data.standing;
  fillPairs(at("facts"), data.facts);
  at("made").textContent = `Made by earl report, ${data.made}. Times are those of the machine that made it.`;
  at("no-deployments").hidden = data.spans.length > 0;
  if (data.spans.length) {
    fillTable(at("spans"), [
      { title: "stage", cell: (row) => row.stage },
      { title: "iterations", cell: (row) => span(row.first, row.last) },
      { title: "stage deployment", cell: (row) => row.deployment },
      { title: "why", cell: (row) => row.why },
    ], data.spans);
  }
  fillList(at("infeasible"), data.infeasible);
  at("no-occupancy").hidden = data.occupancy.spans.length > 0;
  if (data.occupancy.waits.length) {
    fillTable(at("waits"), [
      { title: "who", cell: (row) => row.lane },
      { title: "waited for", cell: (row) => row.cause },
      { title: "seconds", number: true, cell: (row) => row.seconds },
      { title: "of the time, %", number: true, cell: (row) => row.share },
    ], data.occupancy.waits);
  }
  const trouble = data.failures.length + data.events.length + data.infeasible.length;
  at("no-failures").hidden = trouble > 0;
  if (data.failures.length) {
    fillTable(at("reasons"), [
      { title: "episodes", number: true, cell: (row) => row.count },
      { title: "reason", cell: (row) => row.reason },
      { title: "iterations", cell: (row) => spans(row.iterations) },
    ], data.failures);
  }
  fillList(at("events"), data.events);
  fillTable(at("sizes"), [
    { title: "what", cell: (row) => row[0] },
    { title: "value", cell: (row) => row[1] },
    { title: "from", cell: (row) => row[2] },
  ], data.sizes);
  at("settings").textContent = data.configuration;
  fillPairs(at("hardware"), data.hardware);
  fillPairs(at("versions"), data.versions);
  at("commands").replaceChildren(
    ...data.commands.flatMap(([what, command]) =>
      [make("dt", {}, what), make("dd", {}, make("code", {}, command))]));
}

function showContents() {
  const found = [...document.querySelectorAll("main section")];
  at("contents").replaceChildren(
    ...found.map((each) => make("a", { href: `#${each.id}` }, each.querySelector("h2").textContent)));
}
