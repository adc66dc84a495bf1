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

/** Each stage as a lane, in which the colour changes with the stage deployment. */
function lanes() {
  const stages = [...new Set(data.spans.map((each) => each.stage))];
  const number = {};
  const tints = data.spans.map((each) => {
    number[each.stage] = (number[each.stage] ?? -1) + 1;
    return colour(PALETTE[number[each.stage] % PALETTE.length]);
  });
  const trace = {
    type: "bar", orientation: "h", y: data.spans.map((each) => each.stage), width: 0.55,
    base: data.spans.map((each) => each.first - 0.5),
    x: data.spans.map((each) => each.last - each.first + 1), marker: { color: tints },
    text: data.spans.map((each) => `${each.deployment} (${span(each.first, each.last)})`),
    textposition: "none", hoverinfo: "text",
  };
  const chart = { y: "", series: [{ x: [Math.max(...data.spans.map((each) => each.last))] }] };
  const layout = frame(chart);
  layout.hovermode = "closest";
  layout.barmode = "overlay";
  layout.showlegend = false;
  layout.yaxis = { ...layout.yaxis, type: "category", categoryorder: "array", categoryarray: stages.reverse(), title: { text: "" } };
  return [[trace], layout];
}

/** Engines and ranks as lanes over time; a stage has one colour, a wait is faded. */
function strip() {
  const spans = data.occupancy.spans;
  const names = [...new Set(spans.map((each) => each.lane))];
  const stages = [...new Set(spans.map((each) => each.stage).filter((stage) => stage))];
  const tint = (stage) => colour(PALETTE[stages.indexOf(stage) % PALETTE.length]);
  const traces = [...stages, ""].map((stage) => {
    const own = spans.filter((each) => each.stage === stage);
    return {
      name: stage || "waits", type: "bar", orientation: "h", width: stage ? 0.6 : 0.2,
      y: own.map((each) => each.lane), base: own.map((each) => each.begin), x: own.map((each) => each.length),
      marker: { color: stage ? tint(stage) : colour("quiet") }, text: own.map((each) => each.text),
      textposition: "none", hoverinfo: "text",
    };
  });
  const layout = frame({ y: "", series: traces });
  layout.hovermode = "closest";
  layout.barmode = "overlay";
  layout.xaxis = { ...layout.xaxis, title: { text: "seconds" }, tickformat: "", dtick: undefined, range: undefined };
  layout.yaxis = { ...layout.yaxis, type: "category", categoryorder: "array", categoryarray: names.reverse(), title: { text: "" } };
  return [traces, layout];
}

function placeOwnCharts() {
  if (data.spans.length) {
    place(at("lanes"), "Stage deployments over iterations", lanes);
    at("lanes").append(make("figcaption", { className: "quiet" }, "The colour changes where the stage deployment does."));
  }
  if (data.occupancy.spans.length) {
    place(at("strip"), "Engines and ranks over time", strip);
    at("strip").append(make("figcaption", { className: "quiet" }, "By the ledger of the last attempt. Thin bars are waits: point at one to see for whom."));
  }
}
