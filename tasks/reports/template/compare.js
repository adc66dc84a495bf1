const PROMPTS = 15;
const list = { prompts: [], page: 0, open: -1 };

/** A run's name in the colour of its curves. */
const runName = (number) =>
  make("span", { className: `run run-${number % PALETTE.length}` }, data.labels[number]);

/** A table with one column of names, and one for each run. */
function fillByRun(table, title, rows, number) {
  fillTable(table, [
    { title, cell: (row) => row[0] },
    ...data.labels.map((label, run) => ({ title: label, number, cell: (row) => row[run + 1] })),
  ], rows);
}

function showTables() {
  document.title = `Runs ${data.labels.join(", ")}`;
  at("name").textContent = data.labels.join(", ");
  at("made").textContent = `Made by earl compare, ${data.made}. Times are those of the machine that made it.`;
  const names = Object.keys(data.facts[0]).filter((name) => name !== "run" && data.facts.some((each) => each[name]));
  fillTable(at("facts"), [
    { title: "run", cell: (row) => runName(data.facts.indexOf(row)) },
    ...names.map((name) => ({ title: name, cell: (row) => row[name] })),
  ], data.facts);
  at("no-differences").hidden = data.settings.length > 0;
  if (data.settings.length) fillByRun(at("settings-that-differ"), "setting", data.settings, false);
  at("seconds").hidden = data.seconds.length === 0;
  if (data.seconds.length) fillByRun(at("stages"), "stage", data.seconds, true);
  at("commands").replaceChildren(
    ...data.commands.flatMap(([what, command]) =>
      [make("dt", {}, what), make("dd", {}, make("code", {}, command))]));
}

/** The part of a prompt that a line of the list has room for: its end, where the question stands. */
const shortened = (text) => {
  const line = text.replaceAll(/\s+/g, " ").trim();
  return line.length > 120 ? `… ${line.slice(-118)}` : line || "(no text)";
};

const number = (value) => (value === null ? "" : String(value));

function showPrompts() {
  const several = new Set(list.prompts.map((each) => each.environment)).size > 1;
  const first = list.page * PROMPTS;
  const shown = list.prompts.slice(first, first + PROMPTS);
  fillTable(at("rows"), [
    { title: "prompt", cell: (each) => make("button", { type: "button", className: "prompt", onclick: () => openPrompt(list.prompts.indexOf(each)) }, shortened(each.prompt)) },
    ...(several ? [{ title: "environment", cell: (each) => each.environment }] : []),
    ...data.labels.map((label, run) => ({ title: label, number: true, cell: (each) => number(each.returns[run]) })),
    { title: "apart", number: true, cell: (each) => number(each.spread) },
  ], shown);
  [...at("rows").querySelectorAll("tbody tr")].forEach((line, place) => {
    if (first + place === list.open) line.setAttribute("aria-current", "true");
  });
  const pages = Math.max(1, Math.ceil(list.prompts.length / PROMPTS));
  at("pages").hidden = pages === 1;
  at("page-number").textContent = `page ${list.page + 1} of ${pages}`;
  at("previous-page").disabled = list.page === 0;
  at("next-page").disabled = list.page + 1 >= pages;
}

function turnPage(step) {
  list.page += step;
  showPrompts();
}

/** One run's episodes of a prompt, one of them shown. */
function column(run, episodes) {
  const box = make("article", { className: "episode" });
  const show = (place) => {
    const each = episodes[place];
    const told = [
      each.iteration !== null && `iteration ${each.iteration}`, each.episode_id !== null && `episode ${each.episode_id}`,
      each.outcome, each.finish_reason && `ended by ${each.finish_reason}`,
      each.reward === null ? "no reward" : `reward ${Number(each.reward.toPrecision(6))}`,
    ];
    const step = (title, to) => make("button", {
      type: "button", disabled: to < 0 || to >= episodes.length, onclick: () => show(to),
    }, title);
    box.replaceChildren(
      make("h3", {}, runName(run)),
      make("p", { className: "quiet" }, told.filter((text) => text).join(", ")),
      ...(episodes.length > 1 ? [make("div", { className: "bar" }, step("Previous", place - 1),
        make("span", {}, `${place + 1} of ${episodes.length}`), step("Next", place + 1))] : []),
      ...textTurns(each.texts, each.rewards.map((reward) => reward && Number(reward.toPrecision(6)))));
  };
  show(0);
  return box;
}

function openPrompt(place, scroll = true) {
  list.open = place;
  showPrompts();
  at("side-by-side").replaceChildren(...list.prompts[place].episodes.map((own, run) => column(run, own)));
  if (scroll) {
    at("side-by-side").focus({ preventScroll: true });
    at("side-by-side").scrollIntoView({ block: "nearest" });
  }
}

async function showEpisodes() {
  fillList(at("notes"), data.notes);
  list.prompts = await decode("equal");
  at("about").hidden = at("pages").hidden = !list.prompts.length;
  if (!list.prompts.length) return;
  at("previous-page").onclick = () => turnPage(-1);
  at("next-page").onclick = () => turnPage(1);
  openPrompt(0, false);
}

showTables();
placeSections();
draw();
showContents();
showEpisodes().then(() => { document.body.dataset.ready = "true"; });
