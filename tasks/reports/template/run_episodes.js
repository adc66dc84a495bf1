const ROWS = 25;
const COLUMNS = [
  ["iteration", "iteration"], ["episode", "episode"], ["environment", "environment"],
  ["outcome", "outcome"], ["finish", "ended by"], ["reward", "reward"], ["turns", "turns"], ["tokens", "tokens"],
];
const TEXTUAL = ["environment", "outcome", "finish"];
const RANGES = [["iteration", "iteration"], ["reward", "reward"], ["turns", "turns"], ["tokens", "length, tokens"]];
const view = { index: {}, found: [], sort: "iteration", down: false, page: 0, open: -1 };

const row = (number) =>
  Object.fromEntries(Object.entries(view.index).map(([name, column]) => [name, column[number]]));

function field(label, ...inputs) {
  return inputs.length > 1
    ? make("fieldset", {}, make("legend", {}, label), ...inputs)
    : make("label", {}, make("span", {}, label), inputs[0]);
}

function buildFilters() {
  const form = at("filters");
  const choices = TEXTUAL.map((name) => [name, [...new Set(view.index[name])].sort()])
    .filter(([name, values]) => values.length > 1 || (name === "outcome" && values[0]));
  for (const [name, values] of choices) {
    const options = values.map((value) => make("option", { value: `=${value}` }, value || "(none)"));
    const label = COLUMNS.find(([key]) => key === name)[1];
    form.append(field(label, make("select", { name }, make("option", { value: "" }, "any"), ...options)));
  }
  for (const [name, label] of RANGES) {
    const bound = (end) => make("input", {
      type: "number", step: "any", name: `${name}-${end}`, placeholder: end, "aria-label": `${label}, ${end}`,
    });
    form.append(field(label, bound("from"), " ", bound("to")));
  }
  form.append(make("button", { type: "reset" }, "Clear"));
  form.addEventListener("input", filter);
  form.addEventListener("reset", () => setTimeout(filter));
  form.addEventListener("submit", (event) => event.preventDefault());
}

/** The tests that the form asks for. */
function wanted() {
  const given = new FormData(at("filters"));
  const tests = [];
  for (const name of TEXTUAL) {
    const value = given.get(name);
    if (value) tests.push((number) => view.index[name][number] === value.slice(1));
  }
  for (const [name] of RANGES) {
    for (const [end, holds] of [["from", (a, b) => a >= b], ["to", (a, b) => a <= b]]) {
      const value = given.get(`${name}-${end}`);
      const column = view.index[name];
      if (value) tests.push((number) => column[number] !== null && holds(column[number], Number(value)));
    }
  }
  return tests;
}

function filter() {
  const tests = wanted();
  view.found = view.index.part.map((_, number) => number).filter((number) => tests.every((test) => test(number)));
  sort();
}

function sort() {
  const column = view.index[view.sort];
  const sign = view.down ? -1 : 1;
  const order = (one, other) => (one === other ? 0 : one === null || one < other ? -1 : 1);
  view.found.sort((one, other) => sign * order(column[one], column[other]) || one - other);
  view.page = 0;
  showRows();
}

function sortBy(name) {
  view.down = view.sort === name ? !view.down : false;
  view.sort = name;
  sort();
}

function heading(name, title) {
  const direction = view.sort === name ? (view.down ? "descending" : "ascending") : "none";
  const mark = { ascending: " ▲", descending: " ▼", none: "" }[direction];
  const button = make("button", { type: "button", "data-sort": name, onclick: () => { sortBy(name); document.querySelector(`[data-sort="${name}"]`).focus(); } }, title + mark);
  return make("th", { scope: "col", "aria-sort": direction, className: TEXTUAL.includes(name) ? "" : "number" }, button);
}

function cell(name, number, place) {
  const value = view.index[name][number];
  if (name === "episode") {
    return make("td", { className: "number" },
      make("button", { type: "button", onclick: () => open(place) }, value === null ? "read" : String(value)));
  }
  const outcome = name === "outcome" && OUTCOMES.includes(value) ? value : "";
  return make("td", { className: TEXTUAL.includes(name) ? outcome : "number" }, value === null ? "" : String(value));
}

function showRows() {
  const several = new Set(view.index.environment).size > 1;
  const columns = COLUMNS.filter(([name]) => name !== "environment" || several);
  const first = view.page * ROWS;
  const body = view.found.slice(first, first + ROWS).map((number, place) => {
    const line = make("tr", {}, ...columns.map(([name]) => cell(name, number, first + place)));
    if (number === view.open) line.setAttribute("aria-current", "true");
    return line;
  });
  at("rows").replaceChildren(
    make("thead", {}, make("tr", {}, ...columns.map(([name, title]) => heading(name, title)))), make("tbody", {}, ...body));
  const pages = Math.max(1, Math.ceil(view.found.length / ROWS));
  const count = (number) => number.toLocaleString("en");
  at("count").textContent = `${count(view.found.length)} of ${count(view.index.part.length)} episodes`;
  at("page-number").textContent = `page ${view.page + 1} of ${pages}`;
  at("previous-page").disabled = view.page === 0;
  at("next-page").disabled = view.page + 1 >= pages;
}

function turnPage(step) {
  view.page += step;
  showRows();
}

/** Show the episode at a place of the filtered list. */
async function open(place, scroll = true) {
  const number = view.found[place];
  view.open = number;
  view.page = Math.floor(place / ROWS);
  showRows();
  const episode = row(number);
  const turns = await dialogueOf(episode);
  if (view.open !== number) return;
  const step = (title, to) =>
    make("button", { type: "button", disabled: to < 0 || to >= view.found.length, onclick: () => open(to) }, title);
  const way = (title, tokens) => make("label", {}, make("input", {
    type: "radio", name: "way", checked: asTokens === tokens, onchange: () => { asTokens = tokens; open(place, false); },
  }), ` ${title}`);
  const told = [
    ...["iteration", "prompt", "group"].map((name) => (episode[name] === null ? "" : `${name} ${episode[name]}`)),
    episode.environment, episode.outcome, episode.finish && `ended by ${episode.finish}`,
    episode.reward === null ? "no reward" : `reward ${episode.reward}`,
    `${episode.tokens} tokens`, episode.samples > 1 ? `${episode.samples} samples` : "",
  ];
  at("dialogue").replaceChildren(
    make("h3", {}, `Episode ${episode.episode ?? ""}`),
    make("p", { className: "quiet" }, told.filter((text) => text).join(", ")),
    make("div", { className: "bar" }, step("Previous", place - 1), step("Next", place + 1),
      ...(view.index.shown.includes(2) ? [way("Text", false), way("Tokens", true)] : [])),
    ...turns);
  if (scroll) {
    at("dialogue").scrollTop = 0;
    at("dialogue").focus({ preventScroll: true });
    if (innerWidth <= 900) at("dialogue").scrollIntoView();
  }
}

async function showEpisodes() {
  fillList(at("notes"), data.notes);
  view.index = await decode("index");
  at("filters").hidden = at("reading").hidden = !view.index.part;
  if (!view.index.part) return;
  at("dialogue").append(make("p", { className: "quiet" }, "Choose an episode of the list to read it."));
  at("previous-page").onclick = () => turnPage(-1);
  at("next-page").onclick = () => turnPage(1);
  buildFilters();
  filter();
}

showRun();
placeSections();
placeOwnCharts();
draw();
showContents();
showEpisodes().then(() => { document.body.dataset.ready = "true"; });
